"""A parameter that is frozen for some steps, by every optimizer: it and its state stand still, and
go on later as they do in one process.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.moe.layer import MoE
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.muon import MuonWithAuxAdam
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.sharding.parameter_histories import of_parameter
from deepspeed.utils import safe_get_full_grad
from unit.common import DistributedFixture, DistributedTest
from unit.models import config_of, drawn
from unit.one_process import own_loss
from unit.v1.silent.changes import DTYPES, ROWS, WIDTH, Net, full_master, set_frozen

STEPS = 9
Make = Callable[[Any], torch.optim.Optimizer]
CPU: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.5, "eps": 1e-3}}
LOW = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def of_torch(name: str, **options: Any) -> Make:
    return lambda params: getattr(torch.optim, name)(params, **options)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.5, eps=1e-3)


@dataclass(frozen=True)
class Kind:
    """How a row trains: stages, what makes the optimizer of both sides, or of one process where the
    configuration (`more`) makes the engine's; `tolerance` of masters, None: only what is frozen is
    compared.
    """

    stages: tuple[int, ...]
    make: Make
    zero: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    tolerance: float | None = 3e-6


BY_CONFIG = {"optimizer": ADAMW}
KINDS: dict[str, Kind] = {
    "NAdam": Kind((0, 1, 3), of_torch("NAdam", lr=0.01)),
    "RAdam": Kind((2, 3), of_torch("RAdam", lr=0.05)),
    "Adamax": Kind((1,), of_torch("Adamax", lr=0.05)),
    "Adadelta": Kind((3,), of_torch("Adadelta", lr=1.0)),
    "RMSprop": Kind((2,), of_torch("RMSprop", lr=0.01, momentum=0.9, centered=True)),
    "dampened SGD": Kind((1, 3), of_torch("SGD", lr=0.1, momentum=0.9, dampening=0.5)),
    "Adagrad": Kind((1, 3), of_torch("Adagrad", lr=0.1, initial_accumulator_value=0.3)),
    "host Adagrad": Kind((2, 3), lambda params: DeepSpeedCPUAdagrad(params, lr=0.1), CPU),
    "Rprop": Kind((1, 3), of_torch("Rprop", lr=0.01)),
    "ASGD": Kind((1, 3), of_torch("ASGD", lr=0.1, t0=2)),
    "Lion": Kind((1, 3), lambda params: FusedLion(params, lr=0.01, weight_decay=0.1)),
    "host Lion": Kind((2, 3), lambda params: DeepSpeedCPULion(params, lr=0.01), CPU),
    "Lamb": Kind((0, 1, 3), lambda params: FusedLamb(params, lr=0.02, weight_decay=0.1)),
    "Muon": Kind((1, 3), lambda params: MuonWithAuxAdam(params, lr=0.02, weight_decay=0.1)),
    "Adafactor": Kind((1, 2, 3), of_torch("Adafactor", lr=0.02)),
    "unfused": Kind((0,), of_torch("NAdam", lr=0.01), precision="fp16", tolerance=2e-5),
    "host": Kind((1, 3), adamw, CPU, BY_CONFIG),
    "half of it on the host": Kind(
        (3,), adamw, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, BY_CONFIG
    ),
    "half of it, of torch's": Kind(
        (3,), of_torch("NAdam", lr=0.01), {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    ),
    "files": Kind((2, 3), adamw, {"offload_optimizer": {"device": "nvme"}}, BY_CONFIG),
    "ahead of the step": Kind(
        (2,), adamw, {"offload_optimizer": {"device": "cpu", "speculative_update": True}}, BY_CONFIG
    ),
    "world size invariant": Kind(
        (1, 3), adamw, {}, {**BY_CONFIG, "reproducibility": {"world_size_invariant": True}}
    ),
    "16-bit masters": Kind(
        (1, 3), adamw, {}, {**BY_CONFIG, "bf16": {"enabled": True, **LOW}}, "bf16", 2e-2
    ),
    "stochastic rounding": Kind(
        *((1, 3), adamw, {}),
        {**BY_CONFIG, "bf16": {"enabled": True, **LOW, "stochastic_rounding": True}},
        *("bf16", None),
    ),
}


def engine_of(kind: Kind, stage: int, folder: Any) -> Any:
    zero = {**kind.zero, "stage3_param_persistence_threshold": 0} if stage == 3 else kind.zero
    if zero.get("offload_optimizer", {}).get("device") == "nvme":
        place = {**zero["offload_optimizer"], "nvme_path": str(folder)}
        zero = {**zero, "offload_optimizer": place}
    config = config_of(stage, ROWS, 1, kind.precision, zero_optimization=zero)
    if kind.precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 64.0}
    config.update(kind.more)
    config["zero_allow_untested_optimizer"] = True
    model = Net()
    given: dict[str, Any] = {"model_parameters": model.parameters()}
    if "optimizer" not in kind.more:
        given = {"optimizer": kind.make(model.parameters())}
    return deepspeed.initialize(model=model, config=config, **given)[0]


def check(kind: Kind, stage: int, folder: Any) -> None:
    """Step one process with the engine's gradients: some optimizers amplify the last bit."""
    engine, reference = engine_of(kind, stage, folder), Net()
    # Masters begin as the model's rounded weights.
    reference.to(DTYPES[kind.precision]).float()
    optimizer = kind.make(reference.parameters())
    wanted = dict(reference.named_parameters())
    for step in range(STEPS):
        frozen = set_frozen(engine.module, step)
        before = {name: full_master(engine.module, name) for name in frozen}
        engine.backward(own_loss(engine, drawn(10 * step + dist.get_rank(), ROWS, WIDTH)))
        for name, param in engine.module.named_parameters():
            wanted[name].grad = None
            if name not in frozen:
                found = safe_get_full_grad(param)
                wanted[name].grad = found.float().clone()
        engine.step()
        optimizer.step()
        for name, value in before.items():
            assert torch.equal(full_master(engine.module, name), value), f"{name} moved at {step}"
        for name, value in wanted.items() if kind.tolerance is not None else ():
            error = (full_master(engine.module, name) - value.detach()).abs().max().item()
            assert error <= kind.tolerance, f"{name} is off by {error:.1e} in step {step}"
    engine.destroy()


