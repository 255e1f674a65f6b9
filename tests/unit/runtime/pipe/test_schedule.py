"""Schedules: instructions, time and memory of the papers, receives posted, faults found."""

import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.runtime.pipe.messages.posting import ChannelKey, Lane, _channel_of, arrivals
from deepspeed.runtime.pipe.schedule import (
    SCHEDULE_NAMES,
    BackwardInputPass,
    BackwardPass,
    BackwardWeightPass,
    BufferOpInstruction,
    DataParallelSchedule,
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
    TrainSchedule,
    make_schedule,
)
from deepspeed.runtime.pipe.simulator import (
    CostModel,
    ScheduleDeadlockError,
    ScheduleError,
    needs_asynchronous_sends,
    simulate,
)

GRID = [(stages, count) for stages in (1, 2, 3, 4, 7) for count in (1, 2, 3, 4, 6, 7, 12, 21)]
on_grid = pytest.mark.parametrize(("stages", "micro_batches"), GRID)
SHAPES = st.tuples(st.integers(1, 12), st.integers(1, 48))
Costs = tuple[int, int, int]
COSTS = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 5))


def pipeline(name: str, micro_batches: int, stages: int, num_chunks: int = 1) -> list[PipeSchedule]:
    """The schedules of all stages."""
    own = range(stages)
    if name == "inference":
        return [InferenceSchedule(micro_batches, stages, stage, num_chunks) for stage in own]
    return [make_schedule(name, micro_batches, stages, stage, num_chunks) for stage in own]


def names(schedule: PipeSchedule) -> list[list[str]]:
    """Names of each step's instructions."""
    return [[each.name for each in step] for step in schedule.steps()]


def flat(schedule: PipeSchedule) -> list[PipeInstruction]:
    """The instructions of all steps."""
    return [each for step in schedule.steps() for each in step]


def test_instructions_are_values() -> None:
    made = PipeInstruction(first=1, second="x")
    assert (made.first, made.second, made.name) == (1, "x", "PipeInstruction")
    assert made.kwargs == {"first": 1, "second": "x"}
    assert repr(made) == "PipeInstruction(first=1, second='x')"
    # Upstream's call: anyone's own schedule makes its instructions so.
    alone = ForwardPass(3)
    assert (alone.buffer_id, alone.micro_batch, alone.chunk) == (3, None, 0)
    assert alone.kwargs == {"buffer_id": 3} and repr(alone) == "ForwardPass(buffer_id=3)"
    # Equal by class and arguments.
    assert ForwardPass(1, micro_batch=2) == ForwardPass(1, micro_batch=2)
    assert hash(ForwardPass(1, micro_batch=2)) == hash(ForwardPass(1, micro_batch=2))
    assert ForwardPass(1) != ForwardPass(2)
    assert ForwardPass(1) != BackwardPass(1)
    assert OptimizerStep() == OptimizerStep() != ReduceGrads()


