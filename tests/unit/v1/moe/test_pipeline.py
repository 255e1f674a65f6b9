"""Experts inside pipelines: as one process that has all layers and all experts; checkpoints are
those of models without stages.

The balancing losses travel with the hidden states, in a tuple, and are added up by each layer with
experts; bounds are `runner`'s.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.comm.watch import intent
from deepspeed.comm.watch.observation import CollectiveCall, group_size
from deepspeed.pipe import LayerSpec, PipelineModule
from unit.common import DistributedFixture, DistributedTest
from unit.v1.checkpoint.runs import ACCUMULATE, BF16, differences, otherwise
from unit.v1.checkpoint.test_experts import whole
from unit.v1.gathering import noted
from unit.v1.moe.runner import (
    AUX_WEIGHT,
    NUM_EXPERTS,
    ROWS,
    WIDTH,
    Case,
    CaseRun,
    exact_in_bf16,
    micro_batch,
    mixture,
    reference_step,
)
from unit.v1.moe.slow_gate import Tensors, moe_forward

Carried = tuple[torch.Tensor, torch.Tensor]  # hidden [rows, width] and the balancing losses so far
NUM_LAYERS, WITH_EXPERTS = 6, (1, 4)


class Dense(nn.Module):
    """A linear layer; the first one is given the hidden states alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, carried: torch.Tensor | Carried) -> Carried:
        if isinstance(carried, torch.Tensor):
            carried = carried, carried.new_zeros((), dtype=torch.float32)
        hidden, balance = carried
        return self.linear(hidden), balance


class Mixture(nn.Module):
    """Experts beside a shortcut."""

    def __init__(self, ep_size: int, k: int, drop: bool) -> None:
        super().__init__()
        self.moe = mixture(ep_size, k, drop)

    def forward(self, carried: Carried) -> Carried:
        hidden, balance = carried
        output, l_aux, _ = self.moe(hidden)
        return hidden + output, balance + l_aux


def loss_of(carried: Carried, target: torch.Tensor) -> torch.Tensor:
    """Mean square error in fp32, plus the balancing losses."""
    hidden, balance = carried
    return (hidden.float() - target).square().mean() + AUX_WEIGHT * balance


@dataclass(frozen=True)
class PipeCase(Case):
    """One configuration of a pipeline; `ep_size` is that of the first layer with experts.

    Attributes:
        parts: Boundaries of the parts' layers.
        other_size: `ep_size` of the second layer with experts.
        schedule: Of the pipeline; "interleaved" has two chunks per stage.
        interval: Layers per recomputed segment, 0 for none.
    """

    parts: tuple[int, ...] = (0, 3, NUM_LAYERS)
    other_size: int = 2
    schedule: str = "1f1b"
    interval: int = 0

    @property
    def chunks(self) -> int:
        """Model chunks per stage."""
        return 2 if self.schedule == "interleaved" else 1

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return (len(self.parts) - 1) // self.chunks


def make_pipeline(case: PipeCase) -> PipelineModule:
    """The pipeline of a case, over all ranks."""
    sizes = dict(zip(WITH_EXPERTS, (case.ep_size, case.other_size), strict=True))
    layers = [
        LayerSpec(Mixture, sizes[index], case.k, case.drop) if index in sizes else LayerSpec(Dense)
        for index in range(NUM_LAYERS)
    ]
    how = {"partition_method": list(case.parts), "num_model_chunks": case.chunks}
    return PipelineModule(layers, num_stages=case.stages, loss_fn=loss_of, **how)


def initial_parameters() -> dict[str, torch.Tensor]:
    """All parameters of the whole model, exact in bf16, every expert different."""
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(NUM_LAYERS):
        names = ["linear"]
        if index in WITH_EXPERTS:
            names = [f"experts.{number}" for number in range(NUM_EXPERTS)]
            shapes[f"{index}.wg"] = (NUM_EXPERTS, WIDTH)
        for name in names:
            shapes |= {f"{index}.{name}.weight": (WIDTH, WIDTH), f"{index}.{name}.bias": (WIDTH,)}
    return exact_in_bf16(shapes, 0.5)


