"""The accumulation tracker: the one answer to "is this the boundary"."""

import pytest

from deepspeed.runtime.gradients.accumulation import AccumulationTracker, BackwardState


def boundaries(tracker: AccumulationTracker, count: int) -> list[bool]:
    seen = []
    for _ in range(count):
        seen.append(tracker.is_boundary)
        tracker.advance()
    return seen


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_the_last_of_each_window_is_the_boundary(steps):
    # Kills: an off-by-one that steps after the first micro-batch instead of the last.
    expected = [(i + 1) % steps == 0 for i in range(3 * steps)]
    assert boundaries(AccumulationTracker(steps), 3 * steps) == expected


def test_what_is_said_from_outside_holds_until_said_again():
    # Kills: a forced answer that is forgotten at the next micro-batch (accelerate says it once per
    # change).
    tracker = AccumulationTracker(2)
    tracker.set_boundary(False)
    assert boundaries(tracker, 3) == [False, False, False]
    tracker.set_boundary(True)
    assert boundaries(tracker, 2) == [True, True]


def test_unmanaged_accumulation_leaves_counting_to_the_caller():
    # Kills: dividing or counting by `steps` although the caller does both.
    tracker = AccumulationTracker(4, managed=False)
    assert boundaries(tracker, 3) == [True, True, True]
    assert tracker.divisor == 1
    assert AccumulationTracker(4).divisor == 4


def test_no_sync_nests_and_ends_on_error():
    # Kills: a flag instead of a depth, and a block that stays open after an exception.
    tracker = AccumulationTracker(1)
    with pytest.raises(KeyError), tracker.no_sync():
        with tracker.no_sync():
            assert tracker.in_no_sync
        assert tracker.in_no_sync
        raise KeyError("x")
    assert not tracker.in_no_sync
    assert tracker.is_boundary  # no_sync says nothing about the boundary


def test_a_window_has_at_least_one_micro_batch():
    # Kills: a modulo by zero far away from its cause.
    with pytest.raises(ValueError, match="gradient_accumulation_steps must be at least 1, got 0"):
        AccumulationTracker(0)


def test_nothing_runs_at_the_start():
    # Kills: a first plain backward that is taken for a managed one.
    tracker = AccumulationTracker(3)
    assert tracker.state is BackwardState.IDLE and tracker.micro_steps == 0