class TestOptimizers(DistributedTest):
    """Kills: a count of steps that goes on for what is frozen, moments or masters that move, runs
    of elements that are a parameter's neighbours'.
    """

    world_size = 2

    @pytest.mark.parametrize("name", KINDS)
    def test_leave_a_frozen_parameter(self, name: str, tmpdir: Any) -> None:
        for stage in KINDS[name].stages:
            check(KINDS[name], stage, Path(tmpdir) / str(stage))

    @pytest.mark.parametrize("name", ["16-bit masters", "host", "Lamb"])
    def test_counts_a_step_once(self, name: str) -> None:
        """Whatever lies between parameters that are stepped alike."""
        engine = engine_of(KINDS[name], 1, None)
        for step in range(STEPS):
            set_frozen(engine.module, step)
            engine.backward(own_loss(engine, drawn(10 * step + dist.get_rank(), ROWS, WIDTH)))
            engine.step()
        [(flat, state)] = engine.optimizer.optimizer.state.items()
        found = [
            int(of_parameter(state, one, flat)["step"]) for one in ("a.weight", "a.bias", "b.bias")
        ]
        assert found == [9, 3, 6]
        engine.destroy()


class DigestOfOneRank(DistributedFixture):
    """The digests of one process."""

    world_size = 1

    def run(self, class_tmpdir: Any) -> None:
        Path(class_tmpdir, "digests").write_text("\n".join(digests()), encoding="utf-8")


