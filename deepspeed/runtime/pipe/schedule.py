"""Pipeline schedules as data: the instructions of each stage, their order, and their buffers.

Pure integers, no torch: `PipelineEngine` executes the instructions, `simulator` checks them and
`schedule_text` prints them. A schedule says in which order its stage computes; `_Lowering` alone
turns that order into instructions.

What an executor has to give: instructions run in list order; sends do not block and receives do;
messages of one kind over one boundary between parts arrive in the order in which they were sent.
Part j of the model is chunk j // stages of stage j % stages; it sends activations to part j + 1 and
gradients to part j - 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

BufferId = int
Chunk = int
MicroBatch = int
StageId = int


class PipeInstruction:
    """One thing for the engine to do; each of its keyword arguments is an attribute."""

    def __init__(self, **kwargs: object) -> None:
        self.kwargs = kwargs
        self.__dict__.update(kwargs)

    @property
    def name(self) -> str:
        return type(self).__name__

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.kwargs == getattr(other, "kwargs", None)

    def __hash__(self) -> int:
        return hash((type(self), tuple(sorted(self.kwargs.items()))))

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """Step the optimizer and clear the gradients; every gradient has been reduced."""


class ReduceGrads(PipeInstruction):
    """Reduce the gradients of this stage over its data-parallel group."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of tied modules over the stages that hold a replica."""


class BufferOpInstruction(PipeInstruction):
    """An instruction on one buffer: what a micro-batch needs on a part from forward to backward.

    Attributes:
        buffer_id: Which buffer of the stage, unique over its chunks.
        micro_batch: Which micro-batch of the global batch; None when it was not given.
        chunk: Which of the model chunks of this stage, 0 without interleaving.
    """

    buffer_id: BufferId
    micro_batch: MicroBatch | None = None
    chunk: Chunk = 0

    def __init__(self, buffer_id: BufferId, **kwargs: object) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Load a micro-batch: the inputs on the first part, the labels on the last one."""


class ForwardPass(BufferOpInstruction):
    """Run the part's layers; on the last part the loss too."""


class BackwardPass(BufferOpInstruction):
    """Compute the gradients of the part's input and of its weights."""


class BackwardInputPass(BufferOpInstruction):
    """Compute the gradient of the part's input alone: all that the previous part waits for."""


class BackwardWeightPass(BufferOpInstruction):
    """Compute the gradients of the part's weights, for which nobody waits."""


class SendActivation(BufferOpInstruction):
    """Send the output of the forward pass to the next part, without waiting."""


class RecvActivation(BufferOpInstruction):
    """Receive the input of the forward pass from the previous part."""


class SendGrad(BufferOpInstruction):
    """Send the gradient of the input to the previous part, without waiting."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradient of the output from the next part."""


class Compute(NamedTuple):
    """One pass of one micro-batch through one chunk of a stage."""

    kind: type[BufferOpInstruction]
    micro_batch: MicroBatch
    chunk: Chunk