class TestShape:
    """What upstream's users count on: steps, buffers, who loads, what ends the batch."""

    @on_grid
    def test_steps_are_time_slots(self, stages: int, micro_batches: int) -> None:
        for stage in range(stages):
            train = list(TrainSchedule(micro_batches, stages, stage))
            assert len(train) == 2 * (micro_batches + stages - 1)
            inference = list(InferenceSchedule(micro_batches, stages, stage).steps())
            assert len(inference) == micro_batches + stages - 1
            for step in train + inference:
                assert sum(isinstance(each, (ForwardPass, BackwardPass)) for each in step) <= 1

    def test_of_small_pipelines(self) -> None:
        assert [TrainSchedule(8, 4, stage).num_pipe_buffers() for stage in range(4)] == [4, 3, 2, 2]
        assert [TrainSchedule(1, 4, stage).num_pipe_buffers() for stage in range(4)] == [2, 2, 2, 2]
        first, last = ["LoadMicroBatch", "ForwardPass"], ["ReduceGrads", "OptimizerStep"]
        one_stage = [first, ["BackwardPass"], first, ["BackwardPass", "ReduceTiedGrads", *last]]
        assert names(TrainSchedule(2, 1, 0)) == one_stage
        # Inference sends in the next slot.
        middle = ["SendActivation", "RecvActivation", "ForwardPass"]
        assert names(InferenceSchedule(2, 3, 1)) == [[], middle[1:], middle, middle[:1]]
        data_parallel = DataParallelSchedule(2, 1, 0)
        passes = [*first, "BackwardPass"]
        assert names(data_parallel) == [passes, [*passes, *last]]
        assert data_parallel.num_pipe_buffers() == 1
        assert simulate([data_parallel]).peak_activations == (1,)

    @pytest.mark.parametrize(
        ("name", "num_chunks"),
        [("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 3)],
    )
    @pytest.mark.parametrize("stages", [1, 2, 4])
    def test_loads_and_end(self, name: str, num_chunks: int, stages: int) -> None:
        for schedule in pipeline(name, 5, stages, num_chunks):
            *_, end = schedule.steps()
            assert end[-3:] == [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            instructions = flat(schedule)
            assert sum(not isinstance(each, BufferOpInstruction) for each in instructions) == 3
            loads = [each for each in instructions if isinstance(each, LoadMicroBatch)]
            parts = [
                chunk
                for chunk in range(num_chunks)
                if chunk * stages + schedule.stage_id in (0, stages * num_chunks - 1)
            ]
            wanted = {(chunk, micro_batch) for chunk in parts for micro_batch in range(5)}
            assert {(each.chunk, each.micro_batch) for each in loads} == wanted

    def test_properties(self) -> None:
        first, last = TrainSchedule(5, 3, 0), TrainSchedule(5, 3, 2)
        assert first.is_first_stage and not first.is_last_stage
        assert last.is_last_stage and not last.is_first_stage
        assert (first.num_micro_batches, first.num_stages, first.next_stage) == (5, 3, 1)
        assert (last.stage, last.prev_stage) == (2, 1)

    def test_an_activation_leaves_before_the_stage_waits_again(self) -> None:
        # Kills a send after the next receive: the next stage would wait for this one's wait.
        for name, chunks in (("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2)):
            for schedule in pipeline(name, 8, 4, chunks)[:-1]:
                instructions = flat(schedule)
                for before, after in zip(instructions, instructions[1:], strict=False):
                    if isinstance(before, ForwardPass) and not isinstance(after, SendActivation):
                        pytest.fail(f"{after} comes between {before} and its send")

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (("gpipe", 4, 2, 0), "gpipe.*1f1b, interleaved, zero_bubble"),
            (("1f1b", 4, 2, 0, 2), "num_chunks=2; use interleaved"),
            (("zero_bubble", 4, 2, 0, 3), "num_chunks=3; use interleaved"),
            (("interleaved", 4, 2, 0), "num_chunks=1; use 1f1b"),
            (("1f1b", 0, 2, 0), "micro_batches=0"),
            (("1f1b", 4, 2, 2), "stage_id=2.*0 to 1"),
        ],
    )
    def test_refusals(self, arguments: tuple[str, int, int, int], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            make_schedule(*arguments)
        with pytest.raises(ValueError, match="num_chunks=0"):
            InferenceSchedule(2, 2, 0, num_chunks=0)


class TestFormulas:
    """Time and memory; the costs are whole numbers, so that times are exact in floating point."""

    @on_grid
    def test_1f1b_and_zero_bubble(self, stages: int, micro_batches: int) -> None:
        check_1f1b(stages, micro_batches, (1, 1, 1))
        check_zero_bubble(stages, micro_batches)

    @on_grid
    @pytest.mark.parametrize("num_chunks", [2, 3])
    def test_interleaved(self, stages: int, micro_batches: int, num_chunks: int) -> None:
        check_interleaved(stages, micro_batches, num_chunks, (1, 1, 1))

    @on_grid
    @pytest.mark.parametrize("num_chunks", [1, 2, 3])
    def test_inference(self, stages: int, micro_batches: int, num_chunks: int) -> None:
        schedules = pipeline("inference", micro_batches, stages, num_chunks)
        result = simulate(schedules, CostModel(forward=num_chunks))
        assert result.peak_activations == (1,) * stages
        if micro_batches % stages == 0:
            assert result.makespan == num_chunks * micro_batches + stages - 1

    @settings(max_examples=60, deadline=None)
    @given(SHAPES, COSTS)
    def test_1f1b_any(self, shape: tuple[int, int], costs: tuple[int, int, int]) -> None:
        check_1f1b(*shape, costs)

    @settings(max_examples=60, deadline=None)
    @given(st.integers(1, 10), st.integers(1, 30), st.integers(2, 4), COSTS)
    def test_interleaved_any(self, stages: int, count: int, chunks: int, costs: Costs) -> None:
        check_interleaved(stages, count, chunks, costs)

    @settings(max_examples=60, deadline=None)
    @given(SHAPES, COSTS)
    def test_zero_bubble_any(self, shape: tuple[int, int], costs: tuple[int, int, int]) -> None:
        stages, micro_batches = shape
        forward, backward, weight = costs

        def makespan_of(name: str) -> float:
            return simulate(pipeline(name, micro_batches, stages), CostModel(*costs)).makespan

        makespan = makespan_of("zero_bubble")
        assert makespan <= makespan_of("1f1b")
        if micro_batches >= 2 * stages and weight <= min(forward, backward):
            bubble = (stages - 1) * (forward + backward - weight)
            assert makespan == micro_batches * sum(costs) + bubble

    # The largest sizes: the schedules stay right, and checking them stays cheap (seconds each).
    def test_64_stages(self) -> None:
        check_1f1b(64, 1024, (1, 1, 1))
        # Four times the stages: as steady as sixteen times.
        check_interleaved(64, 256, 2, (1, 1, 1))
        check_zero_bubble(64, 256)

    def test_latency_is_paid_along_the_way(self) -> None:
        # One micro-batch goes down and up: 2 * (stages - 1) messages.
        result = simulate(pipeline("1f1b", 1, 4), CostModel(latency=0.25))
        assert result.makespan == 4 * 3 + 6 * 0.25


def check_1f1b(stages: int, micro_batches: int, costs: Costs) -> None:
    """Makespan (m+p-1)(F+B), bubble (p-1)/(m+p-1), at most p-s micro-batches on stage s."""
    result = simulate(pipeline("1f1b", micro_batches, stages), CostModel(*costs))
    slots = micro_batches + stages - 1
    assert result.makespan == slots * sum(costs)
    assert result.bubble_fraction == pytest.approx((stages - 1) / slots, abs=1e-12)
    peaks = tuple(min(stages - stage, micro_batches) for stage in range(stages))
    assert result.peak_activations == peaks


def check_interleaved(stages: int, micro_batches: int, num_chunks: int, costs: Costs) -> None:
    """Bubble (p-1)(F+B)/v, at most 2(p-s-1) + (v-1)p + 1 activations of a chunk on stage s.

    Costs are given per chunk, so that times are whole; a ragged last round is no longer than a
    full one.
    """
    schedules = pipeline("interleaved", micro_batches, stages, num_chunks)
    result = simulate(schedules, CostModel(*(num_chunks * cost for cost in costs)))
    rounds = -(-micro_batches // stages)
    full = num_chunks * rounds * stages * sum(costs) + (stages - 1) * sum(costs)
    peaks = [2 * (stages - stage - 1) + (num_chunks - 1) * stages + 1 for stage in range(stages)]
    bound = tuple(min(peak, micro_batches * num_chunks) for peak in peaks)
    assert tuple(each.num_pipe_buffers() for each in schedules) == bound
    if micro_batches % stages == 0:
        assert result.makespan == full
        assert result.peak_activations == bound
    else:
        assert result.makespan <= full
        assert all(peak <= most for peak, most in zip(result.peak_activations, bound, strict=True))


def check_zero_bubble(stages: int, micro_batches: int) -> None:
    """Bubble (p-1)(F+I-W) = p-1 with unit costs, at most p micro-batches on every stage: as 1F1B
    has on its first, so that the schedule is paid with no memory.

    With fewer micro-batches than stages nothing hides the way of the last one: down and up again,
    and its weights.
    """
    result = simulate(pipeline("zero_bubble", micro_batches, stages), CostModel(1, 1, 1))
    hidden, bare = 3 * micro_batches + stages - 1, 2 * micro_batches + 2 * stages - 1
    assert result.makespan == max(hidden, bare)
    assert result.peak_activations == (min(stages, micro_batches),) * stages


class TestSends:
    """Whether sends may block."""

    @pytest.mark.parametrize("name", SCHEDULE_NAMES)
    def test_training_needs_asynchronous_sends(self, name: str) -> None:
        # Two neighbours that both send first wait for one another: channels must not block.
        assert needs_asynchronous_sends(pipeline(name, 8, 4, 2 if name == "interleaved" else 1))

    def test_one_way_and_one_stage_do_not(self) -> None:
        assert not needs_asynchronous_sends(pipeline("inference", 8, 4))
        assert not needs_asynchronous_sends(pipeline("1f1b", 8, 1))

        # One stage with two chunks hands over to itself, which must not count as blocking.
        (schedule,) = pipeline("interleaved", 4, 1, 2)
        assert not needs_asynchronous_sends([schedule])
        assert sum(isinstance(each, RecvActivation) for each in flat(schedule)) == 4


POSTED = [
    (name, micro_batches, stages, chunks)
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("inference", 1))
    for micro_batches, stages in ((1, 2), (4, 2), (6, 3), (8, 4))
    if name != "interleaved" or micro_batches % stages == 0
]
posted = pytest.mark.parametrize("shape", POSTED, ids=lambda shape: "-".join(map(str, shape)))


def completes(
    schedules: Sequence[PipeSchedule], waiter: int, after: int, channel: ChannelKey, number: int
) -> bool:
    """Whether all stages end if one stops after some instructions, before a channel's message."""
    programs = [flat(schedule) for schedule in schedules]
    at, moved = [0] * len(programs), True
    sent, received = Counter[ChannelKey](), Counter[ChannelKey]()
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


@posted
def test_as_early_as_can_be(shape: tuple[str, int, int, int]) -> None:
    # Kills: a receive that is posted while its sender depends on what this host has to issue, and
    # one that is posted later than it could.
    schedules = pipeline(*shape)
    for receiver in range(len(schedules)):
        numbers: Counter[ChannelKey] = Counter()
        for coming in arrivals(schedules, receiver).values():
            for channel, needs in coming:
                number = numbers[channel]
                numbers[channel] += 1
                assert completes(schedules, receiver, needs, channel, number)
                assert not needs or not completes(schedules, receiver, needs - 1, channel, number)


@posted
def test_lanes_have_every_message_in_the_senders_order(shape: tuple[str, int, int, int]) -> None:
    # Kills: an order in which one communicator would mix up two chunks' messages; one that could
    # be posted, behind one that can not.
    schedules = pipeline(*shape)
    for receiver in range(len(schedules)):
        lanes = {key: deque(coming) for key, coming in arrivals(schedules, receiver).items()}
        for coming in lanes.values():
            needs = [arrival.needs for arrival in coming]
            assert needs == sorted(needs)
        for sender, schedule in enumerate(schedules):
            for item in flat(schedule):
                if not isinstance(item, (SendActivation, SendGrad)):
                    continue
                channel = _channel_of(item, sender, len(schedules))
                assert channel is not None
                if (channel.border - channel.backwards) % len(schedules) == receiver:
                    found = lanes[Lane(sender, channel.backwards)].popleft()
                    assert found.channel == channel
        assert not any(lanes.values())


def test_schedules_that_wait_for_each_other() -> None:
    with pytest.raises(ValueError, match=r"stages \[1\] wait"):
        arrivals([pipeline("1f1b", 1, 2)[0], pipeline("1f1b", 2, 2)[1]], 0)


# -- broken schedules ------------------------------------------------------------------------------

Steps = list[list[PipeInstruction]]
Change = Callable[[Steps], Steps]
PIPELINES = [
    ("1f1b", 1),
    ("zero_bubble", 1),
    ("interleaved", 2),
    ("inference", 1),
    ("inference", 2),
]
STAGES, MICRO_BATCHES = 3, 4
LAST = MICRO_BATCHES - 1


def right(name: str, num_chunks: int = 1) -> list[PipeSchedule]:
    """A right pipeline."""
    return pipeline(name, MICRO_BATCHES, STAGES, num_chunks)


def mutated(schedules: list[PipeSchedule], stage: int, change: Change) -> list[PipeSchedule]:
    """The pipeline with one stage's steps changed."""
    old = schedules[stage]
    steps, buffers = change([list(step) for step in old.steps()]), old.num_pipe_buffers()
    new = ListedSchedule(old.micro_batches, old.stages, stage, steps, buffers, old.num_chunks)
    return [*schedules[:stage], new, *schedules[stage + 1 :]]


def each_becomes(change: Callable[[PipeInstruction], tuple[PipeInstruction, ...]]) -> Change:
    """Put other instructions in the place of each."""
    return lambda steps: [[made for each in step for made in change(each)] for step in steps]


def without(*kinds: type[PipeInstruction], micro_batch: int | None = None) -> Change:
    """Drop instructions of a kind, of one micro-batch or all."""

    def kept(each: PipeInstruction) -> tuple[PipeInstruction, ...]:
        is_meant = micro_batch is None or getattr(each, "micro_batch", None) == micro_batch
        return () if isinstance(each, kinds) and is_meant else (each,)

    return each_becomes(kept)


def replaced(old: PipeInstruction, *new: PipeInstruction) -> Change:
    """Put instructions in the place of one."""
    return each_becomes(lambda each: new if each == old else (each,))


def of_first(kind: type[BufferOpInstruction], number: int = 0) -> BufferOpInstruction:
    """An instruction of a micro-batch in the buffer of its number."""
    return kind(number, micro_batch=number, chunk=0)


def exchanged(*instructions: PipeInstruction) -> Change:
    """Put two instructions in each other's places."""
    swap = dict(zip(instructions, instructions[::-1], strict=True))
    return each_becomes(lambda each: (swap.get(each, each),))


def other_passes(steps: Steps) -> Steps:
    kinds: dict[type[PipeInstruction], type[BufferOpInstruction]] = {
        BackwardInputPass: BackwardWeightPass,
        BackwardWeightPass: BackwardInputPass,
    }
    return [[kinds.get(type(each), type(each))(**each.kwargs) for each in step] for step in steps]


def second_into_buffer_0(steps: Steps) -> Steps:
    for each in (each for step in steps for each in step):
        if getattr(each, "micro_batch", None) == 1:
            moved = type(each)(**{**each.kwargs, "buffer_id": 0})
            steps = replaced(each, moved)(steps)
    return steps


def reduced_late(steps: Steps) -> Steps:
    return replaced(STEP, STEP, ReduceGrads())(without(ReduceGrads)(steps))


def fault(schedules: list[PipeSchedule]) -> ScheduleError:
    """What the simulator finds."""
    with pytest.raises(ScheduleError) as caught:
        simulate(schedules, record=True)
    return caught.value


class Broken(NamedTuple):
    """What is done to a stage of a pipeline; which place is named first, and what is said."""

    pipeline: str
    stage: int
    change: Change
    said: str = ""
    named: int | None = None
    instruction: PipeInstruction | type[PipeInstruction] | None = None


TIED, STEP = ReduceTiedGrads(), OptimizerStep()
SENDS = [of_first(SendActivation, number) for number in (0, 1)]
BACKWARD, EXTRA = of_first(BackwardInputPass), of_first(SendGrad)
extra_send = replaced(BACKWARD, BACKWARD, EXTRA)
unnumbered_load = replaced(of_first(LoadMicroBatch), LoadMicroBatch(0))
EARLY = LoadMicroBatch(0, micro_batch=1, chunk=0)
UNWRITTEN = r"read before RecvGrad has written it\n.*stage 0, .*BackwardInputPass\(.*micro_batch=1"
LACKS = "micro-batch 3 of chunk 0, which lacks BackwardPass or BackwardWeightPass"
MUTATIONS = {
    "dropped receive": Broken(
        "1f1b", 1, without(RecvActivation, micro_batch=2), "stage 1.*micro_batch=2", 1, ForwardPass
    ),
    "dropped gradient": Broken("zero_bubble", 0, without(RecvGrad, micro_batch=1), UNWRITTEN),
    # Already the sender reads a buffer in which there is nothing yet.
    "reordered sends": Broken("1f1b", 0, exchanged(*SENDS), "", 0, SENDS[1]),
    "a buffer reused early": Broken(
        "1f1b", 0, second_into_buffer_0, "0 is still in use: it holds micro-batch 0", 0, EARLY
    ),
    "missing last micro-batch on one stage": Broken(
        "1f1b", 2, without(BufferOpInstruction, micro_batch=LAST), "micro-batch 3", 2
    ),
    "missing weights": Broken("zero_bubble", 1, without(BackwardWeightPass, micro_batch=3), LACKS),
    "weights before input": Broken("zero_bubble", 0, other_passes, "", None, BackwardWeightPass),
    "missing tied gradients": Broken("1f1b", 1, without(ReduceTiedGrads), "ReduceTiedGrads", 1),
    "missing step": Broken("1f1b", 2, without(OptimizerStep), "without ReduceGrads and Optimizer"),
    "reduced twice": Broken("1f1b", 2, replaced(TIED, TIED, TIED), "each of them runs once"),
    "reduced after the step": Broken("1f1b", 0, reduced_late, instruction=ReduceGrads),
    "nothing to send to": Broken(
        "zero_bubble", 0, extra_send, "nothing of the kind happens on this part", None, EXTRA
    ),
    "no micro-batch": Broken("1f1b", 0, unnumbered_load, "no micro-batch None"),
}


@pytest.mark.parametrize("case", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_mutation_is_found_where_it_is(case: Broken) -> None:
    error = fault(mutated(right(case.pipeline), case.stage, case.change))
    place, wanted = error.places[0], case.instruction
    assert case.named in (None, place.stage)
    assert wanted in (None, type(place.instruction), place.instruction)
    assert re.search(case.said, str(error))


class TestMutations:
    """Each names the places."""

    def test_dropped_send_of_the_last_micro_batch(self) -> None:
        # Those who wait for it are named, and so is the stage that waits for them in turn.
        error = fault(mutated(right("1f1b"), 0, without(SendActivation, micro_batch=LAST)))
        assert isinstance(error, ScheduleDeadlockError)
        assert {place.stage for place in error.places} == {0, 1, 2}
        told = r"stage 1, step \d+, RecvActivation\(buffer_id=1, micro_batch=3"
        assert re.search(told, str(error))
        # Without gradients the sender never waits: it is named by its end.
        error = fault(mutated(right("inference"), 0, without(SendActivation, micro_batch=LAST)))
        assert isinstance(error, ScheduleDeadlockError)
        assert [place.stage for place in error.places] == [1, 2, 0]
        assert "stage 0, step 5, end of the schedule" in str(error)

    def test_reordered_sends_whose_buffers_are_full(self) -> None:
        # Inference has no gradients that would hold the order up: only the receiver can tell.
        def delay(steps: Steps) -> Steps:
            instructions = [each for step in steps for each in step]
            held = instructions.pop(instructions.index(SENDS[0]))
            instructions.insert(instructions.index(SENDS[1]) + 1, held)
            return [[each] for each in instructions]

        error = fault(mutated(right("inference"), 0, delay))
        places = [(place.stage, place.instruction) for place in error.places]
        assert places == [(1, of_first(RecvActivation)), (0, SENDS[1])]
        assert "gets the message of micro-batch 1 instead" in str(error)

    def test_a_buffer_that_does_not_exist(self) -> None:
        old = right("1f1b")
        few = ListedSchedule(MICRO_BATCHES, STAGES, 0, old[0].steps(), num_buffers=2)
        error = fault([few, *old[1:]])
        assert error.places[0].instruction == of_first(LoadMicroBatch, 2)
        assert "num_pipe_buffers() = 2" in str(error)

    def test_missing_last_micro_batch(self) -> None:
        schedules = right("1f1b")
        for stage in range(STAGES):
            schedules = mutated(schedules, stage, without(BufferOpInstruction, micro_batch=LAST))
        error = fault(schedules)
        assert "micro-batch 3 of chunk 0 never ran" in str(error)
        assert isinstance(error.places[0].instruction, ReduceTiedGrads)

    def test_step_before_the_last_backward(self) -> None:
        error = fault(mutated(right("1f1b"), 0, lambda steps: [steps[0], [STEP], *steps[1:]]))
        assert error.places == ((0, 1, STEP),)

    def test_gradients_awaited_before_activations_are_sent(self) -> None:
        # A deadlock by itself: everything is there, in an order that waits in a circle.
        send, receive = of_first(SendActivation), of_first(RecvGrad)
        steps = mutated(right("1f1b"), 0, without(RecvGrad, micro_batch=0))
        error = fault(mutated(steps, 0, replaced(send, receive, send)))
        assert isinstance(error, ScheduleDeadlockError)
        activation = of_first(RecvActivation)
        places = [(place.stage, place.instruction) for place in error.places]
        assert places == [(0, receive), (1, activation), (2, activation)]
        # What was computed until then is there for the picture.
        assert [len(row) for row in error.spans] == [1, 0, 0]

    def test_of_a_whole_pipeline(self) -> None:
        steps = list(InferenceSchedule(2, 1, 0).steps())
        error = fault([ListedSchedule(2, 1, 0, steps + steps, 2)])
        assert "micro-batch 0 of chunk 0 has been here before" in str(error)
        with pytest.raises(ValueError, match=r"stage_id.*\(0, 4, 3, 1\), \(0, 4, 3, 1\)"):
            simulate([right("1f1b")[0]] * 3)
        with pytest.raises(ValueError, match="at least one stage"):
            simulate([])


def _places(schedules: list[PipeSchedule]) -> list[tuple[int, int, int]]:
    """Where every instruction stands."""
    return [
        (stage, index, position)
        for stage, schedule in enumerate(schedules)
        for index, step in enumerate(schedule.steps())
        for position in range(len(step))
    ]


def repeated(index: int, position: int, times: int) -> Change:
    """Have an instruction so many times."""

    def change(steps: Steps) -> Steps:
        steps[index][position : position + 1] = [steps[index][position]] * times
        return steps

    return change


class TestEveryInstruction:
    """No instruction can be lost, doubled or aimed elsewhere without the simulator's notice."""

    @pytest.mark.parametrize(("name", "num_chunks"), PIPELINES)
    def test_lost_or_doubled(self, name: str, num_chunks: int) -> None:
        schedules = right(name, num_chunks)
        simulate(schedules)
        for stage, index, position in _places(schedules):
            instruction = list(schedules[stage].steps())[index][position]
            for times in (0, 2):
                error = fault(mutated(schedules, stage, repeated(index, position, times)))
                if times == 0 and isinstance(instruction, ReduceTiedGrads):
                    # Needed with tied modules only; missing on one stage alone it is an error.
                    assert "one would wait" in str(error)
                else:
                    assert stage in {place.stage for place in error.places}

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