def digests() -> list[str]:
    """Of runs that do not depend on the number of ranks, at several stages."""
    found, world = [], dist.get_world_size()
    kind = KINDS["world size invariant"]
    for stage in (1, 3):
        more = {**kind.more, "gradient_accumulation_steps": 2 // world}
        engine = engine_of(replace(kind, more=more), stage, None)
        for step in range(STEPS):
            set_frozen(engine.module, step)
            for micro in range(2 // world):
                batch = drawn(10 * step + micro * world + dist.get_rank(), ROWS, WIDTH)
                engine.backward(own_loss(engine, batch))
                engine.step()
        found.append(str(engine.state_digest()))
        engine.destroy()
    return found


class TestInvariant(DistributedTest):
    """Kills: runs of elements whose updates depend on where shards are cut."""

    world_size = 2

    def test_digest_is_that_of_one_rank(self, DigestOfOneRank: Any, class_tmpdir: Any) -> None:
        assert Path(class_tmpdir, "digests").read_text(encoding="utf-8").split() == digests()


class Numbered(nn.Linear):
    """A layer of a pipeline that is found, and drawn, by its number."""

    def __init__(self, number: int, width: int, out: int) -> None:
        torch.manual_seed(number)
        super().__init__(width, out)
        self.number = number


def _layers() -> list[Any]:
    return [
        TiedLayerSpec("ends", Numbered, 0, WIDTH, 8, tied_weight_attr=["weight", "bias"]),
        LayerSpec(Numbered, 1, 8, 8),
        LayerSpec(Numbered, 2, 8, 8),
        LayerSpec(nn.Tanh),
        LayerSpec(Numbered, 3, 8, WIDTH),
        TiedLayerSpec("ends", Numbered, 0, WIDTH, 8, tied_weight_attr=["weight", "bias"]),
    ]


def freeze_numbers(module: nn.Module, step: int, first: dict[int, int]) -> None:
    """Freeze layers from a step on, by number, until step 6."""
    for layer in module.modules():
        if isinstance(layer, Numbered):
            layer.requires_grad_(not first.get(layer.number, 9) <= step < 6)


def square(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.float().square().mean()


class TestPipeline(DistributedTest):
    """Kills: a sum of tied gradients that fails, or that hangs, while they are frozen."""

    world_size = 2

    @pytest.mark.parametrize("stage", [0, 1])
    @pytest.mark.parametrize("frozen", [{0: 3, 1: 0}, {0: 3, 1: 3, 2: 3}], ids=["some", "stage"])
    def test_leaves_frozen_layers(self, frozen: dict[int, int], stage: int) -> None:
        how = {"num_stages": 2, "partition_method": "uniform", "loss_fn": square}
        module = PipelineModule(_layers(), **how)
        config = {**config_of(stage, ROWS, 2), "optimizer": ADAMW}
        engine = deepspeed.initialize(model=module, config=config)[0]
        first = Numbered(0, WIDTH, 8)
        others = Numbered(1, 8, 8), Numbered(2, 8, 8), nn.Tanh(), Numbered(3, 8, WIDTH)
        reference = nn.Sequential(first, *others, first)
        optimizer = adamw(reference.parameters())
        for step in range(STEPS):
            batches = [drawn(10 * step + number, ROWS, WIDTH) for number in range(2)]
            for one in (engine.module, reference):
                freeze_numbers(one, step, frozen)
            if step in (3, 6):  # a stage without gradients sends other activations
                engine.reset_activation_shape()
            optimizer.zero_grad()
            for batch in batches:
                (square(reference(batch), batch) / 2).backward()
            optimizer.step()
            engine.train_batch(iter([(batch, batch) for batch in batches]))
            wanted = {one.number: one for one in reference if isinstance(one, Numbered)}
            for layer in engine.module.modules():
                for name, _ in layer.named_parameters() if isinstance(layer, Numbered) else ():
                    value = wanted[layer.number].get_parameter(name).detach()
                    error = (full_master(layer, name) - value).abs().max().item()
                    assert error <= 3e-6, f"{layer.number}.{name} is off by {error:.1e} at {step}"


class Experts(nn.Module):
    """A layer of experts between others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.o = nn.Linear(WIDTH, 8), nn.Linear(8, 3)
        self.b = MoE(8, nn.Linear(8, 8), num_experts=2, ep_size=2, k=1, min_capacity=8)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden, balance, _ = self.b(torch.tanh(self.a(batch)))
        return self.o(hidden).square().mean() + 0.01 * balance


class TestExperts(DistributedTest):
    """Kills: counts that are one for dense parameters and experts."""

    world_size = 2

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_stand_still_while_frozen(self, stage: int) -> None:
        model = Experts()
        config = {**config_of(stage, ROWS), "optimizer": ADAMW}
        engine = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )[0]
        names = [name for name, _ in model.named_parameters()]
        own = {name: nn.Parameter(full_master(model, name)) for name in names}
        optimizer = adamw(own.values())
        for step in range(STEPS):
            is_frozen = 3 <= step < 6
            model.b.requires_grad_(not is_frozen)
            engine.backward(own_loss(engine, drawn(10 * step + dist.get_rank(), ROWS, WIDTH)))
            for name, param in model.named_parameters():
                left_out = is_frozen and name.startswith("b.")
                found = None if left_out else safe_get_full_grad(param)
                own[name].grad = None if found is None else found.float().clone()
            engine.step()
            optimizer.step()
            for name, value in own.items():
                error = (full_master(model, name) - value.detach()).abs().max().item()
                assert error <= 3e-6, f"{name} is off by {error:.1e} in step {step}"