class PipeSchedule(ABC):
    """What one stage does for one batch of `micro_batches`.

    Attributes:
        num_chunks: Chunks of the model that each stage holds.
        closing: What ends the batch after its last micro-batch; empty when nothing is trained.
    """

    num_chunks: int = 1
    closing: tuple[type[PipeInstruction], ...] = (ReduceTiedGrads, ReduceGrads, OptimizerStep)

    def __init__(self, micro_batches: int, stages: int, stage_id: StageId) -> None:
        if micro_batches < 1 or stages < 1:
            raise ValueError(
                "A pipeline schedule needs at least 1 micro-batch and 1 stage, not "
                f"micro_batches={micro_batches}, stages={stages}"
            )
        if not 0 <= stage_id < stages:
            raise ValueError(
                f"stage_id={stage_id} is no stage of a pipeline of {stages}; give one of 0 to "
                f"{stages - 1}"
            )
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions in order, at most one pass with its communication per step."""

    @abstractmethod
    def num_pipe_buffers(self) -> int:
        """How many buffers the stage needs, over all its chunks."""

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()

    @property
    def stage(self) -> StageId:
        return self.stage_id

    @property
    def num_stages(self) -> int:
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.stages - 1

    def _rounds(self, chunks: Sequence[Chunk], kind: type[BufferOpInstruction]) -> list[Compute]:
        """Computations over `chunks` in rounds of `stages` micro-batches, each through all chunks.

        The last round is full whether micro-batches are left for it or not: stages pair the k-th
        forward pass with a backward pass by counting, and dropping the same surplus passes on all
        stages afterwards can't make one stage wait for another.
        """
        return [
            Compute(kind, micro_batch, chunk)
            for first in range(0, self.micro_batches, self.stages)
            for chunk in chunks
            for micro_batch in range(first, first + self.stages)
        ]


class _Lowering:
    """Turns the order in which a stage computes into steps: adds loads, messages, buffers and what
    ends the batch.

    A send opens the step after its pass rather than ending the step of the pass: the order is the
    same, and the steps of `TrainSchedule` and `InferenceSchedule` line up with time slots.
    """

    def __init__(self, schedule: PipeSchedule) -> None:
        self._schedule = schedule
        self._last_part = schedule.stages * schedule.num_chunks - 1
        self._free = deque(range(schedule.num_pipe_buffers()))
        self._reserved: dict[tuple[MicroBatch, Chunk], BufferId] = {}
        self._sends: list[PipeInstruction] = []

    def steps(self, slots: Iterable[Compute | None]) -> Iterator[list[PipeInstruction]]:
        """A step for each slot; None is a slot in which the stage has nothing to compute."""
        step: list[PipeInstruction] | None = None
        for slot in slots:
            if step is not None:
                yield step
            step, self._sends = self._sends, []
            if slot is not None:
                self._lower(slot, step)
        if step is not None:
            yield step + self._sends + [kind() for kind in self._schedule.closing]

    def _lower(self, slot: Compute, step: list[PipeInstruction]) -> None:
        kind, micro_batch, chunk = slot
        part = chunk * self._schedule.stages + self._schedule.stage_id
        key = (micro_batch, chunk)
        if kind is ForwardPass:
            # The oldest free buffer: its last message has had the most time to leave.
            self._reserved[key] = self._free.popleft()
        buffer_id = self._reserved[key]
        if kind is ForwardPass and part in (0, self._last_part):
            step.append(LoadMicroBatch(buffer_id, micro_batch=micro_batch, chunk=chunk))
        if kind is ForwardPass and part > 0:
            step.append(RecvActivation(buffer_id, micro_batch=micro_batch, chunk=chunk))
        if kind in (BackwardPass, BackwardInputPass) and part < self._last_part:
            step.append(RecvGrad(buffer_id, micro_batch=micro_batch, chunk=chunk))
        step.append(kind(buffer_id, micro_batch=micro_batch, chunk=chunk))
        if kind is ForwardPass and part < self._last_part:
            self._sends.append(SendActivation(buffer_id, micro_batch=micro_batch, chunk=chunk))
        if kind in (BackwardPass, BackwardInputPass) and part > 0:
            self._sends.append(SendGrad(buffer_id, micro_batch=micro_batch, chunk=chunk))
        if kind in (BackwardPass, BackwardWeightPass) or not self._schedule.closing:
            # Nothing but the send that opens the next step names this buffer again, and the next
            # reservation comes after it.
            self._free.append(self._reserved.pop(key))


def _one_forward_one_backward(
    forwards: Sequence[Compute], backwards: Sequence[Sequence[Compute]], warmup: int
) -> Iterator[Compute]:
    """`warmup` forwards, then a forward and a group of backward passes in turn, then the rest."""
    yield from forwards[:warmup]
    for index, group in enumerate(backwards):
        yield from forwards[warmup + index : warmup + index + 1]
        yield from group


class TrainSchedule(PipeSchedule):
    """1F1B: stage s holds at most stages - s micro-batches at once, and waits stages - 1 forward
    and backward passes per batch.

    Steps are 2 * (micro_batches + stages - 1) slots of one pass; a stage waits in empty ones.
    """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        return _Lowering(self).steps(
            map(self._slot, range(2 * (self.micro_batches + self.stages - 1)))
        )

    def num_pipe_buffers(self) -> int:
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _slot(self, time: int) -> Compute | None:
        """Forwards start at stage_id, backwards with the first gradient; both every other slot.

        The distance 2 * (stages - stage_id) - 1 between them is odd, so that they never meet.
        """
        first_backward = 2 * self.stages - 1 - self.stage_id
        for kind, start in ((ForwardPass, self.stage_id), (BackwardPass, first_backward)):
            micro_batch, between = divmod(time - start, 2)
            if between == 0 and 0 <= micro_batch < self.micro_batches:
                return Compute(kind, micro_batch, 0)
        return None


class InterleavedTrainSchedule(PipeSchedule):
    """1F1B over several chunks per stage (Narayanan et al. 2021): the wait shrinks by their number.

    A number of micro-batches that is no multiple of the stages leaves part of the last round empty.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: StageId, num_chunks: int) -> None:
        super().__init__(micro_batches, stages, stage_id)
        if num_chunks < 2:
            raise ValueError(
                "An interleaved schedule needs at least 2 model chunks per stage, not "
                f"num_chunks={num_chunks}; use 1f1b"
            )
        self.num_chunks = num_chunks

    def steps(self) -> Iterator[list[PipeInstruction]]:
        return _Lowering(self).steps(self._order())

    def num_pipe_buffers(self) -> int:
        return min(self._warmup() + 1, self.micro_batches * self.num_chunks)

    def _warmup(self) -> int:
        """Forward passes before the first backward: there and back, and a round's other chunks."""
        return 2 * (self.stages - self.stage_id - 1) + (self.num_chunks - 1) * self.stages

    def _order(self) -> Iterator[Compute]:
        forwards = self._rounds(range(self.num_chunks), ForwardPass)
        backwards = [(each,) for each in self._rounds(range(self.num_chunks)[::-1], BackwardPass)]
        order = _one_forward_one_backward(forwards, backwards, self._warmup())
        return (each for each in order if each.micro_batch < self.micro_batches)


