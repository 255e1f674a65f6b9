"""The simulator finds what is wrong with a schedule, and says where: mutations of right ones."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.runtime.pipe.schedule import (
    BackwardInputPass,
    BackwardWeightPass,
    BufferOpInstruction,
    ForwardPass,
    InferenceSchedule,
    ListedSchedule,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
    make_schedule,
)
from deepspeed.runtime.pipe.simulator import ScheduleDeadlockError, ScheduleError, simulate

Steps = list[list[PipeInstruction]]
PIPELINES = [
    ("1f1b", 1),
    ("zero_bubble", 1),
    ("interleaved", 2),
    ("inference", 1),
    ("inference", 2),
]
STAGES, MICRO_BATCHES = 3, 4


def right(name: str, num_chunks: int = 1) -> list[PipeSchedule]:
    """A right pipeline."""
    if name == "inference":
        return [
            InferenceSchedule(MICRO_BATCHES, STAGES, stage, num_chunks) for stage in range(STAGES)
        ]
    return [
        make_schedule(name, MICRO_BATCHES, STAGES, stage, num_chunks) for stage in range(STAGES)
    ]


def mutated(
    schedules: list[PipeSchedule], stage: int, change: Callable[[Steps], Steps]
) -> list[PipeSchedule]:
    """The pipeline with one stage's steps changed."""
    old = schedules[stage]
    steps = change([list(step) for step in old.steps()])
    new = ListedSchedule(
        old.micro_batches, old.stages, stage, steps, old.num_pipe_buffers(), old.num_chunks
    )
    return [*schedules[:stage], new, *schedules[stage + 1 :]]


def without(
    *kinds: type[PipeInstruction], micro_batch: int | None = None
) -> Callable[[Steps], Steps]:
    """Drop instructions of a kind, of one micro-batch or all."""

    def drop(each: PipeInstruction) -> bool:
        return isinstance(each, kinds) and (
            micro_batch is None or getattr(each, "micro_batch", None) == micro_batch
        )

    return lambda steps: [[each for each in step if not drop(each)] for step in steps]


def replaced(old: PipeInstruction, *new: PipeInstruction) -> Callable[[Steps], Steps]:
    """Put instructions in the place of one."""
    return lambda steps: [
        [made for each in step for made in (new if each == old else (each,))] for step in steps
    ]


def fault(schedules: list[PipeSchedule]) -> ScheduleError:
    """What the simulator finds."""
    with pytest.raises(ScheduleError) as caught:
        simulate(schedules, record=True)
    return caught.value


