"""What scripts see of sharded gradients: `averaged_gradients`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed import comm as dist
from unit.common import DistributedTest
from unit.v1.looping import each
from unit.v1.zero.stage3.models import (
    SHARDED,
    config_of,
    engine_of,
    loss_of,
    make_net,
    tokens_of,
)


def reference_gradients(first: int, micro_batches: int) -> dict[str, torch.Tensor]:
    """Of one process that sees the batches of all ranks."""
    model, world = make_net(), dist.get_world_size()
    for micro, rank in itertools.product(range(micro_batches), range(world)):
        loss = loss_of(model, tokens_of(first + micro, rank))
        (loss / (micro_batches * world)).backward()
    return {
        name: torch.zeros_like(param) if param.grad is None else param.grad
        for name, param in model.named_parameters()
        if param.requires_grad
    }


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 64.0}},
}
PLACES: dict[str, dict[str, Any]] = {
    "sharded": SHARDED,
    "persistent": {},
    "on the host": {**SHARDED, "offload_optimizer": {"device": "cpu"}},
    "in two places": {**SHARDED, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "overlapped": {**SHARDED, "overlap_comm": True, "reduce_bucket_size": 40},
}


class TestAveragedGradients(DistributedTest):
    world_size = 3

    @each(precision=PRECISIONS, place=PLACES)
    def test_are_cuts_of_one_process(self, precision: str, place: str) -> None:
        # Kills: another order than the groups', elements of a neighbour, gradients that are not
        # averaged over ranks or micro-batches or carry the loss scale, gradients of a window that
        # goes on or is over.
        if precision == "fp16" and place == "in two places":
            return  # the same code as in one
        model = make_net()
        engine = engine_of(model, {**config_of(3, **PLACES[place]), **PRECISIONS[precision]})
        optimizer, rank = engine.optimizer, dist.get_rank()
        names = {param: name for name, param in model.named_parameters()}
        engine.eval()
        assert optimizer.averaged_gradients == {}
        engine.train()
        for plain in (False, True) if precision == "fp32" else (False,):
            wanted = None if plain else reference_gradients(0, 2)
            for micro in range(2):
                loss = loss_of(engine, tokens_of(micro, rank))
                loss.backward() if plain else engine.backward(loss)
                if micro == 0:
                    assert optimizer.averaged_gradients == {}
                    engine.step()
            found = optimizer.averaged_gradients
            if wanted is not None:
                self.check(found, optimizer, names, wanted, precision)
            assert [len(cuts) for cuts in found.values()] == [
                len(group.params) for group in optimizer.groups
            ]
            engine.step()
            assert optimizer.averaged_gradients == {}
        engine.destroy()

    def check(
        self,
        found: dict[int, list[torch.Tensor]],
        optimizer: Any,
        names: dict[nn.Parameter, str],
        wanted: dict[str, torch.Tensor],
        precision: str,
    ) -> None:
        assert list(found) == list(range(len(optimizer.groups)))
        pairs = [
            (param, cut)
            for group, cuts in zip(optimizer.bit16_groups, found.values(), strict=True)
            for param, cut in zip(group, cuts, strict=True)
        ]
        assert {names[param] for param, _ in pairs} == set(wanted)
        limits = {"atol": 1e-6} if precision == "fp32" else {"atol": 2e-3, "rtol": 5e-3}
        for param, cut in pairs:
            whole = wanted[names[param]].flatten()
            assert cut.dtype == torch.float32 and cut.shape == param.ds_tensor.shape
            size = cut.numel()
            padded = nn.functional.pad(whole, (0, 3 * size - whole.numel()))
            own = padded[dist.get_rank() * size : (dist.get_rank() + 1) * size]
            torch.testing.assert_close(cut, own, **{"rtol": 1e-5, **limits})

    def test_are_read_only(self) -> None:
        engine = engine_of(make_net(), config_of(3, 1, **SHARDED))
        with pytest.raises(AttributeError):
            engine.optimizer.averaged_gradients = {}
        engine.destroy()


class TestDirectory(DistributedTest):
    world_size = 1

    @each(stage=[1, 2, 3])
    def test_has_no_method_that_upstreams_suite_replaces(self, stage: int) -> None:
        # Kills: `average_tensor` of other arguments, which a suite finds by `dir`, and replaces.
        engine = engine_of(make_net(), config_of(stage, 1))
        names = dir(engine.optimizer)
        assert "average_tensor" not in names and {"step", "groups", "zero_grad"} < set(names)
        assert callable(engine.optimizer.average_tensor)
        engine.destroy()
