"""Runs the schedules of all stages on paper: finds deadlocks, wrong buffers and lost micro-batches,
and measures time and memory.

Event-driven: a stage runs until it has to wait for a message, and the sender wakes it. Sends do not
block and receives do, so the result does not depend on which stage is visited first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed.runtime.pipe.schedule import (
    BackwardInputPass,
    BackwardPass,
    BackwardWeightPass,
    BufferOpInstruction,
    Chunk,
    ForwardPass,
    LoadMicroBatch,
    MicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    SendActivation,
    SendGrad,
    StageId,
)

# What has happened to a micro-batch in its buffer. A buffer is free once everything that its part
# of the model does is done.
_LOADED, _INPUT, _FORWARD, _SENT, _OUTPUT_GRAD, _INPUT_GRAD, _WEIGHT_GRAD, _GRAD_SENT = (
    1 << bit for bit in range(8)
)


class _Rule(NamedTuple):
    """What an instruction does to its buffer, and what has to be done before."""

    does: int
    needs: int


_RULES: dict[type[PipeInstruction], _Rule] = {
    LoadMicroBatch: _Rule(_LOADED, 0),
    RecvActivation: _Rule(_INPUT, 0),
    ForwardPass: _Rule(_FORWARD, _LOADED | _INPUT),
    SendActivation: _Rule(_SENT, _FORWARD),
    RecvGrad: _Rule(_OUTPUT_GRAD, _FORWARD),
    BackwardPass: _Rule(_INPUT_GRAD | _WEIGHT_GRAD, _FORWARD | _OUTPUT_GRAD),
    BackwardInputPass: _Rule(_INPUT_GRAD, _FORWARD | _OUTPUT_GRAD),
    BackwardWeightPass: _Rule(_WEIGHT_GRAD, _INPUT_GRAD),
    SendGrad: _Rule(_GRAD_SENT, _INPUT_GRAD),
}
_DONE_BY = {
    _LOADED: "LoadMicroBatch",
    _INPUT: "RecvActivation",
    _FORWARD: "ForwardPass",
    _SENT: "SendActivation",
    _OUTPUT_GRAD: "RecvGrad",
    _INPUT_GRAD: "BackwardPass or BackwardInputPass",
    _WEIGHT_GRAD: "BackwardPass or BackwardWeightPass",
    _GRAD_SENT: "SendGrad",
}
# By how many parts of the model a message moves.
_SENDS: dict[type[PipeInstruction], int] = {SendActivation: 1, SendGrad: -1}
_RECEIVES: dict[type[PipeInstruction], int] = {RecvActivation: 1, RecvGrad: -1}

# (part that receives, 1 for activations and -1 for gradients)
_ChannelKey = tuple[int, int]


@dataclass(frozen=True)
class CostModel:
    """How long passes of one micro-batch through all chunks of a stage take, in any unit.

    `latency` is from a send to the moment when the message is there.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    latency: float = 0.0


class Span(NamedTuple):
    """A pass and when it ran."""

    start: float
    end: float
    instruction: BufferOpInstruction


class Place(NamedTuple):
    """An instruction of a stage, by the step that holds it."""

    stage: StageId
    step: int
    instruction: PipeInstruction | None

    def __str__(self) -> str:
        return f"stage {self.stage}, step {self.step}, {self.instruction or 'end of the schedule'}"


class ScheduleError(RuntimeError):
    """A schedule is wrong.

    Attributes:
        places: The instructions at fault; for a deadlock those that wait, and the ends of the
            stages that should have sent.
        spans: What each stage had computed by then, when it was recorded.
    """

    def __init__(self, places: Sequence[Place], reason: str) -> None:
        super().__init__("\n".join([reason, *(f"  at {place}" for place in places)]))
        self.places = tuple(places)
        self.spans: tuple[tuple[Span, ...], ...] = ()


class ScheduleDeadlockError(ScheduleError):
    """Stages wait for messages that are never sent, or for receivers that never come."""


