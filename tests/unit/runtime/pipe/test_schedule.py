"""Pipeline schedules: instructions, time and memory of the papers, when receives are posted."""

from collections import Counter, deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.runtime.pipe.messages.posting import ChannelKey, Lane, _channel_of, arrivals
from deepspeed.runtime.pipe.schedule import (
    SCHEDULE_NAMES,
    BackwardPass,
    BufferOpInstruction,
    DataParallelSchedule,
    ForwardPass,
    InferenceSchedule,
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
from deepspeed.runtime.pipe.simulator import CostModel, needs_asynchronous_sends, simulate

GRID = [
    (stages, micro_batches)
    for stages in (1, 2, 3, 4, 7)
    for micro_batches in (1, 2, 3, 4, 6, 7, 12, 21)
]
SHAPES = st.tuples(st.integers(1, 12), st.integers(1, 48))
COSTS = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 5))


def pipeline(name: str, micro_batches: int, stages: int, num_chunks: int = 1) -> list[PipeSchedule]:
    """The schedules of all stages."""
    return [
        make_schedule(name, micro_batches, stages, stage, num_chunks) for stage in range(stages)
    ]


def names(step: list[PipeInstruction]) -> list[str]:
    """Names of a step's instructions."""
    return [each.name for each in step]


class TestInstructions:
    """Values, as upstream's users see them."""

    def test_arguments_are_attributes(self) -> None:
        made = PipeInstruction(first=1, second="x")
        assert (made.first, made.second, made.name, made.kwargs) == (
            1,
            "x",
            "PipeInstruction",
            {"first": 1, "second": "x"},
        )
        assert repr(made) == "PipeInstruction(first=1, second='x')"

    def test_only_a_buffer(self) -> None:
        # Upstream's call: anyone's own schedule makes its instructions so.
        made = ForwardPass(3)
        assert (made.buffer_id, made.micro_batch, made.chunk, made.kwargs) == (
            3,
            None,
            0,
            {"buffer_id": 3},
        )
        assert repr(made) == "ForwardPass(buffer_id=3)"

    def test_equal_by_class_and_arguments(self) -> None:
        assert ForwardPass(1, micro_batch=2) == ForwardPass(1, micro_batch=2)
        assert hash(ForwardPass(1, micro_batch=2)) == hash(ForwardPass(1, micro_batch=2))
        assert ForwardPass(1) != ForwardPass(2)
        assert ForwardPass(1) != BackwardPass(1)
        assert OptimizerStep() == OptimizerStep() != ReduceGrads()