def reference_loss(
    params: Tensors, case: PipeCase, batch: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Loss of one micro-batch of one data-parallel rank."""
    hidden, target = batch
    balance = torch.zeros(())
    for index in range(NUM_LAYERS):
        own = {n[2:]: value for n, value in params.items() if n.startswith(f"{index}.")}
        if index in WITH_EXPERTS:
            output, l_aux = moe_forward(hidden, own, case.gate, NUM_EXPERTS)
            hidden, balance = hidden + output, balance + l_aux
        else:
            hidden = nn.functional.linear(hidden, own["linear.weight"], own["linear.bias"])
    return loss_of((hidden, balance), target)


def world_reductions(call: CollectiveCall) -> list[tuple[int, ...]]:
    """Shapes of reductions over all ranks."""
    is_sum = call.name in ("all_reduce", "reduce")
    counts = is_sum and group_size(call.group) == dist.get_world_size()
    return [tuple(call.argument("tensor").shape)] if counts else []


class PipeRun(CaseRun):
    """One case, through `train_batch`; norms are counted without the ledger's reduction."""

    def __init__(self, case: PipeCase, verify: dict[str, Any] | None = None) -> None:
        self.case: PipeCase = case
        self.failures: list[str] = []
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.ledger = bool(verify and verify.get("ledger"))
        module = make_pipeline(case)
        self.replica, self.replicas = module.grid.data_parallel_id, module.grid.data_parallel_size
        self.initial = initial_parameters()
        named = module.named_parameters()
        self.params = {self._whole_name(name): param for name, param in named}
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(self.initial[name])
        plan = {"schedule": case.schedule, "activation_checkpoint_interval": case.interval}
        config = {**self._config(), "pipeline": plan, "verify": verify or {}}
        self.engine = deepspeed.initialize(model=module, config=config)[0]
        self.found: dict[str, torch.Tensor] = {}
        self.reductions: list[tuple[int, ...]] = []
        self._observe_gradients()

    def _whole_name(self, name: str) -> str:
        layer, _, rest = name.partition(".")
        sizes = dict(zip(WITH_EXPERTS, (self.case.ep_size, self.case.other_size), strict=True))
        ep_size = sizes.get(int(layer), 1)
        return f"{layer}.{self._global_name(rest, self.replica % ep_size * NUM_EXPERTS // ep_size)}"

    def _observe_gradients(self) -> None:
        """Read gradients right before each step, and count its norm's collectives."""
        original: Callable[..., None] = self.engine._take_model_step

        def observed(*args: Any) -> None:
            self.found = self._grads()
            with noted(world_reductions) as self.reductions:
                original(*args)

        self.engine._take_model_step = observed

    def _train(self, step: int, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        case = self.case
        expected = reference_step(before, case, step, self.replicas, reference_loss)
        losses = [loss for of_replica in expected.losses for loss in of_replica]
        wanted = sum(losses) / len(losses)
        count = range(case.accumulation)
        own = (micro_batch(step, self.replica, micro, case.dtype) for micro in count)
        loss = float(self.engine.train_batch(own))
        masters = self._masters()
        self._compare_step(step, self.found, masters, expected)
        self._compare_number(step, "loss", loss, wanted)
        if not self.ledger and len(self.reductions) != 1:
            told = f"the norm took reductions of {self.reductions} elements, not one"
            self.failures.append(f"step {step}: {told}")
        return masters


QUARTERS = (0, 1, 3, 4, NUM_LAYERS)
CHUNKED = {"schedule": "interleaved", "interval": 1}


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
            (PipeCase(2, 1, True, 1, "fp32", accumulation=2, parts=(0, 1, 6), other_size=1), True),
            (PipeCase(1, 1, True, 0, "bf16", accumulation=2, parts=(0, 5, 6), other_size=1), False),
            (PipeCase(2, 1, True, 1, "fp32", accumulation=2, parts=QUARTERS, **CHUNKED), False),
        ],
    )
    def test(self, case: PipeCase, ledger: bool) -> None:
        verify = {"collectives": True, "collectives_timeout": 20, "ledger": ledger}
        try:
            failures = PipeRun(case, verify).run()
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
SHARDED = {"zero_optimization": {"stage": 1}}
KINDS: dict[str, dict[str, Any]] = {
    "fp32-0": {},
    "fp32-1": SHARDED,
    "bf16-1": {**BF16, **SHARDED},
    "accumulate-1": {**ACCUMULATE, **SHARDED},
}


