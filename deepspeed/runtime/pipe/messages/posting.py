"""When a stage may post its receives, worked out from the schedules of all stages. Pure integers.

[Note: what a posted receive depends on]
A receive that is posted occupies the device until its sender has sent. The sender's message stands
behind everything that its schedule has before: receives among it, whose senders have theirs, and so
on back to messages of this stage. A receive that is posted while one of these has not been issued
here makes the device depend on what this host does next, and whatever makes the host wait for the
device (a synchronize in a layer, an allocator that gives memory back) hangs. So each receive waits
for the last instruction of its own stage that it depends on.

[Note: lanes]
Messages from one stage to another of one kind (activations, gradients) share a communicator however
many model chunks there are: a device has few streams for communicators, and two that share one
without knowing hold each other up. One communicator carries transfers in one order, so receives are
posted in the order in which the sender's schedule sends. These orders are known to both ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from deepspeed.runtime.pipe.schedule import (
    BufferOpInstruction,
    ListedSchedule,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
    StageId,
)


class ChannelKey(NamedTuple):
    """The channel over the border before part `border`; `backwards` ones carry gradients."""

    border: int
    backwards: bool


class Arrival(NamedTuple):
    """A message to receive through a channel, posted when the stage has issued `needs` steps."""

    channel: ChannelKey
    needs: int


class Lane(NamedTuple):
    """What shares a communicator, seen from the receiver."""

    sender: StageId
    backwards: bool


def _channel_of(instruction: PipeInstruction, stage: StageId, stages: int) -> ChannelKey | None:
    if not isinstance(instruction, BufferOpInstruction):
        return None
    part = instruction.chunk * stages + stage
    if isinstance(instruction, (SendActivation, RecvGrad)):
        return ChannelKey(part + 1, isinstance(instruction, RecvGrad))
    if isinstance(instruction, (RecvActivation, SendGrad)):
        return ChannelKey(part, isinstance(instruction, SendGrad))
    return None


class _Run:
    """All stages, executed with receives that block."""

    def __init__(self, schedules: Sequence[PipeSchedule], receiver: StageId) -> None:
        self._programs = [
            [one for step in schedule.steps() for one in step] for schedule in schedules
        ]
        self._receiver = receiver
        self._at = [0] * len(schedules)
        # Of each stage: how many instructions of the receiver it depends on by now.
        self._needs = [0] * len(schedules)
        self._sent: dict[ChannelKey, deque[int]] = {}
        self.lanes: dict[Lane, list[Arrival]] = {}

    def advance(self, stage: StageId) -> bool:
        """Run a stage until it has to wait; whether it did anything."""
        program, started = self._programs[stage], self._at[stage]
        stages = len(self._programs)
        while self._at[stage] < len(program):
            instruction = program[self._at[stage]]
            channel = _channel_of(instruction, stage, stages)
            if isinstance(instruction, (RecvActivation, RecvGrad)) and channel is not None:
                sent = self._sent.get(channel)
                if not sent:
                    break
                self._needs[stage] = max(self._needs[stage], sent.popleft())
            self._at[stage] += 1
            if stage == self._receiver:
                self._needs[stage] = self._at[stage]
            if isinstance(instruction, (SendActivation, SendGrad)) and channel is not None:
                self._send(stage, channel)
        return self._at[stage] > started

    def _send(self, stage: StageId, channel: ChannelKey) -> None:
        self._sent.setdefault(channel, deque()).append(self._needs[stage])
        into = (channel.border - channel.backwards) % len(self._programs)
        if into == self._receiver != stage:
            arrival = Arrival(channel, self._needs[stage])
            self.lanes.setdefault(Lane(stage, channel.backwards), []).append(arrival)

    def unfinished(self) -> list[StageId]:
        return [stage for stage, at in enumerate(self._at) if at < len(self._programs[stage])]


def arrivals(schedules: Sequence[PipeSchedule], receiver: StageId) -> dict[Lane, list[Arrival]]:
    """List the messages that a stage receives from other stages, by lane, in the order of sending.

    Raises:
        ValueError: The schedules wait for each other.
    """
    run = _Run(schedules, receiver)
    while any([run.advance(stage) for stage in range(len(schedules))]):
        pass
    if run.unfinished():
        raise ValueError(
            f"the schedules of stages {run.unfinished()} wait for each other for ever; "
            "runtime.pipe.simulator.simulate() shows where"
        )
    return run.lanes


class Plan(NamedTuple):
    """What a stage runs for a batch, and what it receives meanwhile."""

    schedule: PipeSchedule
    arrivals: dict[Lane, list[Arrival]]


def plan_of(stages: Sequence[PipeSchedule], stage: StageId) -> Plan:
    """Make the plan of one of these stages, in instructions: every batch runs the same."""
    own = stages[stage]
    listed = ListedSchedule(
        own.micro_batches, own.stages, stage, own.steps(), own.num_pipe_buffers(), own.num_chunks
    )
    return Plan(listed, arrivals(stages, stage))