class TestMutations:
    """Each names the place."""

    def test_dropped_receive(self) -> None:
        error = fault(mutated(right("1f1b"), 1, without(RecvActivation, micro_batch=2)))
        assert error.places[0].stage == 1
        assert isinstance(error.places[0].instruction, ForwardPass)
        assert "stage 1" in str(error) and "ForwardPass" in str(error)
        assert "micro_batch=2" in str(error)

    def test_dropped_receive_of_a_gradient(self) -> None:
        error = fault(mutated(right("zero_bubble"), 0, without(RecvGrad, micro_batch=1)))
        assert re.search(
            r"read before RecvGrad has written it\n.*stage 0, .*BackwardInputPass\(.*micro_batch=1",
            str(error),
        )

    def test_dropped_send_of_the_last_micro_batch(self) -> None:
        # Those who wait for it are named, and so is the stage that waits for them in turn.
        error = fault(
            mutated(right("1f1b"), 0, without(SendActivation, micro_batch=MICRO_BATCHES - 1))
        )
        assert isinstance(error, ScheduleDeadlockError)
        assert {place.stage for place in error.places} == {0, 1, 2}
        assert re.search(
            r"stage 1, step \d+, RecvActivation\(buffer_id=1, micro_batch=3", str(error)
        )

    def test_dropped_send_of_a_stage_that_ends(self) -> None:
        # Without gradients the sender never waits: it is named by its end.
        error = fault(
            mutated(right("inference"), 0, without(SendActivation, micro_batch=MICRO_BATCHES - 1))
        )
        assert isinstance(error, ScheduleDeadlockError)
        assert [place.stage for place in error.places] == [1, 2, 0]
        assert "stage 0, step 5, end of the schedule" in str(error)

    def test_reordered_sends(self) -> None:
        first, second = (SendActivation(buffer, micro_batch=buffer, chunk=0) for buffer in (0, 1))
        swap = {first: second, second: first}
        error = fault(
            mutated(
                right("1f1b"),
                0,
                lambda steps: [[swap.get(each, each) for each in step] for step in steps],
            )
        )
        # Already the sender reads a buffer in which there is nothing yet.
        assert error.places[0].stage == 0
        assert error.places[0].instruction == second

    def test_reordered_sends_whose_buffers_are_full(self) -> None:
        # Inference has no gradients that would hold the order up: only the receiver can tell.
        def delay(steps: Steps) -> Steps:
            flat = [each for step in steps for each in step]
            at = flat.index(SendActivation(0, micro_batch=0, chunk=0))
            held = flat.pop(at)
            flat.insert(flat.index(SendActivation(1, micro_batch=1, chunk=0)) + 1, held)
            return [[each] for each in flat]

        error = fault(mutated(right("inference"), 0, delay))
        assert [(place.stage, place.instruction) for place in error.places] == [
            (1, RecvActivation(0, micro_batch=0, chunk=0)),
            (0, SendActivation(1, micro_batch=1, chunk=0)),
        ]
        assert "gets the message of micro-batch 1 instead" in str(error)

    def test_a_buffer_reused_early(self) -> None:
        error = fault([*mutated(right("1f1b"), 0, _into_buffer_0(1))])
        assert error.places[0].stage == 0
        assert error.places[0].instruction == LoadMicroBatch(0, micro_batch=1, chunk=0)
        assert "buffer 0 is still in use: it holds micro-batch 0" in str(error)

    def test_a_buffer_that_does_not_exist(self) -> None:
        old = right("1f1b")
        few = ListedSchedule(MICRO_BATCHES, STAGES, 0, old[0].steps(), num_buffers=2)
        error = fault([few, *old[1:]])
        assert error.places[0].instruction == LoadMicroBatch(2, micro_batch=2, chunk=0)
        assert "num_pipe_buffers() = 2" in str(error)

    def test_missing_last_micro_batch(self) -> None:
        schedules = right("1f1b")
        for stage in range(STAGES):
            schedules = mutated(
                schedules, stage, without(BufferOpInstruction, micro_batch=MICRO_BATCHES - 1)
            )
        error = fault(schedules)
        assert "micro-batch 3 of chunk 0 never ran" in str(error)
        assert isinstance(error.places[0].instruction, ReduceTiedGrads)

    def test_missing_last_micro_batch_on_one_stage(self) -> None:
        error = fault(
            mutated(right("1f1b"), 2, without(BufferOpInstruction, micro_batch=MICRO_BATCHES - 1))
        )
        assert error.places[0].stage == 2
        assert "micro-batch 3" in str(error)

    def test_missing_weight_pass(self) -> None:
        error = fault(mutated(right("zero_bubble"), 1, without(BackwardWeightPass, micro_batch=3)))
        assert "micro-batch 3 of chunk 0, which lacks BackwardPass or BackwardWeightPass" in str(
            error
        )

    def test_weights_before_the_input(self) -> None:
        kinds: dict[type[PipeInstruction], type[BufferOpInstruction]] = {
            BackwardInputPass: BackwardWeightPass,
            BackwardWeightPass: BackwardInputPass,
        }

        def swap(steps: Steps) -> Steps:
            return [
                [kinds[type(each)](**each.kwargs) if type(each) in kinds else each for each in step]
                for step in steps
            ]

        error = fault(mutated(right("zero_bubble"), 0, swap))
        assert isinstance(error.places[0].instruction, BackwardWeightPass)

    def test_one_stage_forgets_the_tied_gradients(self) -> None:
        error = fault(mutated(right("1f1b"), 1, without(ReduceTiedGrads)))
        assert error.places[0].stage == 1
        assert "ReduceTiedGrads" in str(error)

    def test_a_stage_without_a_step(self) -> None:
        assert "without ReduceGrads and OptimizerStep" in str(
            fault(mutated(right("1f1b"), 2, without(OptimizerStep)))
        )

    def test_reduced_twice(self) -> None:
        error = fault(
            mutated(
                right("1f1b"), 2, replaced(ReduceTiedGrads(), ReduceTiedGrads(), ReduceTiedGrads())
            )
        )
        assert "each of them runs once" in str(error)

    def test_reduced_after_the_step(self) -> None:
        schedules = mutated(right("1f1b"), 0, without(ReduceGrads))
        error = fault(
            mutated(schedules, 0, replaced(OptimizerStep(), OptimizerStep(), ReduceGrads()))
        )
        assert isinstance(error.places[0].instruction, ReduceGrads)

    def test_step_before_the_last_backward(self) -> None:
        error = fault(
            mutated(right("1f1b"), 0, lambda steps: [steps[0], [OptimizerStep()], *steps[1:]])
        )
        assert error.places == ((0, 1, OptimizerStep()),)

    def test_gradients_awaited_before_activations_are_sent(self) -> None:
        # The deadlock that a schedule can have by itself: everything is there, in an order that
        # waits in a circle.
        send, receive = (
            SendActivation(0, micro_batch=0, chunk=0),
            RecvGrad(0, micro_batch=0, chunk=0),
        )
        steps = mutated(right("1f1b"), 0, without(RecvGrad, micro_batch=0))
        error = fault(mutated(steps, 0, replaced(send, receive, send)))
        assert isinstance(error, ScheduleDeadlockError)
        assert [(place.stage, place.instruction) for place in error.places] == [
            (0, receive),
            (1, RecvActivation(0, micro_batch=0, chunk=0)),
            (2, RecvActivation(0, micro_batch=0, chunk=0)),
        ]
        # What was computed until then is there for the picture.
        assert [len(row) for row in error.spans] == [1, 0, 0]

    def test_nothing_to_send_to(self) -> None:
        backward, extra = (
            kind(0, micro_batch=0, chunk=0) for kind in (BackwardInputPass, SendGrad)
        )
        error = fault(mutated(right("zero_bubble"), 0, replaced(backward, backward, extra)))
        assert error.places[0].instruction == extra
        assert "nothing of the kind happens on this part" in str(error)

    def test_a_micro_batch_that_runs_again(self) -> None:
        steps = list(InferenceSchedule(2, 1, 0).steps())
        assert "micro-batch 0 of chunk 0 has been here before" in str(
            fault([ListedSchedule(2, 1, 0, steps + steps, 2)])
        )

    def test_other_stages_schedules(self) -> None:
        with pytest.raises(ValueError, match=r"stage_id.*\(0, 4, 3, 1\), \(0, 4, 3, 1\)"):
            simulate([right("1f1b")[0]] * 3)
        with pytest.raises(ValueError, match="at least one stage"):
            simulate([])


