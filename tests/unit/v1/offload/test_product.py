"""Offload changes no bit: the product of what lies where, stages, precisions, accumulation,
clipping and updates ahead of the step, each against no offload.

The run without has neither key, `offload_optimizer` or `offload_param`, and all else the same: the
script's optimizer too, one of the host's. (Of the configuration "AdamW" is torch's fused kernel
without offload, which rounds otherwise than the host's in the last bits.) After each step losses,
norm, loss scale, skips, masters, moments and weights of each rank are compared byte by byte.

`make test` takes a share with every pair of values, `make campaign NAME=offload` all of it.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops import early_update, state_files
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.runtime.sharding import publisher
from unit.common import DistributedTest
from unit.models import config_of, drawn
from unit.one_process import mean_square, placed
from unit.v1.contract.matrix import covering
from unit.v1.contract.runner import on_host, run_cases, run_simulated

WIDTH, DEPTH, ROWS = 24, 3, 4
# By step: what the loss is multiplied by. The first is more than fp16 holds, the second is clipped.
LOUD = {1: 1000.0, 3: 30.0}
STEPS = 5
CLIPS = {"never": 1e9, "sometimes": 0.5, "always": 1e-3}
OPTIMIZERS = {"AdamW": DeepSpeedCPUAdam, "Lion": DeepSpeedCPULion, "Adagrad": DeepSpeedCPUAdagrad}
FP16 = {"enabled": True, "initial_scale_power": 14, "hysteresis": 1}
MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True}
SUMS: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": FP16},
    "bf16+fp32": {"bf16": {"enabled": True}, **SUMS},
    "fp16+fp32": {"fp16": FP16, **SUMS},
    "bf16+bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "fp16 masters": {"fp16": {**FP16, "fp16_master_weights_and_grads": True}},
    "bf16 masters": {"bf16": MASTERS},
    "bf16 state": {"bf16": {**MASTERS, "bf16_optimizer_states": True}},
    "bf16 at random": {"bf16": {**MASTERS, "stochastic_rounding": True}},
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "stage": (1, 2, 3),
    "precision": tuple(PRECISIONS),
    "accumulation": (1, 3),
    "clips": tuple(CLIPS),
    "optimizer": ("none", "cpu", "nvme"),
    "params": ("none", "cpu", "nvme"),
    "early": (False, True),
}
# One of a kind, for the share that `make test` takes.
TYPICAL = ("fp32", "fp16", "bf16+fp32", "bf16 state")
RANKS = (2, 1, 2, 3, 2, 1)


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        optimizer, params: Where they are: the keys' `device`, or "none".
        early: `speculative_update`.
        kind: Of optimizer.
    """

    stage: int
    precision: str
    accumulation: int
    clips: str
    optimizer: str
    params: str
    early: bool
    kind: str = "AdamW"

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in asdict(self).items())

    @property
    def without(self) -> Case:
        """The same without offload."""
        return replace(self, optimizer="none", params="none", early=False)

    @property
    def is_own(self) -> bool:
        """Whether the engine takes it, and it is no other one by keys without effect."""
        at_random = self.precision == "bf16 at random"
        return not (
            (self.stage < 3 and self.params != "none")
            or (self.stage < 2 and self.precision == "bf16+bf16")
            or (self.early and (self.optimizer == "none" or at_random))
            or (self.early and self.stage < 2 and self.precision == "bf16+fp32")
            or (self.optimizer == "nvme" and at_random)
        )

    @property
    def config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"reduce_bucket_size": 200}
        if self.stage == 3:
            # Biases persist; other units go at once.
            zero |= {"stage3_param_persistence_threshold": WIDTH + 1, "stage3_unit_fusion_size": 0}
            zero["stage3_max_reuse_distance"] = 0
        place = {"nvme_path": tempfile.gettempdir()}  # where files have no names
        if self.optimizer != "none":
            keys = {"device": self.optimizer, "speculative_update": self.early}
            zero["offload_optimizer"] = {**place, **keys}
        if self.params != "none":
            zero["offload_param"] = {**place, "device": self.params}
        if self.params == "nvme":
            # Of these buffers a unit needs more than there are.
            zero["offload_param"] |= {"buffer_count": 2, "buffer_size": 50, "max_in_cpu": 0}
        more = {"gradient_clipping": CLIPS[self.clips], "zero_optimization": zero}
        return config_of(self.stage, ROWS, self.accumulation, **more, **PRECISIONS[self.precision])


def product_cases() -> list[Case]:
    """The whole product, of runs with offload."""
    rows = (Case(*values) for values in itertools.product(*FACTORS.values()))
    return [case for case in rows if case.is_own and case != case.without]


def pair_cases(precisions: Sequence[str] = TYPICAL) -> list[Case]:
    """A share of it with every pair of values that go together, with other optimizers in turn."""
    rows = [asdict(case) for case in product_cases() if case.precision in precisions]
    Random(44).shuffle(rows)  # of a hundred draws one with few rows
    kinds = itertools.cycle(OPTIMIZERS)
    return [Case(**{**row, "kind": next(kinds)}) for row in covering(rows, FACTORS)]


Tensors = dict[str, torch.Tensor]


def engine_of(case: Case) -> Any:
    torch.manual_seed(3)
    wide = [nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    model = nn.Sequential(*wide, nn.Tanh(), nn.Linear(WIDTH, 7))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2]},
    ]
    optimizer: Any = OPTIMIZERS[case.kind](groups, lr=0.01)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=case.config)[0]


