"""The gradient ledger is silent while training is right, and costs nothing while it is off."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.config_models.features import VerifyConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.engine_parts.verification import wanted_checks
from deepspeed.runtime.gradients.ledger import gradient_ledger
from deepspeed.runtime.gradients.ledger.gradient_ledger import GradientLedger, GradientLedgerError
from deepspeed.runtime.gradients.observer import UNOBSERVED
from deepspeed.utils import safe_set_full_grad
from deepspeed.verify import ledger
from unit.common import DistributedTest
from unit.models import config_of, drawn, seeded
from unit.v1.contract.matrix import of_world, pairwise_cases
from unit.v1.contract.runner import run_cases
from unit.v1.looping import each

ROWS = 2
IMMEDIATE = {"enabled": True, "immediate_grad_update": True}
FORMS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (0, {}),
    "stage 1": (1, {}),
    "stage 2": (2, {"zero_optimization": {"reduce_bucket_size": 80, "overlap_comm": True}}),
    "fp16": (0, {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}),
    "fp16 stage 2": (2, {"fp16": {"enabled": True, "loss_scale": 64}}),
    "BF16_Optimizer": (1, {"bf16": IMMEDIATE, "data_types": {"grad_accum_dtype": "fp32"}}),
    "sum": (1, {"gradient_allreduce_op": "sum", "prescale_gradients": True}),
}


class Net(nn.Module):
    """A layer that is used twice, a frozen parameter and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.twice = nn.Linear(9, 9)
        self.frozen = nn.Linear(9, 9)
        self.last = nn.Linear(9, 4)
        self.never = nn.Parameter(torch.ones(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: [ROWS, 6]
        x = self.twice(self.twice(self.first(x)).tanh())
        return self.last(self.frozen(x)).float().square().mean()


def start(form: str, accumulation: int = 2, **keys: Any) -> Any:
    stage, more = FORMS[form]
    more = {"optimizer": {"type": "SGD", "params": {"lr": 0.05}}, **more}
    config = config_of(stage, ROWS, accumulation, **{"verify": {"ledger": True}, **more, **keys})
    return deepspeed.initialize(model=seeded(Net, seed=1), config=config)[0]


def loss_of(engine: Any, factor: float = 1.0) -> Any:
    """Of a batch that depends on rank and micro-batch."""
    batch = drawn(100 * dist.get_rank() + engine.micro_steps, ROWS, 6) * factor
    return engine(batch.to(next(engine.module.parameters()).dtype))


def micro_batch(engine: Any, factor: float = 1.0) -> None:
    engine.backward(loss_of(engine, factor))
    engine.step()


def managed(engine: Any) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        micro_batch(engine)


def plain(engine: Any) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        loss = loss_of(engine)
        (engine.scale(loss) if engine._sequence.needs_scaler() else loss).backward()
        engine.step()


def divided_by_the_client(engine: Any) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        loss = loss_of(engine) / engine.gradient_accumulation_steps()
        engine.backward(loss, scale_wrt_gas=False)
        engine.step()


def no_sync(engine: Any) -> None:
    with engine.no_sync():
        engine.backward(loss_of(engine))
    engine.step()
    micro_batch(engine)


def coalesced(engine: Any) -> None:
    engine.set_gradient_accumulation_boundary(True)
    with engine.coalesce_grad_reduction():
        for _ in range(3):
            engine.backward(loss_of(engine))
    engine.step()


def twice_at_the_boundary(engine: Any) -> None:
    micro_batch(engine)
    engine.backward(loss_of(engine))
    micro_batch(engine, 0.5)


def zeroed_in_between(engine: Any) -> None:
    engine.backward(loss_of(engine))
    engine.optimizer.zero_grad()  # at stage 0 the client's own optimizer, which tells nobody
    if engine.zero_optimization_stage() > 0:
        engine.zero_grad()
    engine.step()
    micro_batch(engine)


def replaced(engine: Any) -> None:
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(loss_of(engine))
    weight = engine.module.twice.weight
    safe_set_full_grad(weight, torch.full_like(weight, 0.25, dtype=torch.float32))
    engine.step()


def clipped_by_the_client(engine: Any) -> None:
    if isinstance(engine.optimizer, DeepSpeedOptimizer):
        return managed(engine)  # only stage 0 in fp32 lets clients at what the step uses
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(loss_of(engine))
    nn.utils.clip_grad_norm_([p for p in engine.module.parameters() if p.grad is not None], 1e-3)
    engine.step()


def not_finite(engine: Any) -> None:
    engine.set_gradient_accumulation_boundary(True)
    micro_batch(engine, float("inf") if dist.get_rank() == 1 else 1.0)
    assert engine._sequence.overflow


def masked_by_a_later_hook(engine: Any) -> None:
    handle = engine.module.last.weight.register_hook(lambda grad: grad * 0.5)
    managed(engine)
    handle.remove()


def with_hooks_that_torch_dropped(engine: Any) -> None:
    weight = engine.module.last.weight  # as older torch does in a backward
    hooks, weight._backward_hooks = weight._backward_hooks, None
    managed(engine)
    weight._backward_hooks = hooks
    assert ("last.weight",) in engine._sequence.observer._warned


def under_autocast(engine: Any) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            engine.backward(loss_of(engine))
        engine.step()


WAYS: list[Callable[[Any], None]] = [
    *(managed, plain, divided_by_the_client, no_sync, coalesced, twice_at_the_boundary),
    *(zeroed_in_between, replaced, clipped_by_the_client, not_finite, masked_by_a_later_hook),
    *(with_hooks_that_torch_dropped, under_autocast),
]


def values_of(engine: Any) -> list[torch.Tensor]:
    return [param.detach().clone() for param in engine.module.parameters()]


class TestClients(DistributedTest):
    world_size = 2
    exec_timeout = 150

    @each(form=list(FORMS), way=WAYS)
    def test_no_false_alarm(self, form: str, way: Callable[[Any], None]) -> None:
        # Kills: expectations of engine.backward only; a ledger that outlives what it recorded; a
        # gradient that it was not shown taken for none.
        engine = start(form)
        managed(engine)
        way(engine)
        engine.set_gradient_accumulation_boundary(True)
        micro_batch(engine)
        seen = engine._sequence.observer
        assert seen.steps >= 3 and not seen.findings
        assert seen.zero_gradients == ("never",)
        engine.destroy()
        assert not engine.module.first.weight._backward_hooks

    def test_values_are_those_of_a_run_without(self) -> None:
        # Kills: a ledger that changes what it watches.
        results = []
        for on in (False, True):
            engine = start("stage 2", verify={"ledger": on})
            for _ in range(3):
                managed(engine)
            results.append(values_of(engine))
            engine.destroy()
        assert all(map(torch.equal, *results))


class TestContract(DistributedTest):
    exec_timeout = 240

    @pytest.mark.parametrize("share", [0, 1])
    @pytest.mark.world_size(3)
    def test_three_ranks(self, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: tolerances and fragments that are right for powers of two only.
        monkeypatch.setenv("DS_VERIFY", "ledger")
        run_cases(of_world(pairwise_cases(), 3)[share::2])

    @pytest.mark.world_size(1)
    def test_one_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DS_VERIFY", "ledger")
        run_cases(of_world(pairwise_cases(), 1))


class TestContext(DistributedTest):
    world_size = 2

    def test_engines_before_and_within(self) -> None:
        # Kills: forgotten engines; an accumulation seen in its second half only; hooks that stay.
        old = start("stage 2", verify={})
        micro_batch(old)
        with ledger() as book:
            new = start("stage 0", verify={})
            micro_batch(old)
            for engine in (old, new):
                managed(engine)
        assert len(book.ledgers) == 2 and book.steps == 2 and not book.findings
        assert book.zero_gradients == ("never", "never") and "0 finding(s)" in book.report()
        assert old._sequence.observer is UNOBSERVED and not old.module.first.weight._backward_hooks
        managed(old)
        assert book.steps == 2

    def test_findings_without_an_exception(self) -> None:
        engine = start("stage 1", verify={})
        with deepspeed.verify.ledger(engine, raises=False) as book:
            engine._losses.divided = lambda loss, scale_wrt_gas: loss
            managed(engine)
        assert [finding.kind for finding in book.findings] == ["divisor"]
        assert "not divided by the accumulation steps" in book.report()

    def test_nothing_changes_when_it_raises(self) -> None:
        # Kills: a check that comes after the update.
        engine = start("stage 1")
        engine._losses.divided = lambda loss, scale_wrt_gas: loss
        before = values_of(engine)
        with pytest.raises(GradientLedgerError, match="accumulation steps"):
            managed(engine)
        assert all(map(torch.equal, before, values_of(engine)))


class TestCost(DistributedTest):
    world_size = 2

    def test_two_small_collectives_per_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: collectives per parameter or micro-batch.
        engine = start("stage 1", accumulation=3)
        sizes: list[int] = []
        counted: list[list[int]] = []
        all_reduce, settled = dist.all_reduce, GradientLedger.settled

        def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            sizes.append(tensor.numel())
            return all_reduce(tensor, *args, **kwargs)

        def settling(self: GradientLedger, factor: float) -> None:
            sizes.clear()
            settled(self, factor)
            counted.append(list(sizes))

        monkeypatch.setattr(gradient_ledger.dist, "all_reduce", counting)
        monkeypatch.setattr(GradientLedger, "settled", settling)
        managed(engine)
        assert len(counted) == 1 and len(counted[0]) == 2 and counted[0][1] == 1


IMPORTS = """
import os, sys, torch, deepspeed
import torch.distributed as dist

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", DS_ACCELERATOR="cpu")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for verify in ({}, {"ledger": True}):
    config = {"train_micro_batch_size_per_gpu": 1, "verify": verify}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    engine = deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)[0]
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    parts = ("ledger", "intent", "deepspeed.verify")
    print("imported:", [name for name in sys.modules if any(part in name for part in parts)])
"""


def test_nothing_is_imported_when_off() -> None:
    # Kills: an import at the top of the engine.
    environment = {name: value for name, value in os.environ.items() if name != "DS_VERIFY"}
    command = [sys.executable, "-c", IMPORTS]
    said = subprocess.check_output(command, text=True, timeout=60, env=environment)
    off, on = [line for line in said.splitlines() if line.startswith("imported:")]
    assert off == "imported: []"
    assert "deepspeed.runtime.gradients.ledger.gradient_ledger" in on
    assert "intent" not in on


def test_environment_and_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_VERIFY", "ledger, streams")
    assert wanted_checks(VerifyConfig(collectives=True)) == {"ledger", "streams", "collectives"}
    monkeypatch.setenv("DS_VERIFY", "ledger,stream")
    told = "DS_VERIFY: 'stream' is unknown.*ledger, collectives, streams"
    with pytest.raises(DeepSpeedConfigError, match=told):
        wanted_checks(VerifyConfig())
    monkeypatch.delenv("DS_VERIFY")
    assert wanted_checks(VerifyConfig()) == set()
