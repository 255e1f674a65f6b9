"""Optimizers that update a parameter from the whole of it, on shards, against plain torch.

Gradients are compared with that process's; then both step with the gradients of the engine, because
Muon computes in bf16, where a difference in the last bit of one gradient moves a whole matrix.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.muon.newton_schulz import orthogonalize
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.sharding import dealt_parameters
from deepspeed.runtime.sharding.dealt_parameters import DealtTable, deal
from deepspeed.utils import safe_get_full_optimizer_state
from deepspeed.utils.tensor_fragment import logical_shape
from unit import models
from unit.common import DistributedFixture, DistributedTest
from unit.models import seeded, tokens
from unit.one_process import OneProcess
from unit.v1.checkpoint.test_universal import convert
from unit.v1.gathering import gradients_of, masters_of

VOCABULARY, WIDTH, ROWS, STEPS = 11, 9, 4, 2
MUON = {"muon_lr": 0.05, "adam_lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}
LAMB = {"lr": 0.02, "weight_decay": 0.1}
# A coefficient, and how a matrix of singular value 1 is left by five steps, stand in the papers.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Net(nn.Module):
    """Matrices of all forms, filters, a stack of matrices, and what is AdamW's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 31)
        self.norm = nn.LayerNorm(31)
        self.down = nn.Linear(31, WIDTH, bias=False)
        self.square = nn.Linear(WIDTH, WIDTH)
        self.filters = nn.Conv2d(3, 5, 3, padding=1)
        self.stack = nn.Parameter(torch.randn(2, WIDTH, 5) * 0.1)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean loss over rows."""
        hidden = self.down(self.norm(self.up(self.embed(tokens))).tanh())
        hidden = hidden + self.square(hidden).tanh()
        images = self.filters(hidden.view(-1, 1, 3, 3).expand(-1, 3, 3, 3)).flatten(1)
        mixed = torch.einsum("bi,eij->bej", hidden, self.stack).flatten(1)
        hidden = hidden + images[:, :WIDTH].sin() + mixed[:, :WIDTH].tanh()
        return F.cross_entropy(self.lm_head(hidden).float(), labels)


def make_net() -> Net:
    return seeded(Net, seed=3)


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, ...]:
    return tokens(100 * step + rank, VOCABULARY, 2, ROWS).unbind()


def by_muon(name: str, value: torch.Tensor) -> bool:
    return value.dim() >= 2 and name not in ("embed.weight", "lm_head.weight")


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    a, b, c = NEWTON_SCHULZ
    # Rank-deficient gradients leave directions that are rounding alone, so the products of a stack
    # are those of a stack here too.
    add = torch.baddbmm if matrix.dim() == 3 else torch.addmm
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.bfloat16().mT if tall else matrix.bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class PlainMuon:
    """Muon and AdamW of one process, a parameter at a time."""

    def __init__(
        self, values: dict[str, torch.Tensor], made: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.values, self.made = values, made
        self.momentum = {name: torch.zeros_like(value) for name, value in values.items()}
        rest = [nn.Parameter(value) for name, value in values.items() if not by_muon(name, value)]
        self.rest = torch.optim.AdamW(rest, lr=MUON["adam_lr"], weight_decay=MUON["weight_decay"])

    def step(self, grads: dict[str, torch.Tensor]) -> None:
        lr, beta, decay = MUON["muon_lr"], MUON["momentum"], MUON["weight_decay"]
        others = iter(self.rest.param_groups[0]["params"])
        for name, value in self.values.items():
            if not by_muon(name, value):
                next(others).grad = grads[name]
                continue
            self.momentum[name].lerp_(grads[name], 1 - beta)
            direction = grads[name].lerp(self.momentum[name], beta)
            value.mul_(1 - lr * decay)
            if value.dim() == 4:
                value, direction = value.flatten(1), direction.flatten(1)
            scale = math.sqrt(max(1, value.shape[-2] / value.shape[-1]))
            value.add_(self.made(direction), alpha=-lr * scale)
        self.rest.step()


class PlainOptimizer:
    """Of one process, over whole parameters."""

    def __init__(self, kind: str, values: dict[str, torch.Tensor]) -> None:
        self.params = {name: nn.Parameter(value) for name, value in values.items()}
        self.optimizer = made_of(kind, self.params.values())

    def step(self, grads: dict[str, torch.Tensor]) -> None:
        for name, param in self.params.items():
            param.grad = grads[name].clone()
        self.optimizer.step()


class MixedRule(torch.optim.Optimizer):
    """A client's of no known name, whose state is no tensor's shape: a number and a tensor."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(rows=torch.zeros(param.shape[:1]), count=0)
                    state["momentum"] = torch.zeros_like(param)
                state["count"] += 1
                state["momentum"].lerp_(param.grad, 0.3)
                state["rows"] += param.grad.flatten(1).norm(dim=1) if param.dim() > 1 else 1.0
                rows = state["rows"].view(-1, *[1] * (param.dim() - 1))
                param.sub_(group["lr"] * state["momentum"] / (rows + 0.1) / state["count"])


