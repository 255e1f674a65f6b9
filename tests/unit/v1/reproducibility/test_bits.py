"""Equal bits on 1, 2, 3 and 4 ranks: digests of masters and optimizer state, whatever the stage."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from unit.common import DistributedFixture, DistributedTest
from unit.models import seeded, tokens

MICRO_BATCHES = 12
STEPS = 2
ADAM = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    # The first step overflows.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 15, "hysteresis": 1}},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": ADAM,
    "sgd": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "lion": {"type": "Lion", "params": {"lr": 1e-3}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 1e-2}},
    "lamb": {"type": "Lamb", "params": {"lr": 1e-2}},
    "muon": {"type": "Muon", "params": {"lr": 1e-2}},
}
HOST = {"offload_optimizer": {"device": "cpu"}}
BOTH = {**HOST, "offload_param": {"device": "cpu"}}
SMALL = {"reduce_bucket_size": 700, "allgather_bucket_size": 700}


class Case(NamedTuple):
    """One configuration; all of one precision and optimizer give one digest."""

    stage: int
    precision: str = "fp32"
    optimizer: str = "adam"
    zero: dict[str, Any] = {}
    recompute: str = ""


ONE_RANK = [
    *(Case(2, precision) for precision in PRECISIONS),
    *(Case(1 + number % 3, "fp32", name) for number, name in enumerate(OPTIMIZERS) if number),
]
CASES: dict[int, list[Case]] = {
    2: [
        Case(0),
        Case(1, "bf16", zero=SMALL),
        Case(2, "fp16", zero={**HOST, **SMALL, "overlap_comm": True}),
        Case(3, "fp32", zero={"stage3_param_persistence_threshold": 0}, recompute="reentrant"),
        Case(3, "bf16", zero=BOTH),
        Case(2, optimizer="lamb"),
        Case(1, optimizer="muon"),
    ],
    3: [
        Case(0, "bf16"),
        Case(0, "fp16"),
        Case(1, "fp32", zero={**HOST, "round_robin_gradients": True}),
        Case(2, "bf16", zero={"reduce_scatter": False}, recompute="again"),
        Case(3, "fp16", zero={"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
        Case(3, optimizer="lamb"),
        Case(2, optimizer="lion", zero=HOST),
        Case(1, optimizer="adagrad", zero=HOST),
        Case(3, optimizer="sgd"),
    ],
    4: [
        Case(1, "bf16", zero={"num_optimizer_instances": 2}),
        Case(2, "fp16", zero={"num_optimizer_instances": 2, "overlap_comm": True, **SMALL}),
        Case(3, "fp32", zero={"zero_hpz_partition_size": 2}),
        Case(3, "bf16", zero={"num_optimizer_instances": 2}),
    ],
}


class Net(nn.Module):
    """Tied, frozen, sometimes unused parameters, and dropout."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(61, 24)
        self.norm = nn.LayerNorm(24)
        self.up, self.down = nn.Linear(24, 53), nn.Linear(53, 24, bias=False)
        self.sometimes = nn.Linear(24, 24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.dropout = nn.Dropout(0.1)
        self.recompute = recompute

    def block(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.dropout(torch.tanh(self.up(self.norm(hidden)))))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(batch)
        if self.recompute:
            is_reentrant = self.recompute == "reentrant"
            hidden = checkpoint(self.block, hidden, use_reentrant=is_reentrant)
        else:
            hidden = self.block(hidden)
        hidden = hidden + self.frozen(hidden)
        if int(batch[0, 0]) % 2:
            hidden = hidden + self.sometimes(hidden)
        logits = (hidden @ self.tokens.weight.T).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.roll(-1, 1).flatten())


def batch_of(step: int, number: int) -> torch.Tensor:
    return tokens(1000 * step + number, 61, 2, 11)


def engine_of(case: Case, **more: Any) -> Any:
    """An engine that has taken no step."""
    world = dist.get_world_size()
    model = seeded(Net, case.recompute)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES // world,
        "gradient_clipping": 0.4,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": OPTIMIZERS[case.optimizer],
        "zero_optimization": {"stage": case.stage, **case.zero},
        "reproducibility": {"world_size_invariant": True},
        **PRECISIONS[case.precision],
        **more,
    }
    trained = [param for param in model.parameters() if param.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def train(engine: Any, first: int = 0, steps: int = STEPS) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(first, first + steps):
        for micro_step in range(MICRO_BATCHES // world):
            engine.backward(engine(batch_of(step, micro_step * world + rank)))
            engine.step()


def digest_of(case: Case) -> str:
    engine = engine_of(case)
    train(engine)
    assert engine.skipped_steps == (case.precision == "fp16")
    digest: str = engine.state_digest()
    engine.destroy()
    return digest


class on_one_rank(DistributedFixture):  # noqa: N801  # the name of the fixture
    world_size = 1

    def run(self, class_tmpdir: str) -> None:
        if not Path(class_tmpdir, "digests").exists():
            found = {f"{c.precision} {c.optimizer}": digest_of(c) for c in ONE_RANK}
            assert len(set(found.values())) == len(found), found
            Path(class_tmpdir, "digests").write_text(json.dumps(found), encoding="utf-8")


class Equal:
    world_size: int

    def test_as_one_rank(self, on_one_rank: None, class_tmpdir: str) -> None:
        # Kills: a leaf twice, two leaves exchanged, a mean by ranks, a norm by blocks, another
        # kernel at the end of a slice, a random state by rank.
        wanted = json.loads(Path(class_tmpdir, "digests").read_text(encoding="utf-8"))
        for case in CASES[self.world_size]:
            assert digest_of(case) == wanted[f"{case.precision} {case.optimizer}"], case


class TestTwo(Equal, DistributedTest):
    world_size = 2

    def test_what_depends_on_ranks_is_refused(self) -> None:
        for key, value in {
            "gradient_allreduce_op": "sum",
            "prescale_gradients": True,
            "communication_data_type": "fp32",
        }.items():
            with pytest.raises(DeepSpeedConfigError, match=key):
                engine_of(Case(2), **{key: value})


class TestThree(Equal, DistributedTest):
    world_size = 3


class TestFour(Equal, DistributedTest):
    world_size = 4
