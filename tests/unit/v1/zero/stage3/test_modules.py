"""Modules that use parameters in other ways: attention, cells, parametrizations, transforms."""

import copy
import functools
import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, jvp
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.zero import GatheredParameters, Init
from unit.common import DistributedTest
from unit.models import config_of, drawn, seeded
from unit.one_process import OneProcess, mean_square, train
from unit.v1.looping import each
from unit.v1.zero.stage3.models import SHARDED

WIDTH = 8
LR = 0.1
Tensor = torch.Tensor
Run = Callable[[Any, Tensor], Tensor]


class Running(nn.Module):
    """Parts, and what a forward does with them."""

    def __init__(self, run: Run, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Product(torch.autograd.Function):
    """A function that saves a weight by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, torch.einsum("abi,abj->ij", grads[0], x)


def linear(**kwargs: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **kwargs)


def over_time(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(len(x), WIDTH)
    for part in x.unbind(1):
        state = m.cell(part, state)
    return state


def lists(m: Any, x: Tensor) -> Tensor:
    for scale in m.scales:
        x = x * scale
    return torch.tanh(x @ m.more["a"])


def penalty(m: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        y = m.last(torch.tanh(m.first(x)))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope.square()


def mapped(m: Any, x: Tensor) -> Tensor:
    params = dict(m.last.named_parameters())
    return torch.vmap(lambda y: functional_call(m.last, params, (m.first(y),)))(x)


def pushed_forward(m: Any, x: Tensor) -> Tensor:
    return jvp(lambda y: torch.tanh(m.part(y)), (x,), (torch.ones_like(x),))[1]


def recomputed(m: Any, x: Tensor) -> Tensor:
    return m.part(checkpoint(lambda y: m.heads(y, y, y)[0], x, use_reentrant=False))


def hooked() -> nn.Module:
    part = linear()
    part.register_forward_hook(lambda module, args, output: output * module.weight.mean())
    part.register_full_backward_hook(lambda module, grads, _: (grads[0] * 2,))
    return part


def kinds() -> dict[str, nn.Module]:
    """The first has a transform, inside of which memory is made."""
    heads, again = (nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
    block = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
    both = nn.Transformer(WIDTH, 2, 1, 1, 16, 0.0, batch_first=True)
    lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True)
    normed = [f(linear()) for f in (parametrizations.weight_norm, nn.utils.weight_norm)]
    scales = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(3)])
    more = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH, WIDTH))})
    own = linear(bias=False)
    return {
        "pushed_forward": Running(pushed_forward, part=linear()),
        # The projection at its end is never called; its parent reads its weight.
        "attention": Running(lambda m, x: m.heads(x, x, x, need_weights=False)[0], heads=heads),
        "clones": nn.TransformerEncoder(block, 2),
        "encoder_and_decoder": Running(lambda m, x: m.both(x, x), both=both),
        "recurrent": Running(lambda m, x: m.lstm(x)[0], lstm=lstm),
        "cell": Running(over_time, cell=nn.GRUCell(WIDTH, WIDTH)),
        "parametrized": nn.Sequential(*normed, parametrizations.orthogonal(linear())),
        "lists": Running(lists, scales=scales, more=more),
        "own_function": Running(lambda m, x: Product.apply(x, m.part.weight), part=own),
        "penalty": Running(penalty, first=linear(), last=linear()),
        "mapped": Running(mapped, first=linear(), last=linear()),
        "recomputed_attention": Running(recomputed, heads=again, part=linear()),
        "hooked": nn.Sequential(linear(), hooked()),
    }


class AllKinds(nn.ModuleDict):
    def __init__(self) -> None:
        super().__init__(kinds())

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([kind(x).square().mean() for kind in self.values()])


def data(step: int, rank: int) -> Tensor:
    return drawn(10 * step + rank, 2, 4, WIDTH)


@functools.cache
def one_process() -> tuple[nn.Module, Tensor]:
    """The trained model, and what it gives."""
    model = seeded(AllKinds)
    OneProcess(model, LR, lambda model, x: model(x).sum()).train(data, 2)
    model.eval()
    with torch.no_grad():
        return model, model(data(9, 0))


def config(kind: str = "SGD", options: Any = None, **zero: Any) -> dict[str, Any]:
    optimizer = {"type": kind, "params": options or {"lr": LR}}
    zero = {"stage3_max_reuse_distance": 0, **zero}
    return config_of(3, 2, optimizer=optimizer, zero_optimization=zero)


def engine_of(model: nn.Module, **zero: Any) -> Any:
    return deepspeed.initialize(model=model, config=config(**zero))[0]


class TestModules(DistributedTest):
    world_size = 2

    @each(made_in_shards=(False, True))
    def test_as_one_process(self, made_in_shards: bool) -> None:
        # Kills: a weight that a parent, a hook, a parametrization or torch's fused evaluation reads
        # of a module that is not called; clones that `zero.Init` refuses; a transform's wrapped
        # tensors that are taken for memory.
        with Init() if made_in_shards else nullcontext():
            model = seeded(AllKinds)
        engine = engine_of(model, **SHARDED)
        for step in range(2):
            engine.backward(engine(data(step, dist.get_rank())).sum())
            engine.step()
        engine.eval()
        with torch.no_grad():
            found = engine(data(9, 0))
        engine.destroy()
        expected, wanted = one_process()
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
        for name, param in model.named_parameters():
            # The ranks' sums have another order.
            assert (param - expected.get_parameter(name)).abs().max() < 1e-6, name

    def test_copies_of_shards_state_made_at_once_and_what_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: a copy that shares the shard, or forgets what is tied; one of what an engine has.
        with Init():
            model = nn.Sequential(linear(), linear())
            model[1].weight = model[0].weight
            twin = copy.deepcopy(model)
        assert twin[1].weight is twin[0].weight and not twin[0].weight.numel()
        assert twin[0].weight.ds_tensor.data_ptr() != model[0].weight.ds_tensor.data_ptr()
        assert twin[0].weight.ds_id != model[0].weight.ds_id
        with GatheredParameters([*model.parameters(), *twin.parameters()]):
            for one, other in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(one, other)
        with GatheredParameters(twin.parameters(), modifier_rank=0):
            nn.init.zeros_(twin[0].weight)
        with GatheredParameters(model.parameters()):
            assert model[0].weight.any()
        engine = engine_of(model, **SHARDED)
        with pytest.raises(RuntimeError, match=r"deepcopy: 0\.weight is sharded"):
            copy.deepcopy(model)
        file = io.BytesIO()
        with GatheredParameters(model.parameters()):
            twin = copy.deepcopy(model)
            torch.save(model, file)
        file.seek(0)
        engine.backward(engine(data(0, 0)).sum())
        engine.step()
        for plain in (twin, torch.load(file, weights_only=False)):
            assert type(plain[0].weight) is nn.Parameter
            assert plain[1].weight is plain[0].weight
            assert not torch.equal(plain(data(0, 0)), engine(data(0, 0)))
            plain(data(0, 0)).sum().backward()

        # Kills: Adagrad that cannot be made for sharded parameters, or begins at placeholders'
        # accumulators; masters without accumulators, which torch makes late since 2.13 only.
        begin = torch.optim.Adagrad._init_group

        def checked(optimizer: Any, group: Any, *lists: Any) -> Any:
            assert all(optimizer.state[param] for param in group["params"])
            return begin(optimizer, group, *lists)

        monkeypatch.setattr(torch.optim.Adagrad, "_init_group", checked)

        def make() -> nn.Module:
            return seeded(lambda: nn.Sequential(linear(), nn.Tanh(), linear()))

        options = {"lr": LR, "initial_accumulator_value": 0.1}
        with Init():
            model = make()
        made = config("Adagrad", options, **SHARDED)
        engine = deepspeed.initialize(model=model, config=made)[0]
        train(engine, [data(step, dist.get_rank()) for step in range(2)], mean_square)
        engine.destroy()
        plain = make()
        one = OneProcess(plain, torch.optim.Adagrad(plain.parameters(), **options), mean_square)
        for found, wanted in zip(model.parameters(), one.train(data, 2).values(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)  # sums of another order
        # Kills: a module whose forward no hook can see that is taken; shards below stage 3 that
        # raise without a remedy.
        with Init():
            cut = linear()
        settings = config() | {"zero_optimization": {"stage": 2}}
        with pytest.raises(deepspeed.DeepSpeedConfigError, match=r"stage: 2, but weight is shar"):
            deepspeed.initialize(model=cut, config=settings)
        model = nn.Sequential(linear(), torch.jit.script(linear()))
        with pytest.raises(deepspeed.DeepSpeedConfigError, match=r"3 with 1, which torch\.jit"):
            engine_of(model)