def made_of(kind: str, params: Any) -> torch.optim.Optimizer:
    """A client's optimizer, or what the configuration's is without ZeRO."""
    params = list(params)
    if kind == "Lamb":
        return FusedLamb(params, **LAMB)
    if kind == "Adafactor":
        groups = [{"params": params[:4], "lr": 0.03}, {"params": params[4:]}]
        return torch.optim.Adafactor(groups, lr=0.05, weight_decay=0.1)
    return MixedRule(params)


CLIENTS = ("Adafactor", "MixedRule")


def config_of(kind: str, stage: int, dtype: str = "fp32", **zero: Any) -> dict[str, Any]:
    params = {"Muon": {**MUON, "ns_method": "standard"}, "Muon, gram": MUON}.get(kind, LAMB)
    more: dict[str, Any] = {"optimizer": {"type": kind.partition(",")[0], "params": params}}
    if kind in CLIENTS:
        more = {"zero_allow_untested_optimizer": kind == "MixedRule"}
    more["zero_optimization"] = {"reduce_bucket_size": 300, **zero}
    return models.config_of(stage, ROWS, precision=dtype, **more)


def engine_of(config: dict[str, Any], model: nn.Module | None = None, kind: str = "") -> Any:
    model = model or make_net()
    client = made_of(kind, model.parameters()) if kind in CLIENTS else None
    return deepspeed.initialize(model=model, optimizer=client, config=config)[0]


def params_of(engine: Any) -> dict[str, nn.Parameter]:
    return dict(engine.module.named_parameters())


def backward(engine: Any, step: int) -> None:
    engine.backward(engine(*batch_of(step, dist.get_rank())))


