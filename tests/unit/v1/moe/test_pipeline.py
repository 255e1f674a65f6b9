"""Experts inside pipelines: as one process; checkpoints are those of models without stages."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.comm.watch import intent
from unit.common import DistributedFixture, DistributedTest
from unit.v1.checkpoint.runs import differences
from unit.v1.checkpoint.test_experts import whole
from unit.v1.moe.pipeline import NUM_LAYERS, PipeCase, PipeRun, make_pipeline
from unit.v1.moe.runner import NUM_EXPERTS, ROWS, micro_batch

QUARTERS = (0, 1, 3, 4, NUM_LAYERS)


class TestTraining(DistributedTest):
    """Kills: groups of experts that reach over stages; a stage without experts, or with others,
    that makes other groups than the rest (it would wait); experts' gradients divided by the ranks
    that hold them; a norm that lacks a stage's experts.
    """

    world_size = 4

    @pytest.mark.parametrize(
        "case, ledger",
        [
            (PipeCase(2, 1, True, 0, "fp32", accumulation=3), True),
            (PipeCase(2, 2, False, 1, "bf16", accumulation=2), False),
            # The stages' first groups are of other sizes.
            (PipeCase(1, 2, True, 1, "fp32", accumulation=2, schedule="zero_bubble"), False),
            # Only one stage has experts.
            (
                PipeCase(
                    2, 1, True, 1, "fp32", accumulation=2, parts=(0, 1, NUM_LAYERS), other_size=1
                ),
                True,
            ),
            (
                PipeCase(
                    1, 1, True, 0, "bf16", accumulation=2, parts=(0, 5, NUM_LAYERS), other_size=1
                ),
                False,
            ),
            (
                PipeCase(
                    2,
                    1,
                    True,
                    1,
                    "fp32",
                    accumulation=2,
                    parts=QUARTERS,
                    schedule="interleaved",
                    interval=1,
                ),
                False,
            ),
        ],
    )
    def test(self, case: PipeCase, ledger: bool) -> None:
        try:
            failures = PipeRun(
                case, {"collectives": True, "collectives_timeout": 20, "ledger": ledger}
            ).run()
        finally:
            intent.disable()
        assert not failures, "\n".join(failures)


class Cut(NamedTuple):
    """Ranks (always 2 data-parallel ones), parts and schedule, ranks per set of experts."""

    world: int
    parts: tuple[int, ...]
    schedule: str = "1f1b"
    ep_sizes: tuple[int, int] = (2, 2)


CUTS = {
    "one stage": Cut(2, (0, NUM_LAYERS)),
    "two stages": Cut(4, (0, 2, NUM_LAYERS)),
    "chunks": Cut(4, QUARTERS, "interleaved", (2, 1)),
    "no experts first": Cut(4, (0, 1, NUM_LAYERS), "zero_bubble", (1, 2)),
}
BF16 = {"bf16": {"enabled": True}}
KINDS: dict[str, dict[str, Any]] = {
    "fp32-0": {},
    "fp32-1": {"zero_optimization": {"stage": 1}},
    "bf16-1": {**BF16, "zero_optimization": {"stage": 1}},
    "accumulate-1": {
        **BF16,
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1},
    },
}


def make(cut: Cut, kind: str, seed: int) -> Any:
    """An engine with other weights on each rank, as far as ranks may differ."""
    torch.manual_seed(10 * seed + dist.get_rank())
    first, second = cut.ep_sizes
    module = make_pipeline(
        PipeCase(first, 1, True, 0, "", parts=cut.parts, other_size=second, schedule=cut.schedule)
    )
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True},
        },
        "pipeline": {"schedule": cut.schedule},
        **KINDS[kind],
    }
    return deepspeed.initialize(model=module, config=config)[0]


def train(engine: Any, steps: int) -> list[float]:
    """Losses of the next steps."""
    dtype, replica = next(engine.module.parameters()).dtype, engine.grid.data_parallel_id
    return [
        float(
            engine.train_batch(
                micro_batch(engine.global_steps, replica, micro, dtype) for micro in range(2)
            )
        )
        for _ in range(steps)
    ]


def cuts_of_this_world() -> list[tuple[str, Cut]]:
    return [(name, cut) for name, cut in CUTS.items() if cut.world == dist.get_world_size()]


# What is saved as which kind: one kind is read by every cut, the others by one each, of which the
# first reads its own files.
SAVED = {
    "fp32-1": {name: tuple(other for other in CUTS if other != name) for name in CUTS},
    "fp32-0": {"one stage": ("one stage",), "chunks": ("no experts first",)},
    "bf16-1": {"chunks": ("two stages",)},
    "accumulate-1": {"one stage": ("chunks",)},
}


class SavedExpertStages(DistributedFixture):
    """All of them, with what they held and how they went on."""

    world_size = [2, 4]
    exec_timeout = 120

    def run(self, class_tmpdir: Any) -> None:
        for name, cut in cuts_of_this_world():
            for kind in (kind for kind, saved in SAVED.items() if name in saved):
                engine = make(cut, kind, 1)
                train(engine, 2)
                engine.save_checkpoint(f"{class_tmpdir}/{kind}-{name}")
                held, went_on = whole(engine), train(engine, 1)
                if dist.get_rank() == 0:
                    torch.save(
                        {"held": held, "went_on": went_on}, f"{class_tmpdir}/{kind}-{name}.pt"
                    )


class TestOtherStages(DistributedTest):
    """Kills: layers with experts numbered by each stage for itself, experts in the file of their
    layer (each rank has others), or read from the stage that has them now.
    """

    world_size = [2, 4]
    exec_timeout = 120

    def test_goes_on(self, SavedExpertStages: Any, class_tmpdir: Any) -> None:
        for name, cut in cuts_of_this_world():
            for kind, by_cut in SAVED.items():
                for saved in (saved for saved, readers in by_cut.items() if name in readers):
                    wanted = torch.load(f"{class_tmpdir}/{kind}-{saved}.pt", weights_only=False)
                    engine = make(cut, kind, 2)
                    engine.load_checkpoint(f"{class_tmpdir}/{kind}-{saved}")
                    told = (kind, saved, name)
                    assert differences(wanted["held"], whole(engine)) == [], told
                    # Half precision rounds partial sums otherwise, where they are taken elsewhere.
                    tolerance = 1e-5 if kind.startswith("fp32") else 2e-2
                    assert train(engine, 1) == pytest.approx(wanted["went_on"], rel=tolerance), told


class TestFiles(DistributedTest):
    world_size = 4

    def test_names_and_keys(self, tmpdir: Any) -> None:
        # Layers of the whole pipeline and experts of all ranks are counted; MM is the rank among
        # those that hold parts of a model.
        engine = make(CUTS["two stages"], "bf16-1", 1)
        train(engine, 1)
        engine.save_checkpoint(str(tmpdir), tag="t")
        folder = Path(str(tmpdir), "t")
        names = {path.name for path in folder.iterdir()}
        experts = [
            [
                f"layer_{layer}_expert_{e}_mp_rank_0{layer}_model_states.pt"
                for e in range(NUM_EXPERTS)
            ]
            for layer in (0, 1)
        ]
        assert {name for name in names if "_expert_" in name} == {*experts[0], *experts[1]}
        assert {name for name in names if "optim" in name} == {
            f"bf16_zero_pp_rank_{replica}_mp_rank_0{stage}_optim_states.pt"
            for replica in (0, 1)
            for stage in (0, 1)
        }
        inside = "moe.deepspeed_moe.experts.deepspeed_experts.3"
        assert set(torch.load(folder / experts[1][3], weights_only=True)) == {
            f"4.{inside}.weight",
            f"4.{inside}.bias",
        }
        assert set(torch.load(folder / "layer_04-model_states.pt", weights_only=True)) == {
            "moe.deepspeed_moe.gate.wg.weight"
        }
        model = torch.load(folder / "mp_rank_01_model_states.pt", weights_only=True)
        assert model["module"] is None and model["num_experts"] == [NUM_EXPERTS]
        before = whole(engine)
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / experts[1][2]).unlink()
        dist.barrier()
        train(engine, 1)
        changed = whole(engine)
        with pytest.raises(
            CheckpointError, match="layer_1_expert_2_mp_rank_01_model_states.pt is missing"
        ):
            engine.load_checkpoint(str(tmpdir))
        assert differences(changed, whole(engine)) == [] and differences(before, changed) != []