def _into_buffer_0(micro_batch: int) -> Callable[[Steps], Steps]:
    """Let a micro-batch use buffer 0."""

    def change(each: PipeInstruction) -> PipeInstruction:
        if getattr(each, "micro_batch", None) != micro_batch:
            return each
        return type(each)(**{**each.kwargs, "buffer_id": 0})

    return lambda steps: [[change(each) for each in step] for step in steps]


def _places(schedules: list[PipeSchedule]) -> list[tuple[int, int, int]]:
    """Where every instruction stands."""
    return [
        (stage, index, position)
        for stage, schedule in enumerate(schedules)
        for index, step in enumerate(schedule.steps())
        for position in range(len(step))
    ]


class TestEveryInstruction:
    """No instruction can be lost, doubled or aimed elsewhere without the simulator's notice."""

    @pytest.mark.parametrize(("name", "num_chunks"), PIPELINES)
    def test_lost_or_doubled(self, name: str, num_chunks: int) -> None:
        schedules = right(name, num_chunks)
        simulate(schedules)
        for stage, index, position in _places(schedules):
            for times in (0, 2):

                def change(
                    steps: Steps, index: int = index, position: int = position, times: int = times
                ) -> Steps:
                    steps[index][position : position + 1] = [steps[index][position]] * times
                    return steps

                if times == 0 and isinstance(
                    list(schedules[stage].steps())[index][position], ReduceTiedGrads
                ):
                    # Without tied modules it is not needed; on one stage alone it is, and found by
                    # comparing the stages.
                    assert "one would wait" in str(fault(mutated(schedules, stage, change)))
                else:
                    assert stage in {
                        place.stage for place in fault(mutated(schedules, stage, change)).places
                    }

    @settings(max_examples=80, deadline=None)
    @given(st.data())
    def test_aimed_elsewhere(self, data: st.DataObject) -> None:
        schedules = right(*data.draw(st.sampled_from(PIPELINES)))
        stage, index, position = data.draw(st.sampled_from(_places(schedules)))
        instruction = list(schedules[stage].steps())[index][position]
        if not isinstance(instruction, BufferOpInstruction):
            return
        key = data.draw(st.sampled_from(["buffer_id", "micro_batch", "chunk"]))
        value = data.draw(st.integers(0, 5).filter(lambda drawn: drawn != instruction.kwargs[key]))
        new = type(instruction)(**{**instruction.kwargs, key: value})
        fault(mutated(schedules, stage, replaced(instruction, new)))

    def test_no_micro_batch(self) -> None:
        load = LoadMicroBatch(0, micro_batch=0, chunk=0)
        assert "no micro-batch None" in str(
            fault(mutated(right("1f1b"), 0, replaced(load, LoadMicroBatch(0))))
        )