def one_process_gradients(
    values: dict[str, torch.Tensor], step: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The mean of all ranks' gradients, each as its model's dtype rounds it."""
    one = OneProcess(make_net().to(dtype), LAMB["lr"])
    one.model.load_state_dict(values, strict=True)
    summed = {name: torch.zeros_like(value) for name, value in values.items()}
    for rank in range(dist.get_world_size()):
        one.backward([batch_of(step, rank)])
        for name, grad in one.grads().items():
            summed[name] += grad.float() / dist.get_world_size()
    return summed


def check_as_one_process(kind: str, stage: int, dtype: str, clip: float = 0.0, **zero: Any) -> None:
    config = {**config_of(kind, stage, dtype, **zero), "gradient_clipping": clip}
    engine = engine_of(config, kind=kind)
    what = (kind, stage, dtype, clip, zero)
    values = masters_of(params_of(engine))
    # tests/unit/ops/test_optimizers.py holds the gram method to the polynomial.
    gram = partial(orthogonalize, ns_method="gram")
    made = {"Muon": orthogonal, "Muon, gram": gram}.get(kind)
    plain: Any = PlainMuon(values, made) if made else PlainOptimizer(kind, values)
    for step in range(STEPS):
        wanted = one_process_gradients(values, step, engine.model_dtype)
        backward(engine, step)
        grads = gradients_of(params_of(engine))
        bound = 1e-5 if dtype == "fp32" else 2e-2
        for name, grad in grads.items():
            error = (grad - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-6)
            assert error < bound, (*what, step, name, error)
        norm = math.sqrt(sum(grad.square().sum().item() for grad in grads.values()))
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        assert not clip or factor < 0.9, "this norm is not clipped"
        plain.step({name: grad * factor for name, grad in grads.items()})
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5), (*what, step)
        for name, found in masters_of(params_of(engine)).items():
            where = f"{what} step {step} {name}: "
            torch.testing.assert_close(found, values[name], rtol=1e-5, atol=1e-6, msg=where.__add__)
            values[name].copy_(found)
    engine.destroy()


OFFLOAD: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
CASES: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    ("Muon", 1, "bf16", {}),
    ("Lamb", 1, "bf16", {}),
    ("Lamb", 2, "fp32", {}),
    ("Muon", 2, "fp32", {}),
    ("Muon", 3, "fp32", {}),
    ("Lamb", 3, "fp32", {}),
    ("Lamb", 3, "bf16", {}),
    ("Muon", 3, "bf16", {}),
    ("Muon", 0, "bf16", {}),
    ("Lamb", 0, "bf16", {}),
    ("Adafactor", 0, "bf16", {}),
    ("Muon", 2, "bf16", OFFLOAD),
    ("Lamb", 2, "bf16", OFFLOAD),
    ("Lamb", 3, "bf16", OFFLOAD),
    ("Muon", 3, "bf16", OFFLOAD),
    ("Adafactor", 1, "fp32", {}),
    ("Adafactor", 2, "bf16", {}),
    ("Adafactor", 3, "bf16", {}),
    ("Lamb", 3, "fp32", {"clip": 0.05}),
    ("Adafactor", 3, "fp32", {"clip": 0.05}),
    ("MixedRule", 3, "fp32", {"clip": 0.05}),
    ("MixedRule", 3, "bf16", OFFLOAD),
)


class TestAsOneProcess(DistributedTest):
    """Stages 1 to 3, several buckets, so that matrices are cut between ranks."""

    world_size = [1, 2, 3]
    exec_timeout = 120

    def test(self) -> None:
        # Kills: a part of a matrix orthogonalized by itself, a result that goes to another place,
        # an update of one rank only, AdamW for matrices, Muon's rate for the rest, norms of parts;
        # shards stepped as vectors, masters that do not come back, an owner's state that is
        # another's, a group's options given to others.
        world = dist.get_world_size()
        for number, (kind, stage, dtype, options) in enumerate(CASES):
            # Two and three ranks have every second of them each; so has one process, in which
            # nothing is cut, of the first.
            if number % 2 == world % 2 and (world > 1 or number < 11):
                check_as_one_process(kind, stage, dtype, **options)
        # Every instance has all shards.
        check_as_one_process("Muon", 2, "fp32", num_optimizer_instances=world)
        check_as_one_process("MixedRule", 2, "fp32", num_optimizer_instances=world)
        # Kills: another order of products by default; matrices that lie whole with their owner left
        # out, or taken for whole when a part of them lies elsewhere.
        check_as_one_process("Muon, gram", 2, "fp32", reduce_bucket_size=10**6)


SAVED = {
    "muon-2": ("Muon", 2, "bf16"),
    "muon-3": ("Muon", 3, "fp32"),
    "lamb-1": ("Lamb", 1, "fp32"),
    "adafactor-0": ("Adafactor", 0, "fp32"),
    "adafactor-2": ("Adafactor", 2, "bf16"),
    "mixed-3": ("MixedRule", 3, "fp32"),
}
# What each keeps of matrices, and of vectors.
STATE = {
    "Lamb": (("exp_avg", "exp_avg_sq"), ("exp_avg", "exp_avg_sq")),
    "Adafactor": (("row_var", "col_var", "step"), ("variance", "step")),
    "MixedRule": (("momentum", "rows", "count"), ("momentum", "rows", "count")),
}


def state_of(engine: Any, kind: str, stage: int) -> dict[str, torch.Tensor]:
    """Masters and what optimizers remember of every parameter, whole."""
    values = masters_of(params_of(engine), plain=stage == 0)
    found = {f"master.{name}": value for name, value in values.items()}
    for name, param in engine.module.named_parameters():
        shape = logical_shape(param)
        of_muon = engine.optimizer.param_groups[0].get("use_muon")
        keys = STATE.get(kind, STATE["Lamb"])[len(shape) < 2]
        if of_muon and by_muon(name, torch.empty(shape)):
            keys = ("momentum_buffer",)
        for key in keys:
            if stage == 0:
                value = torch.as_tensor(engine.basic_optimizer.state[param][key])
            else:
                value = safe_get_full_optimizer_state(param, key)
            found[f"{key}.{name}"] = value.clone()
    return found


class Saved(DistributedFixture):
    """Saved by two ranks after two steps, and what they held then and a step later."""

    world_size = 2

    def run(self, class_tmpdir: Any) -> None:
        for name, (kind, stage, dtype) in SAVED.items():
            engine = engine_of(config_of(kind, stage, dtype), kind=kind)
            for step in range(2):
                backward(engine, step)
                engine.step()
            engine.save_checkpoint(f"{class_tmpdir}/{name}")
            held = state_of(engine, kind, stage)
            backward(engine, 2)
            engine.step()
            later = state_of(engine, kind, stage)
            if dist.get_rank() == 0:
                torch.save((held, later), f"{class_tmpdir}/{name}.pt")
                convert(f"{class_tmpdir}/{name}")


class TestCheckpoints(DistributedTest):
    """State is cut as any other optimizer's, so it is resharded as any other's."""

    world_size = [1, 2, 3]
    exec_timeout = 120

    def test(self, Saved: Any, class_tmpdir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: momentum that is one rank's whole matrices, the groups' options given to another's;
        # state of whole parameters that stays in the file of the rank that was its owner.
        ways = itertools.product(SAVED.items(), (False, True))
        for number, ((name, (kind, stage, dtype)), universal) in enumerate(ways):
            # Every second each: one rank loads what two and three do not.
            world = dist.get_world_size()
            if (number // 2 + universal) % 2 != world // 2:
                continue
            # A later release may deal otherwise: no rank may take another's state for its own.
            dealt = (lambda *given: deal(*given)[::-1]) if name == "mixed-3" else deal
            monkeypatch.setattr(dealt_parameters, "deal", dealt)
            other = {0: 3, 1: 2, 2: 3, 3: 2 if kind == "Muon" else 0}[stage]
            stage = other if universal or stage == 0 else stage
            config = config_of(kind, stage, dtype)
            engine = engine_of({**config, "checkpoint": {"load_universal": universal}}, kind=kind)
            backward(engine, 7)
            engine.step()  # state that loading must replace
            engine.load_checkpoint(f"{class_tmpdir}/{name}")
            held, later = torch.load(f"{class_tmpdir}/{name}.pt")
            found = state_of(engine, kind, stage)
            assert held.keys() == found.keys()
            wrong = [key for key in held if not torch.equal(held[key], found[key])]
            assert wrong == [], (name, universal)
            if world == 2:
                backward(engine, 2)
                engine.step()
                for key, value in state_of(engine, kind, stage).items():
                    torch.testing.assert_close(value, later[key], rtol=1e-5, atol=1e-6)


def refused(text: str, config: dict[str, Any], model: nn.Module) -> None:
    with pytest.raises(DeepSpeedConfigError, match=text):
        engine_of(config, model)


class TestMuonIsNeverOffUnsaid(DistributedTest):
    """Who says `use_muon` gets it or an error with the parameter's name."""

    world_size = 1

    def test_refused(self) -> None:
        # Kills: each of these trains, with AdamW.
        marked = make_net()
        marked.square.weight.use_muon = True  # type: ignore[assignment]  # a mark
        adamw = {**config_of("Muon", 2), "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
        refused(r"square\.weight has use_muon, but FusedAdam", adamw, marked)
        no_matrix = make_net()
        no_matrix.norm.weight.use_muon = True  # type: ignore[assignment]  # a mark
        refused(r"norm\.weight, of shape \(31,\), has use_muon", config_of("Muon", 2), no_matrix)
        refused("Muon would update no parameter", config_of("Muon", 2), nn.Embedding(3, 4))

    def test_marks_groups_and_rates(self) -> None:
        # Kills: a mark that is not read, a rate of the other kind, groups that lose their options.
        # At stage 3 inside zero.Init a parameter's own shape is that of nothing.
        for stage in (0, 1, 3):
            config = config_of("Muon", stage)
            with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
                model = make_net()
            model.square.weight.use_muon = False  # type: ignore[assignment]  # a mark
            model.lm_head.weight.use_muon = True  # type: ignore[assignment]  # a mark
            engine = engine_of(config, model)
            groups = engine.basic_optimizer.param_groups
            rates = [(group["use_muon"], group["lr"]) for group in groups]
            assert rates == [(True, 0.05), (False, 0.01)]
            backward(engine, 0)
            engine.step()
            if stage:
                named = engine.module.named_parameters()
                names = {name for name, param in named if param._hp_mapping.group == 0}
                layers = {f"{name}.weight" for name in ("up", "down", "filters", "lm_head")}
                assert names == {*layers, "stack"}
            engine.destroy()


def test_deal() -> None:
    # Kills: all to one rank, an owner that has two parameters at one place.
    costs = [7, 7, 6, 6, 5, 5, 4, 4, 4]
    owners = deal(costs, 3)
    loads = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == r) for r in range(3)]
    assert max(loads) <= 4 / 3 * sum(costs) / 3
    # Kills: a home that is not asked, or that gets more than its share.
    assert deal([4, 4, 4, 4], 2, [1, 1, 0, 0]) == [1, 1, 0, 0]
    assert sorted(deal([4, 4, 4, 4], 2, [1, 1, 1, 1])) == [0, 0, 1, 1]
    assert deal([9, 1, 1, 7], 2, [0, 0, 0, 1]) == [0, 1, 1, 1]
    assert deal([6, 4, 4], 2, [0, 0, 1]) == deal([6, 4, 4], 2)
    table = DealtTable([*costs, 0], [*owners, 0], 3)
    for shard in range(3):
        end = 0
        for fragment in table.of_shard(shard):
            assert (fragment.shard, fragment.shard_start, fragment.param_start) == (shard, end, 0)
            end += fragment.numel
        assert end <= table.shard_numel