@dataclass(frozen=True)
class Simulation:
    """What a batch costs.

    Attributes:
        makespan: When the last pass ends.
        busy: How long each stage computes.
        peak_activations: For each stage, how many micro-batches are at most between their forward
            and the end of their backward at once; one in two chunks of the stage counts twice.
        spans: The passes of each stage in order, when they were recorded.
    """

    makespan: float
    busy: tuple[float, ...]
    peak_activations: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]

    @property
    def bubble_fractions(self) -> tuple[float, ...]:
        """The part of the makespan in which each stage waits."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        return sum(self.bubble_fractions) / len(self.busy)


def simulate(
    schedules: Sequence[PipeSchedule],
    costs: CostModel | None = None,
    *,
    synchronous: bool = False,
    record: bool = False,
) -> Simulation:
    """Run one batch; every pass costs 1 and messages 0 if `costs` are not given.

    Args:
        schedules: Of every stage, in order. Instructions carry `micro_batch` and `chunk`.
        costs: How long things take.
        synchronous: A send blocks until the message is received, unless a stage sends to itself.
        record: Keep when each pass ran, in `spans`.

    Raises:
        ScheduleDeadlockError: The stages wait for one another; it names those that wait.
        ScheduleError: An instruction is wrong; it names the instruction, its step and its stage.
        ValueError: The schedules don't belong to one pipeline.
    """
    if not schedules:
        raise ValueError("A pipeline has at least one stage; give the schedule of each of them")
    shapes = {(each.micro_batches, each.stages, each.num_chunks) for each in schedules}
    if len(shapes) > 1 or [each.stage_id for each in schedules] != list(range(schedules[0].stages)):
        given = [(one.stage_id, one.micro_batches, one.stages, one.num_chunks) for one in schedules]
        raise ValueError(
            "Give the schedules of all stages of one pipeline, in order; "
            f"(stage_id, micro_batches, stages, num_chunks) are {given}"
        )
    return _Simulator(schedules, costs or CostModel(), synchronous, record).run()


def needs_asynchronous_sends(schedules: Sequence[PipeSchedule]) -> bool:
    """Tell whether schedules that are right when sends do not block would deadlock if they did."""
    try:
        simulate(schedules, synchronous=True)
    except ScheduleDeadlockError:
        return True
    return False


class _Stage:
    """Where one stage stands: its next instruction, its clock and its buffers."""

    def __init__(self, schedule: PipeSchedule, training: bool, record: bool) -> None:
        self.id = schedule.stage_id
        self.clock = 0.0
        self.busy = 0.0
        self.end = 0.0
        self.peak = 0
        self.spans: list[Span] | None = [] if record else None
        self.closed: list[type[PipeInstruction]] = []
        self.waiting = False
        self._current: tuple[int, PipeInstruction | None] = (0, None)
        self._instructions = _numbered(schedule)
        self._schedule = schedule
        self._training = training
        self._masks = [self._mask(chunk) for chunk in range(schedule.num_chunks)]
        self._live = 0
        self._owner: list[tuple[MicroBatch, Chunk] | None] = [None] * schedule.num_pipe_buffers()
        self._done = [0] * schedule.num_pipe_buffers()
        self._started: set[tuple[MicroBatch, Chunk]] = set()
        self._finished: set[tuple[MicroBatch, Chunk]] = set()

    @property
    def place(self) -> Place:
        """The current instruction; None after the last one."""
        return Place(self.id, *self._current)

    def _mask(self, chunk: Chunk) -> int:
        """All that has to happen to a micro-batch on the part that is `chunk` of this stage."""
        stages = self._schedule.stages
        part, last = chunk * stages + self.id, stages * self._schedule.num_chunks - 1
        mask = (
            _FORWARD
            | (_LOADED if part in (0, last) else 0)
            | (_INPUT if part > 0 else 0)
            | (_SENT if part < last else 0)
        )
        if self._training:
            mask |= (
                _INPUT_GRAD
                | _WEIGHT_GRAD
                | (_OUTPUT_GRAD if part < last else 0)
                | (_GRAD_SENT if part > 0 else 0)
            )
        return mask

    def advance(self) -> PipeInstruction | None:
        """Go to the next instruction; stay at the one it waits in, if it waits."""
        if self.waiting:
            self.waiting = False
        else:
            self._current = next(self._instructions)
        return self._current[1]

    def error(self, reason: str) -> ScheduleError:
        return ScheduleError([self.place], reason)

    def compute(self, instruction: BufferOpInstruction, cost: float) -> None:
        start = self.clock
        self.clock = self.end = start + cost
        self.busy += cost
        if self.spans is not None:
            self.spans.append(Span(start, self.clock, instruction))

    def apply(self, instruction: BufferOpInstruction, rule: _Rule) -> None:
        """Follow what the instruction does to its buffer."""
        buffer_id, does = instruction.buffer_id, rule.does
        key = (instruction.micro_batch, instruction.chunk)
        if not 0 <= buffer_id < len(self._owner):
            raise self.error(
                f"buffer {buffer_id} does not exist: the stage has num_pipe_buffers() = "
                f"{len(self._owner)}"
            )
        if self._owner[buffer_id] != key:
            if not does & (_LOADED | _INPUT):
                raise self.error(f"buffer {buffer_id} holds {self._what(buffer_id)}")
            self._reserve(buffer_id, key)
        mask, done = self._masks[instruction.chunk], self._done[buffer_id]
        if does & ~mask:
            raise self.error(
                "nothing of the kind happens on this part of the model in this kind of batch"
            )
        if done & does:
            raise self.error(f"it runs twice for micro-batch {instruction.micro_batch}")
        if rule.needs & mask & ~done:
            raise self.error(
                f"buffer {buffer_id} is read before {_names(rule.needs & mask & ~done)} has "
                "written it"
            )
        self._done[buffer_id] = done = done | does
        if does & (_FORWARD | _WEIGHT_GRAD) or done == mask:
            self._count(does, done == mask)
        if done == mask:
            self._owner[buffer_id] = None
            self._finished.add(key)  # type: ignore[arg-type]  # _reserve has refused None

    def _reserve(self, buffer_id: int, key: tuple[MicroBatch | None, Chunk]) -> None:
        """Give a free buffer to a micro-batch that has not been here."""
        micro_batch, chunk = key
        if (
            micro_batch is None
            or not 0 <= micro_batch < self._schedule.micro_batches
            or not 0 <= chunk < len(self._masks)
        ):
            raise self.error(f"there is no micro-batch {micro_batch} of chunk {chunk}")
        if self._owner[buffer_id] is not None:
            raise self.error(
                f"buffer {buffer_id} is still in use: it holds {self._what(buffer_id)}"
            )
        if (micro_batch, chunk) in self._started:
            raise self.error(f"micro-batch {micro_batch} of chunk {chunk} has been here before")
        self._started.add((micro_batch, chunk))
        self._owner[buffer_id], self._done[buffer_id] = (micro_batch, chunk), 0

    def _what(self, buffer_id: int) -> str:
        owner = self._owner[buffer_id]
        if owner is None:
            return "nothing"
        micro_batch, chunk = owner
        return (
            f"micro-batch {micro_batch} of chunk {chunk}, which lacks "
            f"{_names(self._masks[chunk] & ~self._done[buffer_id])}"
        )

    def _count(self, does: int, finished: bool) -> None:
        """Count activations: live from the forward until the last backward pass, or the send."""
        if does == _FORWARD:
            self._live += 1
            self.peak = max(self.peak, self._live)
        if does & _WEIGHT_GRAD or (finished and not self._training):
            self._live -= 1

    def close(self, kind: type[PipeInstruction]) -> None:
        self.require_all()
        if kind in self.closed or OptimizerStep in self.closed:
            before = ", ".join(each.__name__ for each in self.closed)
            raise self.error(
                f"it comes after {before}; each of them runs once, the optimizer step last"
            )
        self.closed.append(kind)

    def require_all(self) -> None:
        """Refuse the end of a batch in which a micro-batch has not been through every chunk."""
        whole = (
            (micro_batch, chunk)
            for chunk in range(len(self._masks))
            for micro_batch in range(self._schedule.micro_batches)
        )
        lacking = [key for key in whole if key not in self._finished]
        if lacking:
            micro_batch, chunk = lacking[0]
            detail = f"micro-batch {micro_batch} of chunk {chunk} never ran"
            if lacking[0] in self._started:
                detail = self._what(self._owner.index(lacking[0]))
            raise self.error(
                f"the batch ends before all of it is done ({len(lacking)} missing): {detail}"
            )


def _numbered(schedule: PipeSchedule) -> Iterator[tuple[int, PipeInstruction | None]]:
    """Each instruction with the index of its step; None after the last one."""
    index = 0
    for index, step in enumerate(schedule.steps()):
        for instruction in step:
            yield index, instruction
    yield index, None


def _names(bits: int) -> str:
    return ", ".join(name for bit, name in _DONE_BY.items() if bits & bit)


class _Message(NamedTuple):
    """What arrives when, and who waits for it to be received."""

    arrival: float
    micro_batch: MicroBatch | None
    sender: _Stage | None
    place: Place


class _Simulator:
    """The stages, and the messages between them."""

    def __init__(
        self, schedules: Sequence[PipeSchedule], costs: CostModel, synchronous: bool, record: bool
    ) -> None:
        self._num_stages = len(schedules)
        self._synchronous = synchronous
        self._latency = costs.latency
        training = any(each.closing for each in schedules)
        self._training = training
        self._stages = [_Stage(each, training, record) for each in schedules]
        self._channels: dict[_ChannelKey, deque[_Message]] = {}
        self._receivers: dict[_ChannelKey, _Stage] = {}
        self._ready = deque(self._stages)
        num_chunks = schedules[0].num_chunks
        self._costs: dict[type[PipeInstruction], float] = {
            ForwardPass: costs.forward / num_chunks,
            BackwardPass: (costs.backward_input + costs.backward_weight) / num_chunks,
            BackwardInputPass: costs.backward_input / num_chunks,
            BackwardWeightPass: costs.backward_weight / num_chunks,
        }

    def run(self) -> Simulation:
        try:
            while self._ready:
                self._run(self._ready.popleft())
            self._check_end()
        except ScheduleError as error:
            error.spans = self._spans()
            raise
        return Simulation(
            makespan=max(each.end for each in self._stages),
            busy=tuple(each.busy for each in self._stages),
            peak_activations=tuple(each.peak for each in self._stages),
            spans=self._spans(),
        )

    def _spans(self) -> tuple[tuple[Span, ...], ...]:
        return tuple(tuple(each.spans or ()) for each in self._stages)

    def _run(self, stage: _Stage) -> None:
        """Run a stage until it ends or waits."""
        while (instruction := stage.advance()) is not None:
            kind = type(instruction)
            rule = _RULES.get(kind)
            if rule is None:
                stage.close(kind)
                continue
            if not isinstance(instruction, BufferOpInstruction):
                raise AssertionError(f"{instruction} has a rule for its buffer and names none")
            if kind in _RECEIVES and not self._receive(stage, instruction):
                return
            stage.apply(instruction, rule)
            if kind in self._costs:
                stage.compute(instruction, self._costs[kind])
            if kind in _SENDS and not self._send(stage, instruction):
                return

    def _send(self, stage: _Stage, instruction: BufferOpInstruction) -> bool:
        """Post a message; False when the stage waits until it is received."""
        direction = _SENDS[type(instruction)]
        part = instruction.chunk * self._num_stages + stage.id + direction
        blocks = self._synchronous and part % self._num_stages != stage.id
        message = _Message(
            stage.clock + self._latency,
            instruction.micro_batch,
            stage if blocks else None,
            stage.place,
        )
        self._channels.setdefault((part, direction), deque()).append(message)
        receiver = self._receivers.pop((part, direction), None)
        if receiver is not None:
            self._ready.append(receiver)
        return not blocks

    def _receive(self, stage: _Stage, instruction: BufferOpInstruction) -> bool:
        """Take the next message; False when there is none yet."""
        direction = _RECEIVES[type(instruction)]
        key = (instruction.chunk * self._num_stages + stage.id, direction)
        queue = self._channels.get(key)
        if not queue:
            self._receivers[key] = stage
            stage.waiting = True
            return False
        message = queue.popleft()
        if message.micro_batch != instruction.micro_batch:
            raise ScheduleError(
                [stage.place, message.place],
                f"it gets the message of micro-batch {message.micro_batch} instead",
            )
        stage.clock = max(stage.clock, message.arrival)
        if message.sender is not None:
            message.sender.clock = max(message.sender.clock, stage.clock)
            self._ready.append(message.sender)
        return True

    def _check_end(self) -> None:
        """Refuse stages that wait and micro-batches that nobody ran. (A part that has run every
        micro-batch has received every message.)
        """
        waiting = [each.place for each in self._stages if each.place.instruction is not None]
        if waiting:
            lost = [
                message.place
                for queue in self._channels.values()
                for message in queue
                if message.place not in waiting
            ]
            extra = f"; sent and never received: {'; '.join(map(str, lost))}" if lost else ""
            # Whoever is waited for and has ended is at fault as much as those that wait.
            owners = {
                self._stages[(part - direction) % self._num_stages]
                for part, direction in self._receivers
            }
            ended = [
                one.place for one in self._stages if one in owners and one.place.instruction is None
            ]
            reason = f"deadlock: {len(waiting)} of {self._num_stages} stages wait forever{extra}"
            raise ScheduleDeadlockError([*waiting, *ended], reason)
        for stage in self._stages:
            stage.require_all()
            if self._training and not {ReduceGrads, OptimizerStep} <= set(stage.closed):
                raise stage.error("the batch ends without ReduceGrads and OptimizerStep")
            if stage.closed != self._stages[0].closed:
                names = [[each.__name__ for each in one.closed] for one in (stage, self._stages[0])]
                raise stage.error(
                    f"the batch ends with {names[0]}, and on stage 0 with {names[1]}: one would "
                    "wait for the other"
                )