class TestShape:
    """What upstream's users count on: steps, buffers, who loads, what ends the batch."""

    @pytest.mark.parametrize(("stages", "micro_batches"), GRID)
    def test_steps_are_time_slots(self, stages: int, micro_batches: int) -> None:
        for stage in range(stages):
            train = list(TrainSchedule(micro_batches, stages, stage))
            assert len(train) == 2 * (micro_batches + stages - 1)
            inference = list(InferenceSchedule(micro_batches, stages, stage).steps())
            assert len(inference) == micro_batches + stages - 1
            for step in train + inference:
                assert sum(isinstance(each, (ForwardPass, BackwardPass)) for each in step) <= 1

    def test_buffers_of_1f1b(self) -> None:
        assert [TrainSchedule(8, 4, stage).num_pipe_buffers() for stage in range(4)] == [4, 3, 2, 2]
        assert [TrainSchedule(1, 4, stage).num_pipe_buffers() for stage in range(4)] == [2, 2, 2, 2]

    def test_one_stage(self) -> None:
        steps = [names(step) for step in TrainSchedule(2, 1, 0).steps()]
        last = ["BackwardPass", "ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
        assert steps == [
            ["LoadMicroBatch", "ForwardPass"],
            ["BackwardPass"],
            ["LoadMicroBatch", "ForwardPass"],
            last,
        ]

    def test_inference_sends_in_the_next_slot(self) -> None:
        steps = [names(step) for step in InferenceSchedule(2, 3, 1).steps()]
        middle = ["SendActivation", "RecvActivation", "ForwardPass"]
        assert steps == [[], ["RecvActivation", "ForwardPass"], middle, ["SendActivation"]]

    def test_data_parallel(self) -> None:
        schedule = DataParallelSchedule(2, 1, 0)
        passes = ["LoadMicroBatch", "ForwardPass", "BackwardPass"]
        assert [names(step) for step in schedule.steps()] == [
            passes,
            [*passes, "ReduceGrads", "OptimizerStep"],
        ]
        assert schedule.num_pipe_buffers() == 1
        assert simulate([schedule]).peak_activations == (1,)

    @pytest.mark.parametrize(
        ("name", "num_chunks"),
        [("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 3)],
    )
    @pytest.mark.parametrize("stages", [1, 2, 4])
    def test_loads_and_end(self, name: str, num_chunks: int, stages: int) -> None:
        for schedule in pipeline(name, 5, stages, num_chunks):
            steps = list(schedule.steps())
            assert steps[-1][-3:] == [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            instructions = [each for step in steps for each in step]
            assert sum(not isinstance(each, BufferOpInstruction) for each in instructions) == 3
            loads = {
                (each.chunk, each.micro_batch)
                for each in instructions
                if isinstance(each, LoadMicroBatch)
            }
            parts = [
                chunk
                for chunk in range(num_chunks)
                if chunk * stages + schedule.stage_id in (0, stages * num_chunks - 1)
            ]
            assert loads == {(chunk, micro_batch) for chunk in parts for micro_batch in range(5)}

    def test_properties(self) -> None:
        first, last = TrainSchedule(5, 3, 0), TrainSchedule(5, 3, 2)
        assert (
            first.is_first_stage,
            first.is_last_stage,
            last.is_first_stage,
            last.is_last_stage,
        ) == (True, False, False, True)
        assert (
            first.num_micro_batches,
            first.num_stages,
            last.stage,
            last.prev_stage,
            first.next_stage,
        ) == (5, 3, 2, 1, 1)

    def test_an_activation_leaves_before_the_stage_waits_again(self) -> None:
        # Kills a send after the next receive: the next stage would wait for this one's wait.
        for name, chunks in (("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2)):
            for schedule in pipeline(name, 8, 4, chunks)[:-1]:
                flat = [each for step in schedule.steps() for each in step]
                for before, after in zip(flat, flat[1:], strict=False):
                    if isinstance(before, ForwardPass) and not isinstance(after, SendActivation):
                        pytest.fail(f"{after} comes between {before} and its send")


class TestRefusals:
    """Errors name the argument and what to do."""

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
    def test_make_schedule(self, arguments: tuple[str, int, int, int], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            make_schedule(*arguments)

    def test_inference_chunks(self) -> None:
        with pytest.raises(ValueError, match="num_chunks=0"):
            InferenceSchedule(2, 2, 0, num_chunks=0)


class TestFormulas:
    """Time and memory; the costs are whole numbers, so that times are exact in floating point."""

    @pytest.mark.parametrize(("stages", "micro_batches"), GRID)
    def test_1f1b(self, stages: int, micro_batches: int) -> None:
        check_1f1b(stages, micro_batches, (1, 1, 1))

    @pytest.mark.parametrize(("stages", "micro_batches"), GRID)
    @pytest.mark.parametrize("num_chunks", [2, 3])
    def test_interleaved(self, stages: int, micro_batches: int, num_chunks: int) -> None:
        check_interleaved(stages, micro_batches, num_chunks, (1, 1, 1))

    @pytest.mark.parametrize(("stages", "micro_batches"), GRID)
    def test_zero_bubble(self, stages: int, micro_batches: int) -> None:
        check_zero_bubble(stages, micro_batches)

    @pytest.mark.parametrize(("stages", "micro_batches"), GRID)
    @pytest.mark.parametrize("num_chunks", [1, 2, 3])
    def test_inference(self, stages: int, micro_batches: int, num_chunks: int) -> None:
        schedules = [
            InferenceSchedule(micro_batches, stages, stage, num_chunks) for stage in range(stages)
        ]
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
    def test_interleaved_any(
        self, stages: int, micro_batches: int, num_chunks: int, costs: tuple[int, int, int]
    ) -> None:
        check_interleaved(stages, micro_batches, num_chunks, costs)

    @settings(max_examples=60, deadline=None)
    @given(SHAPES, COSTS)
    def test_zero_bubble_any(self, shape: tuple[int, int], costs: tuple[int, int, int]) -> None:
        stages, micro_batches = shape
        forward, backward_input, backward_weight = costs
        schedules = pipeline("zero_bubble", micro_batches, stages)
        makespan = simulate(schedules, CostModel(*costs)).makespan
        assert (
            makespan
            <= simulate(pipeline("1f1b", micro_batches, stages), CostModel(*costs)).makespan
        )
        if micro_batches >= 2 * stages and backward_weight <= min(forward, backward_input):
            assert makespan == micro_batches * sum(costs) + (stages - 1) * (
                forward + backward_input - backward_weight
            )

    # The largest sizes: that the schedules stay right, and that checking them stays cheap (seconds
    # each).
    def test_1f1b_of_64_stages(self) -> None:
        check_1f1b(64, 1024, (1, 1, 1))

    def test_interleaved_of_64_stages(self) -> None:
        check_interleaved(64, 1024, 2, (1, 1, 1))

    def test_zero_bubble_of_64_stages(self) -> None:
        check_zero_bubble(64, 1024)

    def test_latency_is_paid_along_the_way(self) -> None:
        # One micro-batch goes down and up: 2 * (stages - 1) messages.
        assert (
            simulate(pipeline("1f1b", 1, 4), CostModel(latency=0.25)).makespan == 4 * 3 + 6 * 0.25
        )


def check_1f1b(stages: int, micro_batches: int, costs: tuple[int, int, int]) -> None:
    """Makespan (m+p-1)(F+B), bubble (p-1)/(m+p-1), at most p-s micro-batches on stage s."""
    schedules = pipeline("1f1b", micro_batches, stages)
    result = simulate(schedules, CostModel(*costs))
    assert result.makespan == (micro_batches + stages - 1) * sum(costs)
    assert result.bubble_fraction == pytest.approx(
        (stages - 1) / (micro_batches + stages - 1), abs=1e-12
    )
    assert result.peak_activations == tuple(
        min(stages - stage, micro_batches) for stage in range(stages)
    )


def check_interleaved(
    stages: int, micro_batches: int, num_chunks: int, costs: tuple[int, int, int]
) -> None:
    """Bubble (p-1)(F+B)/v, at most 2(p-s-1) + (v-1)p + 1 activations of a chunk on stage s.

    Costs are given per chunk, so that times are whole; a ragged last round is no longer than a
    full one.
    """
    schedules = pipeline("interleaved", micro_batches, stages, num_chunks)
    result = simulate(schedules, CostModel(*(num_chunks * cost for cost in costs)))
    rounds = -(-micro_batches // stages)
    full = num_chunks * rounds * stages * sum(costs) + (stages - 1) * sum(costs)
    peaks = tuple(
        2 * (stages - stage - 1) + (num_chunks - 1) * stages + 1 for stage in range(stages)
    )
    bound = tuple(min(peak, micro_batches * num_chunks) for peak in peaks)
    assert tuple(each.num_pipe_buffers() for each in schedules) == bound
    if micro_batches % stages == 0:
        assert result.makespan == full
        assert result.peak_activations == bound
    else:
        assert result.makespan <= full
        assert all(peak <= most for peak, most in zip(result.peak_activations, bound, strict=True))


def check_zero_bubble(stages: int, micro_batches: int) -> None:
    """Bubble (p-1)(F+I-W) = p-1 with unit costs, at most p micro-batches on every stage.

    With fewer micro-batches than stages nothing hides the way of the last one: down and up again,
    and its weights.
    """
    schedules = pipeline("zero_bubble", micro_batches, stages)
    result = simulate(schedules, CostModel(1, 1, 1))
    assert result.makespan == max(
        3 * micro_batches + stages - 1, 2 * micro_batches + 2 * stages - 1
    )
    assert result.peak_activations == (min(stages, micro_batches),) * stages
    # Not more than 1F1B holds on its first stage: the schedule is paid with no memory.
    assert max(result.peak_activations) == min(stages, micro_batches)


class TestSends:
    """Whether sends may block."""

    @pytest.mark.parametrize("name", SCHEDULE_NAMES)
    def test_training_needs_asynchronous_sends(self, name: str) -> None:
        # Two neighbours that both send first wait for one another: the engine's channels must not
        # block.
        assert needs_asynchronous_sends(pipeline(name, 8, 4, 2 if name == "interleaved" else 1))

    def test_one_way_does_not(self) -> None:
        assert not needs_asynchronous_sends([InferenceSchedule(8, 4, stage) for stage in range(4)])
        assert not needs_asynchronous_sends(pipeline("1f1b", 8, 1))

    def test_a_stage_may_send_to_itself(self) -> None:
        # One stage with two chunks hands over to itself, which must not count as blocking.
        assert not needs_asynchronous_sends(pipeline("interleaved", 4, 1, 2))
        flat = [each for step in make_schedule("interleaved", 4, 1, 0, 2).steps() for each in step]
        assert sum(isinstance(each, RecvActivation) for each in flat) == 4


POSTED = [
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


@pytest.mark.parametrize("name, micro_batches, stages, chunks", POSTED)
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


@pytest.mark.parametrize("name, micro_batches, stages, chunks", POSTED)
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
    for shape in POSTED:
        schedules = schedules_of(*shape)
        for receiver in range(len(schedules)):
            for coming in arrivals(schedules, receiver).values():
                needs = [arrival.needs for arrival in coming]
                assert needs == sorted(needs)


def test_schedules_that_wait_for_each_other() -> None:
    whole = schedules_of("1f1b", 2, 2, 1)
    with pytest.raises(ValueError, match=r"stages \[1\] wait"):
        arrivals([schedules_of("1f1b", 1, 2, 1)[0], whole[1]], 0)
