"""When receives are posted: as early as they depend on nothing to come, and not earlier."""

from collections import Counter, deque
from collections.abc import Sequence

import pytest

from deepspeed.runtime.pipe.messages.posting import ChannelKey, Lane, _channel_of, arrivals
from deepspeed.runtime.pipe.schedule import (
    InferenceSchedule,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
    make_schedule,
)

SHAPES = [
    (name, micro_batches, stages, chunks)
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("inference", 1))
    for micro_batches, stages in ((1, 2), (4, 2), (6, 3), (8, 4))
    if name != "interleaved" or micro_batches % stages == 0
]


def schedules_of(name: str, micro_batches: int, stages: int, chunks: int) -> list[PipeSchedule]:
    if name == "inference":
        return [InferenceSchedule(micro_batches, stages, stage, chunks) for stage in range(stages)]
    return [make_schedule(name, micro_batches, stages, stage, chunks) for stage in range(stages)]


def completes(
    schedules: Sequence[PipeSchedule], waiter: int, after: int, channel: ChannelKey, number: int
) -> bool:
    """Whether all stages end if one stops after some instructions, before a channel's message."""
    programs = [[item for step in schedule.steps() for item in step] for schedule in schedules]
    at, sent = [0] * len(programs), Counter[ChannelKey]()
    received, moved = Counter[ChannelKey](), True
    while moved:
        moved = False
        for stage, program in enumerate(programs):
            while at[stage] < len(program):
                if stage == waiter and at[stage] >= after and sent[channel] <= number:
                    break
                item = program[at[stage]]
                key = _channel_of(item, stage, len(programs))
                if isinstance(item, (RecvActivation, RecvGrad)) and key is not None:
                    if sent[key] <= received[key]:
                        break
                    received[key] += 1
                if isinstance(item, (SendActivation, SendGrad)) and key is not None:
                    sent[key] += 1
                at[stage] += 1
                moved = True
    return all(place == len(program) for place, program in zip(at, programs, strict=True))


@pytest.mark.parametrize("name, micro_batches, stages, chunks", SHAPES)
def test_as_early_as_can_be(name: str, micro_batches: int, stages: int, chunks: int) -> None:
    # Kills: a receive that is posted while its sender depends on what this host has to issue, and
    # one that is posted later than it could.
    schedules = schedules_of(name, micro_batches, stages, chunks)
    for receiver in range(stages):
        numbers: Counter[ChannelKey] = Counter()
        for coming in arrivals(schedules, receiver).values():
            for channel, needs in coming:
                number = numbers[channel]
                numbers[channel] += 1
                assert completes(schedules, receiver, needs, channel, number)
                assert not needs or not completes(schedules, receiver, needs - 1, channel, number)


@pytest.mark.parametrize("name, micro_batches, stages, chunks", SHAPES)
def test_lanes_have_every_message_in_the_senders_order(
    name: str, micro_batches: int, stages: int, chunks: int
) -> None:
    # Kills: an order in which one communicator would mix up two chunks' messages.
    schedules = schedules_of(name, micro_batches, stages, chunks)
    for receiver in range(stages):
        lanes = {key: deque(coming) for key, coming in arrivals(schedules, receiver).items()}
        for sender, schedule in enumerate(schedules):
            for step in schedule.steps():
                for item in step:
                    if not isinstance(item, (SendActivation, SendGrad)):
                        continue
                    channel = _channel_of(item, sender, stages)
                    assert channel is not None
                    if (channel.border - channel.backwards) % stages == receiver:
                        found = lanes[Lane(sender, channel.backwards)].popleft()
                        assert found.channel == channel
        assert not any(lanes.values())


def test_needs_are_monotonic_in_a_lane() -> None:
    # Kills: a message that could be posted, behind one that can not.
    for shape in SHAPES:
        schedules = schedules_of(*shape)
        for receiver in range(len(schedules)):
            for coming in arrivals(schedules, receiver).values():
                needs = [arrival.needs for arrival in coming]
                assert needs == sorted(needs)


def test_schedules_that_wait_for_each_other() -> None:
    whole = schedules_of("1f1b", 2, 2, 1)
    with pytest.raises(ValueError, match=r"stages \[1\] wait"):
        arrivals([schedules_of("1f1b", 1, 2, 1)[0], whole[1]], 0)