def state_of(engine: Any) -> Tensors:
    """What this rank has of weights, masters and moments, and what the last step said."""
    masters, told = engine.optimizer.masters, engine.get_global_grad_norm()
    found = {"norm": told, "scale": engine.optimizer.loss_scale, "skips": engine.skipped_steps}
    for number, group in enumerate(masters.groups):
        own = {"weights": group.flat, "masters": group.master}
        own |= masters.optimizer.state.get(group.masters[0], {})
        found |= {f"{name} of group {number}": value for name, value in own.items()}
    return copied(found)


def copied(values: Mapping[str, Any]) -> Tensors:
    to_host = get_accelerator().to_host
    return {name: to_host(torch.as_tensor(value)) for name, value in values.items()}


class Trained:
    """What a case comes to, step by step, and how often an update ahead was right, or in vain."""

    def __init__(self, case: Case) -> None:
        engine = engine_of(case)
        self.steps: list[Tensors] = []
        for step in range(STEPS):
            losses = {}
            for micro in range(case.accumulation):
                seed = 1000 * step + 10 * micro + dist.get_rank()
                loss = mean_square(engine, placed(engine, drawn(seed, ROWS, WIDTH)))
                losses[f"loss {micro}"] = loss
                engine.backward(loss * LOUD.get(step, 1.0))
                engine.step()
            self.steps.append({**copied(losses), **state_of(engine)})
        early, self.skipped = engine.optimizer.masters.early, engine.skipped_steps
        self.hits, self.misses = (early.hits, early.misses) if early else (0, 0)
        engine.destroy()
        self.steps.append(copied(dict(engine.module.named_parameters())))


def is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Byte by byte."""
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


class Comparison:
    """One case, against the one without offload, which `without` keeps for others; `redone` takes
    how many updates the step had to make again.
    """

    def __init__(self, case: Case, without: dict[Case, Trained], redone: list[int]) -> None:
        self.case, self.redone = case, redone
        if case.without not in without:
            without.clear()  # the product goes from one to the next
            without[case.without] = Trained(case.without)
        self.wanted = without[case.without]

    def run(self) -> list[str]:
        """Train it; what was not as it must be."""
        found, where = Trained(self.case), f"{self.case.name}: rank {dist.get_rank()}"
        steps = enumerate(zip(found.steps, self.wanted.steps, strict=True))
        with on_host():
            failures = [
                f"{where}, step {step}: other bits in {name}"
                for step, (own, other) in steps
                for name in {**own, **other}
                if not is_same(own.get(name), other.get(name))
            ]
        counts = found.skipped, found.hits, found.misses
        if counts != self.expected():
            failures.append(f"{where}: skips, hits and misses are {counts}, not {self.expected()}")
        # A step that is skipped makes none.
        self.redone.append(found.misses - found.skipped * self.case.early)
        return failures

    def expected(self) -> tuple[int, int, int]:
        """Skips, updates ahead that are right and those in vain: the first step has no state."""
        case, skips = self.case, int("fp16" in self.case.precision)
        misses = {"never": skips, "sometimes": 2, "always": STEPS - 1}[case.clips]
        return (skips, STEPS - 1 - misses, misses) if case.early else (skips, 0, 0)


def check(cases: Sequence[Case], run: Callable[..., None] = run_cases) -> None:
    """Compare them all; an AssertionError lists what differs. Tells what was seen."""
    state_files.WINDOW_NUMEL, publisher.UPDATE_NUMEL = 64, 100  # in this rank
    early_update.MAX_PAUSE = 0
    redone: list[int] = []
    without: dict[Case, Trained] = {}
    run(cases, lambda case: Comparison(case, without, redone))
    if dist.get_rank() == 0:
        told = f"{len(cases)} of {len(cases)} equal to no offload"
        print(f"{dist.get_world_size()} ranks: {told}, {sum(redone)} updates made again")


class TestPairs(DistributedTest):
    """Every pair of values that go together."""

    world_size = [1, 2, 3]
    exec_timeout = 240

    def test(self) -> None:
        # Kills: an update of what is not final, masters or moments that are written ahead of a step
        # that clips or is skipped, a window or piece that is left out or updated twice, a factor
        # that is rounded on its way, weights that are read where they are not written yet.
        ranks = dist.get_world_size()
        pairs = zip(pair_cases(), itertools.cycle(RANKS), strict=False)
        check([case for case, own in pairs if own == ranks])


@pytest.mark.contract
class TestProduct(DistributedTest):
    """All of it (`make campaign NAME=offload`)."""

    world_size = [2, 1, 3]
    exec_timeout = 3600

    @pytest.mark.parametrize("stage", FACTORS["stage"])
    def test_stage(self, stage: int) -> None:
        # Kills: what only three or more settings together bring out.
        check([case for case in product_cases() if case.stage == stage])

    @pytest.mark.world_size(2)
    def test_pairs_on_the_simulated_device(self) -> None:
        # Kills: a copy that is not waited for, memory that is written while it is copied.
        check(pair_cases(tuple(PRECISIONS)), run_simulated)


def test_what_is_covered() -> None:
    # Kills: a share without some values, a product that has lost some.
    cases = pair_cases()
    for factor, values in {**FACTORS, "precision": TYPICAL, "kind": OPTIMIZERS}.items():
        assert {getattr(case, factor) for case in cases} == set(values)
    assert len(product_cases()) == 1194