class ZeroBubbleTrainSchedule(PipeSchedule):
    """ZB-H1 (Qi et al. 2023): weights' gradients wait for what is more urgent, and fill the tail.

    Stage s leaves s weight passes behind, so that every stage holds at most `stages` micro-batches,
    as the first stage of 1F1B. The wait is stages - 1 times (forward + input's gradient - weights'
    gradient), with enough micro-batches and as long as the weights' gradient is the cheapest of the
    three.
    """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        return _Lowering(self).steps(self._order())

    def num_pipe_buffers(self) -> int:
        return min(self.stages, self.micro_batches)

    def _order(self) -> Iterator[Compute]:
        forwards, inputs, weights = (
            [Compute(kind, micro_batch, 0) for micro_batch in range(self.micro_batches)]
            for kind in (ForwardPass, BackwardInputPass, BackwardWeightPass)
        )
        delay = min(self.stage_id, self.micro_batches)
        # The weight pass comes before the next forward: it frees the buffer taken there.
        groups = [
            (each,) if index < delay else (each, weights[index - delay])
            for index, each in enumerate(inputs)
        ]
        yield from _one_forward_one_backward(forwards, groups, self.stages - self.stage_id - 1)
        yield from weights[self.micro_batches - delay :]


class InferenceSchedule(PipeSchedule):
    """Forward passes alone; if not interleaved, micro_batches + stages - 1 slots on a stage."""

    closing = ()

    def __init__(
        self, micro_batches: int, stages: int, stage_id: StageId, num_chunks: int = 1
    ) -> None:
        super().__init__(micro_batches, stages, stage_id)
        if num_chunks < 1:
            raise ValueError(
                f"A stage holds at least one chunk of the model, not num_chunks={num_chunks}"
            )
        self.num_chunks = num_chunks

    def steps(self) -> Iterator[list[PipeInstruction]]:
        order = [
            each
            for each in self._rounds(range(self.num_chunks), ForwardPass)
            if each.micro_batch < self.micro_batches
        ]
        if self.num_chunks > 1:
            return _Lowering(self).steps(order)
        return _Lowering(self).steps(
            [*[None] * self.stage_id, *order, *[None] * (self.stages - 1 - self.stage_id)]
        )

    def num_pipe_buffers(self) -> int:
        """Two: one is sent while the other is computed."""
        return 2


class DataParallelSchedule(PipeSchedule):
    """Every stage holds the whole model: forward and backward of each micro-batch, then a step."""

    closing = (ReduceGrads, OptimizerStep)

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for micro_batch in range(self.micro_batches):
            kinds = (LoadMicroBatch, ForwardPass, BackwardPass)
            step: list[PipeInstruction] = [
                kind(0, micro_batch=micro_batch, chunk=0) for kind in kinds
            ]
            if micro_batch == self.micro_batches - 1:
                step += [kind() for kind in self.closing]
            yield step

    def num_pipe_buffers(self) -> int:
        return 1


class ListedSchedule(PipeSchedule):
    """A schedule given by its instructions, a list per step."""

    def __init__(
        self,
        micro_batches: int,
        stages: int,
        stage_id: StageId,
        steps: Iterable[Iterable[PipeInstruction]],
        num_buffers: int,
        num_chunks: int = 1,
    ) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self.num_chunks = num_chunks
        self._steps = [list(step) for step in steps]
        self._num_buffers = num_buffers
        self.closing = tuple(
            type(each)
            for step in self._steps
            for each in step
            if isinstance(each, (ReduceTiedGrads, ReduceGrads, OptimizerStep))
        )

    def steps(self) -> Iterator[list[PipeInstruction]]:
        return iter(self._steps)

    def num_pipe_buffers(self) -> int:
        return self._num_buffers


SCHEDULE_NAMES = ("1f1b", "interleaved", "zero_bubble")


def make_schedule(
    name: str, micro_batches: int, stages: int, stage_id: StageId, num_chunks: int = 1
) -> PipeSchedule:
    """Make the training schedule "1f1b", "interleaved" (at least 2 chunks) or "zero_bubble".

    Raises:
        ValueError: There is no such schedule, or it can't run that many chunks.
    """
    if name == "interleaved":
        return InterleavedTrainSchedule(micro_batches, stages, stage_id, num_chunks)
    if name not in SCHEDULE_NAMES:
        raise ValueError(
            f"There is no pipeline schedule {name!r}; choose one of {', '.join(SCHEDULE_NAMES)}"
        )
    if num_chunks != 1:
        raise ValueError(
            f"The {name} schedule runs one model chunk per stage, not num_chunks={num_chunks}; use "
            "interleaved"
        )
    return (TrainSchedule if name == "1f1b" else ZeroBubbleTrainSchedule)(
        micro_batches, stages, stage_id
    )