def make(cut: Cut, kind: str, seed: int) -> Any:
    """An engine with other weights on each rank, as far as ranks may differ."""
    torch.manual_seed(10 * seed + dist.get_rank())
    first, second = cut.ep_sizes
    sizes = {"parts": cut.parts, "other_size": second, "schedule": cut.schedule}
    module = make_pipeline(PipeCase(first, 1, True, 0, "", **sizes))
    adam = {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": adam},
        "pipeline": {"schedule": cut.schedule},
        **KINDS[kind],
    }
    return deepspeed.initialize(model=module, config=config)[0]


def train(engine: Any, steps: int) -> list[float]:
    """Losses of the next steps."""
    dtype, replica = next(engine.module.parameters()).dtype, engine.grid.data_parallel_id
    losses = []
    for step in range(engine.global_steps, engine.global_steps + steps):
        batch = (micro_batch(step, replica, micro, dtype) for micro in range(2))
        losses.append(float(engine.train_batch(batch)))
    return losses


def cuts_of_this_world() -> list[tuple[str, Cut]]:
    return [(name, cut) for name, cut in CUTS.items() if cut.world == dist.get_world_size()]


# What is saved as which kind: one kind is read by the next two cuts, the others by one each, of
# which the first reads its own files.
SAVED = {
    "fp32-1": {name: (*CUTS, *CUTS)[at + 1 : at + 3] for at, name in enumerate(CUTS)},
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
                    torch.save((held, went_on), f"{class_tmpdir}/{kind}-{name}.pt")


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
                    path = f"{class_tmpdir}/{kind}-{saved}"
                    held, went_on = torch.load(f"{path}.pt", weights_only=False)
                    engine = make(cut, kind, 2)
                    engine.load_checkpoint(path)
                    told = (kind, saved, name)
                    assert otherwise(held, whole(engine)) == [], told
                    # Half precision rounds partial sums otherwise, where they are taken elsewhere.
                    tolerance = 1e-5 if kind.startswith("fp32") else 2e-2
                    assert train(engine, 1) == pytest.approx(went_on, rel=tolerance), told


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
        kept = "layer_{0}_expert_{1}_mp_rank_0{0}_model_states.pt"
        experts = [[kept.format(layer, e) for e in range(NUM_EXPERTS)] for layer in (0, 1)]
        assert {name for name in names if "_expert_" in name} == {*experts[0], *experts[1]}
        places = [f"{replica}_mp_rank_0{stage}" for replica in (0, 1) for stage in (0, 1)]
        optimizers = {f"bf16_zero_pp_rank_{place}_optim_states.pt" for place in places}
        assert {name for name in names if "optim" in name} == optimizers
        inside = "4.moe.deepspeed_moe.experts.deepspeed_experts.3"
        expert = torch.load(folder / experts[1][3], weights_only=True)
        assert set(expert) == {f"{inside}.weight", f"{inside}.bias"}
        rest = torch.load(folder / "layer_04-model_states.pt", weights_only=True)
        assert set(rest) == {"moe.deepspeed_moe.gate.wg.weight"}
        model = torch.load(folder / "mp_rank_01_model_states.pt", weights_only=True)
        assert model["module"] is None and model["num_experts"] == [NUM_EXPERTS]
        before = whole(engine)
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / experts[1][2]).unlink()
        dist.barrier()
        train(engine, 1)
        changed = whole(engine)
        told = "layer_1_expert_2_mp_rank_01_model_states.pt is missing"
        with pytest.raises(CheckpointError, match=told):
            engine.load_checkpoint(str(tmpdir))
        assert differences(changed, whole(engine)) == []
        assert dist.get_rank() or differences(before, changed) != []
