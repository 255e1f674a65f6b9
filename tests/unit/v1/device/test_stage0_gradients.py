"""Stage 0: `.grad` is a view of the reduced buffer; gradients in static memory of a device."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.streams import SideStream
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from deepspeed.verify import check_streams
from unit.common import DistributedTest
from unit.models import config_of, drawn, linears, seeded, sgd
from unit.one_process import OneProcess, mean_square, placed
from unit.simple_model import Wide
from unit.static_gradients import StaticGradients
from unit.v1.looping import each

LR, LAYERS, WIDTH = 0.125, 32, 128


class Net(nn.Module):
    """A parameter used now and then, and one that lies in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.turned = nn.Parameter(torch.arange(24.0).view(4, 6).t() / 32)
        self.spare = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        hidden = self.first(x) + nn.functional.linear(x, self.turned)
        return ((hidden * self.spare if spare else hidden) ** 2).mean()


def settings(precision: str, accumulation: int = 2, **more: Any) -> dict[str, Any]:
    if precision == "fp16":
        more["fp16"] = {"enabled": True, "loss_scale": 8}
    return config_of(0, 1, accumulation, precision, **more)


def batch(seed: int) -> torch.Tensor:
    return drawn(seed, 3, 4)


class TestMemory(DistributedTest):
    world_size = 1

    # Weights, masters, Adam's two moments, and gradients; where masters and model differ in dtype
    # the gradients of both share their memory.
    @pytest.mark.parametrize("precision, expected", [("fp32", 16), ("bf16", 18), ("fp16", 18)])
    def test_bytes_per_parameter(self, precision: str, expected: int) -> None:
        # Kills: gradients that pile up beside the buffer until backward ends (20 and 22 bytes), a
        # second copy of them in the masters' dtype (20).
        gc.collect()
        config = settings(precision, optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
        with simulate() as device:
            engine, *_ = deepspeed.initialize(model=Wide(LAYERS, WIDTH), config=config)
            numel = sum(param.numel() for param in engine.module.parameters())
            device.reset_peak_memory_stats()
            before = device.memory_allocated()
            for _ in range(6):
                engine.backward(engine(torch.ones(1, WIDTH, dtype=engine.model_dtype)))
                engine.step()
            assert device.memory_allocated() > before  # the moments
            peak = device.max_memory_allocated() / numel
            engine.destroy()
        # One gradient, which autograd makes, and what is cloned of its kind.
        assert expected <= peak < expected + 3 * 4 / LAYERS, peak


@contextmanager
def trained(
    accumulation: int = 2, precision: str = "fp32"
) -> Iterator[tuple[Any, nn.Module, OneProcess]]:
    """Make an engine whose gradients come on two more streams, and what it must equal."""
    one = OneProcess(seeded(Net), LR)
    with simulate(backward_streams=2) as device, check_streams():
        model = copy.deepcopy(one.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        config = settings(precision, accumulation)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        yield engine, one.model, one
        device.synchronize()
        values = [param.detach().clone() for param in engine.module.parameters()]
        engine.destroy()
        device.synchronize()
    for value, param in zip(values, one.model.parameters(), strict=True):
        torch.testing.assert_close(value.float(), param.detach(), rtol=2e-2, atol=2e-3)
        if value.dtype == torch.float32:
            torch.testing.assert_close(value, param.detach(), rtol=1e-6, atol=1e-6)


class TestClients(DistributedTest):
    world_size = 1

    def test_a_view_from_the_first_micro_batch_on(self) -> None:
        # Kills: gradients in memory of their own; zeros shown for a parameter that has no
        # gradient yet, or none shown after the reduction.
        with trained() as (engine, plain, one):
            flat = engine._sequence.reduction.gradients[0].flat.untyped_storage().data_ptr()
            for seed in (0, 1):
                engine.backward(engine(batch(seed)))
                for name, param in engine.module.named_parameters():
                    if seed == 0 and name == "spare":
                        assert param.grad is None
                        continue
                    assert param.grad.untyped_storage().data_ptr() == flat
                engine.step()
            assert all(param.grad is None for param in engine.module.parameters())
            one.step([batch(0), batch(1)])

    def test_absent_after_it_was_there(self) -> None:
        # Kills: the last step's values in the place of a parameter without a gradient.
        with trained(1) as (engine, plain, one):
            for step, spare in enumerate((True, False, True)):
                engine.backward(engine(batch(step), spare=spare))
                engine.step()
                one.step([(batch(step), spare)])

    @pytest.mark.parametrize("to_none", [True, False])
    def test_forgotten_by_the_clients_optimizer(self, to_none: bool) -> None:
        # Kills: a contribution that the client has dropped, in a buffer that nobody cleared.
        with trained() as (engine, plain, one):
            engine.backward(engine(batch(7), spare=True))
            engine.optimizer.zero_grad(set_to_none=to_none)
            engine.step()
            engine.backward(engine(batch(0)))
            engine.step()
            (plain(batch(0)) / 2).backward()
            one.update()

    def test_replaced_by_the_client(self) -> None:
        # Kills: a hook or a reduction that reads the buffer and not `.grad`.
        with trained() as (engine, plain, one):
            engine.backward(engine(batch(0)))
            engine.step()
            for param in engine.module.parameters():
                param.grad = None if param.grad is None else param.grad * 2
            engine.backward(engine(batch(1)))
            engine.module.first.bias.grad = torch.ones(6)
            engine.step()
            (plain(batch(0)) + plain(batch(1)) / 2).backward()
            plain.first.bias.grad = torch.ones(6)
            one.update()

    def test_a_graph_of_the_gradient(self) -> None:
        # Kills: a copy into the buffer that autograd records or refuses.
        with trained(1) as (engine, plain, one):
            loss = engine(batch(0))
            with pytest.warns(UserWarning, match="create_graph"):
                loss.backward(create_graph=True)
            assert not any(param.grad.requires_grad for param in engine.module.parameters())
            engine.step()
            one.step([batch(0)])

    def test_without_synchronization(self) -> None:
        # Kills: hooks that stop at `no_sync()`, or a sum that begins anew after it.
        with trained(1) as (engine, plain, one):
            with engine.no_sync():
                engine.backward(engine(batch(0)))
            engine.backward(engine(batch(1)))
            engine.backward(engine(batch(2), spare=True))
            engine.step()
            (plain(batch(0)) + plain(batch(1)) + plain(batch(2), spare=True)).backward()
            one.update()


class TestSharedMemory(DistributedTest):
    world_size = 1

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    @pytest.mark.parametrize("read", [False, True])
    def test_more_after_they_were_read(self, precision: str, read: bool) -> None:
        # Kills: another backward that adds to memory that has been widened already, or whose sum
        # the step does not see.
        with trained(1, precision) as (engine, plain, one):
            dtype = engine.model_dtype
            engine.backward(engine(batch(0).to(dtype)))
            if read:
                seen = safe_get_full_grad(engine.module.first.weight).clone()
            engine.backward(engine(batch(1).to(dtype), spare=True))
            engine.step()
            expected = torch.autograd.grad(plain(batch(0)), plain.first.weight)[0]
            if read:
                torch.testing.assert_close(seen.float(), expected, rtol=2e-2, atol=2e-2)
            (plain(batch(0)) + plain(batch(1), spare=True)).backward()
            one.update()

    def test_set_by_the_client(self) -> None:
        # Kills: a step that widens again over what was set.
        with trained(1, "bf16") as (engine, plain, one):
            engine.backward(engine(batch(0).bfloat16()))
            safe_set_full_grad(engine.module.first.weight, torch.ones(6, 4))
            engine.step()
            plain(batch(0)).backward()
            plain.first.weight.grad = torch.ones(6, 4)
            one.update()


STATIC_WIDTH, ROWS, STATIC_LR, STEPS = 8, 3, 0.1, 2


def make_model(static: bool) -> nn.Sequential:
    layers = linears(4, STATIC_WIDTH, seed=1)
    return nn.Sequential(*(StaticGradients(layer) if static else layer for layer in layers))


def static_batch(number: int, rank: int) -> torch.Tensor:
    return drawn(10 * number + rank, ROWS, STATIC_WIDTH)


def train(stage: int, micro_batches: int, overlap: bool, **more: Any) -> list[torch.Tensor]:
    buckets = 2 * STATIC_WIDTH * (STATIC_WIDTH + 1)
    more["zero_optimization"] = {"overlap_comm": overlap, "reduce_bucket_size": buckets}
    config = config_of(stage, ROWS, micro_batches, optimizer=sgd(STATIC_LR), **more)
    engine = deepspeed.initialize(model=make_model(static=True), config=config)[0]
    for number in range(STEPS * micro_batches):
        x = static_batch(number, dist.get_rank())
        engine.backward(mean_square(engine, placed(engine, x)))
        engine.step()
    get_accelerator().synchronize()
    found = [param.detach().clone() for param in engine.module.parameters()]
    get_accelerator().synchronize()
    engine.destroy()
    return found


def deviates(found: list[torch.Tensor], micro_batches: int, within: float = 1e-5) -> bool:
    one = OneProcess(make_model(static=False), STATIC_LR, mean_square)
    wanted = one.train(static_batch, STEPS, micro_batches).values()
    pairs = zip(found, wanted, strict=True)
    return not all(torch.allclose(one, other, rtol=0.0, atol=within) for one, other in pairs)


class TestStaticGradients(DistributedTest):
    world_size = 2
    backend = "gloo"

    def test_equals_one_process(self) -> None:
        # Kills: a producer that writes its gradients again while they are copied.
        for (stage, micro_batches), overlap in product(((1, 1), (2, 3)), (False, True)):
            with simulate(), check_streams():
                found = train(stage, micro_batches, overlap)
            assert not deviates(found, micro_batches)

    def test_summed_in_an_accumulator(self) -> None:
        # Kills: an accumulator that takes a micro-batch in after the next one was written.
        fp16 = {"enabled": True, "initial_scale_power": 4}
        with simulate(), check_streams():
            found = train(1, 3, True, fp16=fp16, data_types={"grad_accum_dtype": "fp32"})
        assert not deviates([param.float() for param in found], 3, within=2e-3)

    @each(overlap=(False, True))
    def test_summed_where_they_lie(self, overlap: bool) -> None:
        # Kills: sums that the next micro-batch overwrites, trained on without a word.
        with simulate():
            with pytest.raises(RuntimeError, match="stage: 1 sums the micro-batches of .*stage 2"):
                train(1, 3, overlap)
            get_accelerator().synchronize()

    def test_the_guard_goes(self) -> None:
        # Kills: a hook on every parameter for as long as training lasts.
        with simulate():
            config = config_of(1, ROWS, 2, optimizer=sgd(STATIC_LR))
            engine = deepspeed.initialize(model=make_model(static=False), config=config)[0]
            assert all(param._backward_hooks for param in engine.module.parameters())
            for micro in range(2):
                engine.backward(mean_square(engine, static_batch(micro, dist.get_rank())))
                engine.step()
            assert not any(param._backward_hooks for param in engine.module.parameters())
            engine.destroy()

    def test_without_the_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a test, or a checker, to which static memory is like any other.
        monkeypatch.setattr(SideStream, "release", lambda self, producers: None)
        with simulate(), check_streams(raises=False) as checker:
            found = train(2, 3, True)
        assert deviates(found, 3)
        assert "race" in checker.report() and "_foreach_copy_" in checker.report()


def test_autograd_takes_the_memory_over() -> None:
    # Kills: a model of static memory that is copied on its way to `param.grad`.
    layer = StaticGradients(nn.Linear(STATIC_WIDTH, STATIC_WIDTH))
    for _ in range(2):
        layer(static_batch(0, 0)).sum().backward()
        for param, memory in zip(layer.parameters(), layer.memory, strict=True):
            assert param.grad is not None and param.grad.data_ptr() == memory.data_ptr()
            param.grad = None


@pytest.mark.parametrize("static", [False, True])
def test_gradients_are_the_modules(static: bool) -> None:
    model, plain = make_model(static), make_model(static=False)
    for net in (model, plain):
        mean_square(net, static_batch(0, 0)).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)
