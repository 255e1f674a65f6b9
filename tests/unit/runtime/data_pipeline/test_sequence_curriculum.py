"""Sequences that grow and batches of unequal sizes against one process; difficulties of steps."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from unit.common import DistributedTest
from unit.models import TokenModel, config_of, drawn, seeded, sgd, tokens
from unit.one_process import OneProcess, mean_square, of_all_ranks

import deepspeed
from deepspeed import comm as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

LENGTH, ROWS, ACCUMULATION, STEPS, LR = 12, 2, 2, 6, 0.5
# 2 + 10 x sqrt(t / 5) at steps 1 to 6, rounded down to twos.
LENGTHS = [6, 8, 8, 10, 12, 12]
SCHEDULE = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 2,
    "max_difficulty": LENGTH,
    "schedule_type": "fixed_root",
    "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 2, "root_degree": 2},
}


def make_engine(model: nn.Module | None = None, stage: int = 0, **keys: Any) -> Any:
    zero = {"stage3_param_persistence_threshold": 0}
    config = config_of(stage, ROWS, ACCUMULATION, optimizer=sgd(LR), zero_optimization=zero)
    config |= {"zero_allow_untested_optimizer": True, "curriculum_learning": SCHEDULE, **keys}
    return deepspeed.initialize(model=model or TokenModel(), config=config)[0]


MOMENTUM = {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}}


def tokens_of(number: int, rank: int) -> torch.Tensor:
    step, micro = divmod(number, ACCUMULATION)
    return tokens(1000 * step + 10 * micro + rank, 16, ROWS, LENGTH)


def train(engine: Any, steps: range, bad_step: int | None = None) -> list[float]:
    losses = []
    for step in steps:
        for batch in of_all_ranks(tokens_of, step, ACCUMULATION)[dist.get_rank() :: 2]:
            loss = engine(batch, math.inf if step == bad_step else 1.0)
            losses.append(float(loss))
            engine.backward(loss)
            engine.step()
    return losses


def reference() -> list[torch.Tensor]:
    """Parameters after the same steps of one plain process, each on the whole batch."""
    model = TokenModel()
    one = OneProcess(model, torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9))
    for step, length in enumerate(LENGTHS):
        one.step([torch.cat(of_all_ranks(tokens_of, step, ACCUMULATION))[:, :length]])
    return list(one.params().values())


def parameters(engine: Any) -> list[torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [param.detach().clone() for param in engine.module.parameters()]


def assert_parameters(engine: Any, wanted: list[torch.Tensor]) -> None:
    for ours, theirs in zip(parameters(engine), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class TestTraining(DistributedTest):
    world_size = 2

    def test_equals_one_process_and_goes_on_from_a_checkpoint(self, tmpdir: Any) -> None:
        # Kills: a length of the step before or of the micro-batch, one length in evaluation, a
        # resumed run that begins the schedule anew.
        expected, middle = reference(), 3 * ACCUMULATION
        lengths = [length for length in LENGTHS for _ in range(ACCUMULATION)]
        for stage in range(4):
            engine = make_engine(stage=stage, optimizer=MOMENTUM)
            losses = train(engine, range(3))
            engine.save_checkpoint(str(tmpdir), tag=f"stage{stage}")
            engine.eval()
            engine(tokens_of(0, 0))
            engine.train()
            losses += train(engine, range(3, STEPS))
            assert engine.module.lengths == [*lengths[:middle], None, *lengths[middle:]]
            assert_parameters(engine, expected)
            resumed = make_engine(stage=stage, optimizer=MOMENTUM)
            resumed.load_checkpoint(str(tmpdir), tag=f"stage{stage}")
            assert train(resumed, range(3, STEPS)) == losses[middle:]
            assert resumed.module.lengths == lengths[middle:]
            assert all(map(torch.equal, parameters(resumed), parameters(engine)))
            engine.destroy()
            resumed.destroy()

    def test_a_skipped_step_is_a_step_and_functions_are_asked(self) -> None:
        # Kills: ranks of which one counts a skipped step and another doesn't.
        custom = {**SCHEDULE, "schedule_type": "custom", "schedule_config": {}}
        engine = make_engine(curriculum_learning=custom, fp16={"enabled": True})
        with pytest.raises(DeepSpeedConfigError, match="needs a function"):
            engine(tokens_of(0, 0))
        with pytest.raises(DeepSpeedConfigError, match="'words' has no schedule_type"):
            engine.set_custom_curriculum_learning_schedule({"words": lambda step: step})
        engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: LENGTH - step})
        train(engine, range(4), bad_step=1)
        assert engine.skipped_steps == 1
        assert engine.module.lengths == [11, 11, 10, 10, 9, 9, 8, 8]
        assert engine.curriculum_scheduler_legacy.get_current_difficulty() == 8
        plain = make_engine(curriculum_learning={**SCHEDULE, "curriculum_type": "words"})
        with pytest.raises(DeepSpeedConfigError, match="'words' has no schedule_type"):
            plain.set_custom_curriculum_learning_schedule({"words": lambda step: step})
        train(plain, range(2))
        assert plain.module.lengths == [None] * 4
        assert plain.curriculum_scheduler_legacy.get_current_difficulty() == LENGTHS[1]

    def test_a_pipelines_batches_are_cut_by_its_script(self) -> None:
        layers = [nn.Linear(1, 3), nn.Linear(3, 1)]
        engine = make_engine(PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss()))
        cut: list[int] = []

        def cut_batch(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, Any]:
            cut.append(engine.curriculum_scheduler_legacy.get_current_difficulty())
            return batch[0][:, : cut[-1]], batch[1][:, : cut[-1]]

        engine.set_batch_fn(cut_batch)
        data = [(torch.ones(ROWS, LENGTH, 1), torch.zeros(ROWS, LENGTH, 1))] * ACCUMULATION
        for _ in range(3):
            assert math.isfinite(float(engine.train_batch(iter(data))))
        assert cut == [length for length in LENGTHS[:3] for _ in range(ACCUMULATION)]

    def test_what_cannot_be_told_the_length_is_refused(self) -> None:
        with pytest.raises(DeepSpeedConfigError, match="Linear.forward does not take"):
            make_engine(nn.Linear(2, 2))
        with pytest.raises(DeepSpeedConfigError, match="split over 2 ranks"):
            make_engine(sequence_parallel_size=2)


CLIP = 0.4
# Samples by step, micro-batch and rank.
UNEQUAL_ROWS = [[[1, 3], [4, 2]], [[5, 1], [1, 2]]]


def make_model() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)), seed=3)


def batch_of(number: int, rank: int) -> torch.Tensor:
    step, micro = divmod(number, ACCUMULATION)
    return drawn(100 * step + 10 * micro + rank, UNEQUAL_ROWS[step][micro][rank], 5)


class TestUnequalBatches(DistributedTest):
    world_size = 2

    def test_equal_one_process(self) -> None:
        # Kills: a mean of ranks' means, which favours small batches; a total of one micro-batch.
        one, norms = OneProcess(make_model(), LR, mean_square, CLIP), []
        for step in range(len(UNEQUAL_ROWS)):
            one.step([torch.cat(of_all_ranks(batch_of, step, ACCUMULATION))])
            norms.append(float(one.norm))
        assert norms[0] > CLIP
        for stage in range(4):
            plain = {"curriculum_learning": {"enabled": False}}
            engine = make_engine(make_model(), stage, gradient_clipping=CLIP, **plain)
            for step in range(len(UNEQUAL_ROWS)):
                own = of_all_ranks(batch_of, step, ACCUMULATION)[dist.get_rank() :: 2]
                self.step(engine, own)
                assert abs(engine.get_global_grad_norm() - norms[step]) < 1e-5, stage
            assert_parameters(engine, list(one.params().values()))
            engine.destroy()

    def step(self, engine: Any, micro_batches: list[torch.Tensor]) -> None:
        """What the page has."""
        rows = sum(len(batch) for batch in micro_batches)
        total = torch.tensor(float(rows), device=engine.device)
        dist.all_reduce(total, group=engine.data_parallel_group)
        share = engine.dp_world_size * engine.gradient_accumulation_steps() / total
        for batch in micro_batches:
            loss = engine(batch).square().sum() * share
            engine.backward(loss)
            engine.step()


def block(schedule_type: str, least: int, largest: int, **schedule: Any) -> dict[str, Any]:
    limits = {"min_difficulty": least, "max_difficulty": largest}
    return {**limits, "schedule_type": schedule_type, "schedule_config": schedule}


LINEAR = block("fixed_linear", 8, 64, total_curriculum_step=10, difficulty_step=8)
ROOT = block("fixed_root", 8, 64, total_curriculum_step=100, difficulty_step=8, root_degree=2)
DISCRETE = block("fixed_discrete", 1, 9, difficulty=[1, 4, 9], max_step=[2, 5])
# Never less than the least, also where that is no multiple: upstream begins with 0 here.
STEEP = block("fixed_linear", 5, 20, total_curriculum_step=4, difficulty_step=8)
FLAT = block("fixed_linear", 5, 20, total_curriculum_step=40, difficulty_step=8)


@pytest.mark.parametrize(
    ("config", "steps", "difficulties"),
    [
        # 8 + 56 x t / 10, rounded down to eights.
        (LINEAR, range(1, 13), [8, 16, 24, 24, 32, 40, 40, 48, 56, 64, 64, 64]),
        # 8 + 56 x sqrt(t / 100): 13.6, 19.2, 36, 58.4, 64
        (ROOT, (1, 4, 25, 81, 100, 400), [8, 16, 32, 56, 64, 64]),
        (DISCRETE, range(1, 8), [1, 1, 4, 4, 4, 9, 9]),
        (STEEP, range(1, 7), [8, 8, 16, 16, 16, 20]),
        (FLAT, (1, 7, 8, 41), [5, 5, 8, 16]),
    ],
)
def test_difficulties(config: dict[str, Any], steps: Any, difficulties: list[int]) -> None:
    # Kills: steps counted from 0, rounding to the nearest, another root, an end below the largest.
    scheduler = CurriculumScheduler(config)
    assert scheduler.get_current_difficulty() == config["min_difficulty"]
    assert [scheduler.update_difficulty(step) for step in steps] == difficulties
    assert scheduler.get_current_difficulty() == difficulties[-1]
    # Of any step at any time: a run may go back to a checkpoint.
    assert [scheduler.get_difficulty(step) for step in steps] == difficulties


def test_a_custom_schedule() -> None:
    # Kills: a schedule that stays at the largest difficulty once it was there.
    scheduler = CurriculumScheduler(block("custom", 1, 100))
    with pytest.raises(DeepSpeedConfigError, match="set_custom_curriculum_learning_schedule"):
        scheduler.update_difficulty(1)
    scheduler.set_custom_get_difficulty(lambda step: 101 - step)
    assert [scheduler.update_difficulty(step) for step in (1, 2, 90)] == [100, 99, 11]
    for wrong in (0, 2.5, True):
        scheduler.set_custom_get_difficulty(lambda step, wrong=wrong: wrong)  # type: ignore[misc]  # that is the point
        with pytest.raises(ValueError, match="positive whole number"):
            scheduler.update_difficulty(1)


def test_state() -> None:
    scheduler, other = CurriculumScheduler(LINEAR), CurriculumScheduler(ROOT)
    scheduler.update_difficulty(5)
    other.set_state(scheduler.get_state())
    assert other.get_state() == scheduler.get_state()
    assert other.get_current_difficulty() == 32 and other.update_difficulty(9) == 56
    other.set_current_difficulty(3)
    assert other.get_current_difficulty() == 3


WHOLE = "expected a whole number of at least"


def discrete(difficulty: Any, max_step: list[int]) -> dict[str, Any]:
    return block("fixed_discrete", 1, 9, difficulty=difficulty, max_step=max_step)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LINEAR | {"min_difficulty": None}, "min_difficulty is missing"),
        (LINEAR | {"max_difficulty": 4}, f"max_difficulty: 4: {WHOLE} 8"),
        (LINEAR | {"schedule_type": "linear"}, "'linear': expected one of fixed_linear"),
        (block("fixed_linear", 8, 64, difficulty_step=8), "total_curriculum_step is missing"),
        (
            block("fixed_linear", 8, 64, difficulty_step=0, total_curriculum_step=5),
            f"difficulty_step: 0: {WHOLE} 1",
        ),
        (ROOT | {"schedule_type": "fixed_linear"}, "root_degree: 2: expected no such key, but"),
        (discrete([1, 2], [3, 4]), "one entry less than difficulty"),
        (discrete([1, 2, 3], [4, 3]), "steps in their order"),
        (discrete(5, [4]), "a list of whole numbers"),
    ],
)
def test_what_makes_no_sense(config: dict[str, Any], said: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=said):
        CurriculumScheduler(config)
