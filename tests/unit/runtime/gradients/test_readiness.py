"""When buckets are released: in order, as often as hooks are expected, late ones remembered."""

import itertools
import random

import pytest

from deepspeed.runtime.gradients.readiness import ReadinessTracker, UnitReadiness


def released(tracker: ReadinessTracker, slots: list[int]) -> list[int]:
    return [bucket for slot in slots for bucket in tracker.mark(slot)]


def test_buckets_leave_in_order_whatever_the_arrival_order():
    # Kills: a complete bucket released before its predecessor: other ranks' collectives differ.
    bucket_of = [0, 0, 1, 2, 2]
    for arrival in itertools.permutations(range(5)):
        tracker = ReadinessTracker(bucket_of, 3)
        order = released(tracker, list(arrival))
        assert order == [0, 1, 2]
        assert not tracker.late and list(tracker.remaining()) == []


def test_a_bucket_waits_for_its_last_gradient_and_missing_ones_are_left_to_the_end():
    # Kills: an off-by-one in the count of missing gradients; buckets behind an unused parameter
    # that are never sent, or sent twice.
    tracker = ReadinessTracker([0, 0, 1], 2)
    assert released(tracker, [2, 0]) == []
    assert released(tracker, [1]) == [0, 1]
    tracker = ReadinessTracker([0, 1, 1, 2], 3)
    assert released(tracker, [0, 1, 3]) == [0]
    assert list(tracker.remaining()) == [1, 2]
    assert list(tracker.remaining()) == []


def test_a_held_gradient_keeps_its_bucket_until_the_end():
    # Kills: a bucket that leaves from its hook though other ranks' parts are still to be added.
    tracker = ReadinessTracker([0, 1, 1], 2)
    tracker.held = frozenset({2})
    assert released(tracker, [0, 1, 2]) == [0]
    assert list(tracker.remaining()) == [1] and not tracker.late
    tracker.reset()
    assert released(tracker, [2, 1, 0]) == [0]


def test_a_firing_after_release_is_late_and_releases_nothing():
    # Kills: a late gradient that is dropped silently, or that releases its successor early.
    tracker = ReadinessTracker([0, 1], 2)
    assert released(tracker, [0]) == [0]
    assert released(tracker, [0]) == []
    assert tracker.late == {0} and tracker.fired == [2, 0]
    assert released(tracker, [1]) == [1]


def test_a_slot_that_fires_repeatedly_is_waited_for_once_learned():
    # Kills: counting the first firing as complete although more are known to come.
    tracker = ReadinessTracker([0, 1], 2)
    released(tracker, [0, 0, 1])
    tracker.learn(tracker.fired)
    tracker.reset()
    assert tracker.learned and tracker.fires_repeatedly and tracker.expected == [2, 1]
    assert released(tracker, [0, 1]) == []
    assert released(tracker, [0]) == [0, 1]
    assert not tracker.late


def test_learning_never_expects_less_and_a_reset_starts_anew():
    # Kills: expecting zero of a parameter that was unused at first: its bucket would leave early.
    tracker = ReadinessTracker([0, 0], 1)
    tracker.learn([0, 3])
    tracker.learn([2, 1])
    assert tracker.expected == [2, 3]
    assert ReadinessTracker([0], 1).fires_repeatedly is False
    # Kills: state of an aborted backward that leaks into the next one.
    tracker = ReadinessTracker([0, 0, 1], 2)
    released(tracker, [0, 1, 0])
    tracker.reset()
    assert tracker.fired == [0, 0, 0] and not tracker.late
    assert released(tracker, [2, 1, 0]) == [0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_every_bucket_is_released_exactly_once(seed):
    # Kills: any double or lost release under random expectations, arrivals and omissions.
    generator = random.Random(seed)
    buckets = generator.randrange(1, 6)
    bucket_of = [generator.randrange(buckets) for _ in range(generator.randrange(12))]
    tracker = ReadinessTracker(bucket_of, buckets)
    tracker.learn([generator.randrange(4) for _ in bucket_of])
    for _ in range(3):
        arrivals = [slot for slot in range(len(bucket_of)) for _ in range(generator.randrange(4))]
        generator.shuffle(arrivals)
        order = released(tracker, arrivals) + list(tracker.remaining())
        assert order == list(range(buckets))
        assert all(
            tracker.fired[slot] > tracker.expected[slot] or bucket_of[slot] < buckets
            for slot in tracker.late
        )
        tracker.reset()


def test_buckets_of_units_leave_when_they_are_released_whatever_has_fired():
    # Kills: a bucket of stage 3 that a hook sends, one that is sent twice or never, a held one or
    # one with late gradients that does not wait for the end.
    tracker = UnitReadiness([0, 0, 1, 2, 3], 4)
    tracker.held = frozenset({3})
    assert released(tracker, [0, 1, 2]) == []
    assert tracker.release(1) and not tracker.release(1) and not tracker.release(2)
    assert tracker.release(3)
    assert released(tracker, [2, 3]) == [] and tracker.late == {2}
    assert list(tracker.remaining()) == [0, 2] and list(tracker.remaining()) == []
    tracker.learn(tracker.fired, [0, 0, 1, 0, 0])
    tracker.reset()
    assert not tracker.fires_repeatedly
    assert tracker.release(0) and not tracker.release(1)
    assert released(tracker, [2, 2]) == [] and not tracker.late
    assert list(tracker.remaining()) == [1, 2, 3]
    tracker.reset()
    tracker.has_units = False
    assert released(tracker, [0, 1]) == [0]
