"""Units of gathering, and what rounding leaves of a sum that is taken back."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from unit.models import drawn

from deepspeed.runtime.zero.gathering import undone_edits
from deepspeed.runtime.zero.gathering.coordinator import UseOrder
from deepspeed.runtime.zero.gathering.memory_pool import MemoryPool, PoolBuffer
from deepspeed.runtime.zero.gathering.undone_edits import is_undone
from deepspeed.runtime.zero.gathering.units import choose_persistent, fine_grained, fuse, plan_units


class Called(nn.Module):
    """Runs what is in it as it likes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Block(Called):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)


class Net(Called):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.embed = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(2))])
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def own_of(model: nn.Module, leaves: tuple[nn.Module, ...] = ()) -> dict[str, list[str]]:
    names = {param: name for name, param in model.named_parameters()}
    plans = plan_units(model, lambda module: module in leaves)
    owned = [param for plan in plans for param in plan.own]
    assert owned and len(set(owned)) == len(names)
    return {plan.name: [names[param] for param in plan.own] for plan in plans}


def test_blocks_are_units() -> None:
    # Kills: a unit per layer, parameters of a list that nobody gathers, a tied weight owned twice.
    model = Net()
    found = own_of(model)
    assert found[""] == ["scale", "extra.0"]
    assert found["embed"] == ["embed.weight"]
    own = ("a.weight", "a.bias", "b.weight", "b.bias")
    assert found["blocks.1"] == [f"blocks.1.{name}" for name in own]
    assert found["head"] == []
    assert len(found) == 6
    # Kills: a module whose forward doesn't ask for what another unit owns: a tied weight.
    head = next(plan for plan in plan_units(model, lambda module: False) if plan.name == "head")
    assert head.params == [model.embed.weight]
    # Kills: a marked module that is divided.
    assert list(own_of(model, (model,))) == [""]
    assert "blocks.0" in own_of(model, (model.blocks[0].a,))


class ChosenExperts(nn.ModuleDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self["a"](x)


class Mixture(Called):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(2, 2), experts


def test_experts_are_one_unit() -> None:
    # Kills: a unit per expert, which only the ranks that chose it would gather.
    listed = Mixture(nn.ModuleList([nn.Linear(2, 2) for _ in range(3)]))
    assert list(own_of(nn.Sequential(listed, nn.ReLU()))) == ["", "0"]
    chosen = Mixture(ChosenExperts({name: nn.Linear(2, 2) for name in "abc"}))
    assert list(own_of(nn.Sequential(chosen, nn.ReLU()))) == ["", "0.gate", "0.experts"]

    # Kills: a list of lists taken for a block, whose forward never runs.
    model = Called()
    model.pairs = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), Block()]) for _ in range(2)])
    assert set(own_of(model)) == {"", "pairs.0.0", "pairs.0.1", "pairs.1.0", "pairs.1.1"}


def test_persistent_parameters() -> None:
    # Kills: a threshold of one parameter that ignores that of all.
    params = [nn.Parameter(torch.zeros(numel)) for numel in (0, 4, 5, 6, 4)]
    chosen = choose_persistent(params, lambda param: param.numel(), 5, 10)
    assert [param in chosen for param in params] == [True, True, True, False, False]


def fused(model: nn.Module, limit: int, leaves: tuple[nn.Module, ...] = ()) -> list[list[str]]:
    plans = plan_units(model, lambda module: module in leaves)
    found = fuse(plans, lambda plan: sum(param.numel() for param in plan.own), limit)
    return [[plan.name for plan in group] for group in found]


def test_small_neighbours_are_fused() -> None:
    # Kills: a large unit gathered with small ones, small ones on both sides of it together, a unit
    # beyond the limit, a plan without parameters that parts its neighbours or is gathered.
    tiny = [nn.Linear(2, 2) for _ in range(5)]  # 6 elements each
    model = nn.Sequential(*tiny[:3], nn.ReLU(), nn.Linear(20, 20), *tiny[3:])
    assert fused(model, 0) == [[name] for name in "012456"]
    assert fused(model, 47) == [[name] for name in "012456"]  # none has an eighth
    assert fused(model, 48) == [["0", "1", "2"], ["4"], ["5", "6"]]
    many = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    assert [len(group) for group in fused(many, 50)] == [8, 8, 4]
    many[3].weight = many[2].weight
    assert [len(group) for group in fused(many, 8 * 20 * 6)] == [20]


def test_a_module_is_fused_with_all_below_it_or_not_at_all() -> None:
    # Kills: a module that keeps its first children whole while the others run.
    class Scaled(Called):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.a, self.b = nn.Linear(2, 2), nn.Linear(width, width)

    model = Called()
    model.first, model.large, model.last = nn.Linear(2, 2), Scaled(20), Scaled(1)
    alone = [["first"], ["large"], ["large.a"], ["large.b"]]
    assert fused(model, 100) == [*alone, ["last", "last.a", "last.b"]]


def test_fine_grained_modules() -> None:
    # Kills: a container that is never called, a child of one that is found already, a module
    # without parameters, a shared parameter that counts twice.
    def found(model: nn.Module, threshold: int) -> list[nn.Module]:
        return fine_grained(model, lambda param: param.numel(), threshold)

    model = Net()  # 90 elements in 14 modules; a block has 24 in 3
    assert found(model, 0) == found(model, 6) == []
    assert found(model, 7) == [model]
    assert set(found(model.blocks, 8)) == set(model.blocks)
    assert found(model.blocks, 7) == found(nn.ReLU(), 7) == []


# The order of units as a hint


def visited(order: UseOrder, kind: str, *units: int) -> UseOrder:
    """A pass in which units are used."""
    order.begin(kind)
    for unit in units:
        order.visit(unit)
    return order


def test_a_second_pass_is_foreseen() -> None:
    # Kills: a hint that is one unit late, a distance that counts the unit itself.
    order = UseOrder([10, 20, 30])
    order.begin("train")
    for unit in (0, 1, 2, 2, 1, 0):
        order.visit(unit)
        assert list(order.ahead(1000)) == []
        assert order.distance(unit) is None
    order.begin("train")
    assert list(order.ahead(0)) == []
    # Kills: a next unit that is not named because it is larger than the window, and one more that
    # only begins behind it.
    assert list(order.ahead(1)) == [0]
    assert list(order.ahead(30)) == [1]
    order.visit(0)
    # Kills: a window that begins with the unit in use, or names what it has named.
    assert list(order.ahead(80)) == [2, 2]
    assert next(order.ahead(100)) == 1  # the caller stops there
    assert list(order.ahead(100)) == [1]
    order.name_again(2)
    # Kills: what has gone while the caller made room that is passed by.
    again = order.ahead(100)
    assert [next(again), next(again)] == [2, 2]
    order.name_again(2)
    assert list(again) == [2, 2, 1]
    assert order.distance(0) == 20 + 30 + 30 + 20
    order.visit(1)
    assert order.distance(1) == 60


def test_another_order_gives_no_hint_and_is_learned() -> None:
    # Kills: a stale order that is believed, or one that is never replaced.
    order = UseOrder([1, 1, 1])
    for uses in ((0, 1, 2), (0, 2, 1), (0, 2, 1)):
        visited(order, "train", *uses)
    assert order.is_expected
    visited(order, "train", 0)
    assert list(order.ahead(2)) == [2, 1]
    order.visit(1)
    assert not order.is_expected
    assert list(order.ahead(2)) == []


def test_kinds_are_kept_apart() -> None:
    # Kills: an evaluation between two steps that makes training forget its order.
    order = UseOrder([1, 1])
    for kind, uses in (("train", (0, 1, 1, 0)), ("eval", (0, 1)), ("train", (0, 1))):
        visited(order, kind, *uses)
    assert list(order.ahead(2)) == [1, 0]
    order.forget()
    order.begin("train")
    assert list(order.ahead(2)) == []


# Which piece of memory is used again


def take(pool: MemoryPool, numel: int, owner: str, dtype: Any = torch.float32) -> PoolBuffer:
    return pool.take(numel, dtype, torch.device("cpu"), owner)


def test_the_own_one_of_just_the_size() -> None:
    # Kills: views that are made anew because units swap memory; another dtype's memory; memory that
    # two have; a large buffer for a small need, which the next large one then lacks.
    pool = MemoryPool(has_streams=False)
    pool.keeps = 200
    large, first, second = take(pool, 10, "large"), take(pool, 4, "a"), take(pool, 4, "b")
    for buffer in (large, first, second):
        pool.give_back(buffer)
    assert take(pool, 4, "a") is first
    assert take(pool, 4, "new") is second
    assert take(pool, 3, "a").tensor.numel() == 3
    pool.give_back(first)
    pool.give_back(second)
    assert take(pool, 4, "other", torch.bfloat16) not in (first, second)
    assert take(pool, 4, "newer") is second  # given back last
    assert pool.num_bytes == (10 + 4 + 4 + 3) * 4 + 4 * 2


def test_what_does_not_fit_goes() -> None:
    # Kills: memory of units of all sizes; memory that stays because it might be used again; memory
    # that goes though the pool may keep it, or that somebody has.
    pool = MemoryPool(has_streams=False)
    pool.keeps = 8 * 4
    for size in (1, 2, 3, 4, 1, 4):
        pool.give_back(take(pool, size, f"{size}"))
        assert pool.num_bytes <= 8 * 4
    assert sorted(one.tensor.numel() for one in pool.by_pointer.values()) == [1, 3, 4]
    held = take(pool, 4, "held")
    take(pool, 20, "more than it keeps")
    assert pool.num_bytes == (4 + 20) * 4
    pool.give_back(held)
    pool.drop_free()
    assert pool.num_bytes == 20 * 4


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def small(*shape: int, seed: int = 0) -> torch.Tensor:
    return 0.02 * drawn(seed, *shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-3, 0.1, 1.0, 3.0])
def test_a_sum_that_is_taken_back(dtype: torch.dtype, size: float) -> None:
    # Kills: a bound by the units of the element itself, which a larger delta leaves far behind.
    for seed, shape in enumerate([(1,), (4, 4), (33, 65)]):
        before = small(*shape, seed=seed).to(dtype)
        after, delta = before.clone(), size * small(*shape, seed=seed + 9)
        for kind in (dtype, torch.float32):  # adapters are kept in fp32 beside a base in bf16
            after += delta.to(kind)
            after -= delta.to(kind)
            assert is_undone(before, after), (shape, kind)


def test_a_norm_of_columns_that_is_taken_back() -> None:
    # DoRA scales the sum too.
    before = small(64, 64).to(torch.bfloat16)
    delta, factor = 0.3 * small(64, 64, seed=1).to(torch.bfloat16), 1 + small(64, 1, seed=2).abs()
    merged = (factor * (before + delta)).to(torch.bfloat16)
    assert is_undone(before, (merged / factor).to(torch.bfloat16) - delta)


@pytest.mark.parametrize("dtype, least", zip(DTYPES[:3], (0.02, 0.005, 3e-6), strict=True))
def test_a_small_change(dtype: torch.dtype, least: float) -> None:
    # Kills: a bound by the largest element alone, which hides what changes all of them a little.
    before = small(64, 64).to(dtype)
    exact = before.double()
    for after in (
        exact * (1 + least),
        exact * (1 - least),
        exact + 2 * least * 0.02,
        exact + 2 * least * small(64, 64, seed=3),
        exact * 0,
    ):
        assert not is_undone(before, after.to(dtype))
    one = before.clone()
    one[3, 5] += 10 * least * 0.02
    assert not is_undone(before, one)


def test_special_values() -> None:
    # Kills: NaN or infinity that make everything small, a zero that becomes something.
    values = torch.tensor([1.0, math.nan, math.inf, -math.inf, -0.0, 2.0])
    assert is_undone(values, values.clone())
    assert is_undone(values, values + 1e-7)
    for index, value in enumerate((math.nan, 1.0, 1.0, math.inf, 1e-3, math.inf)):
        after = values.clone()
        after[index] = value
        assert not is_undone(values, after), index
    assert not is_undone(torch.zeros(4), torch.full((4,), 1e-30))
    assert is_undone(torch.zeros(0), torch.zeros(0))


def test_other_kinds() -> None:
    whole = torch.arange(5)
    assert is_undone(whole, whole.clone()) and not is_undone(whole, whole + 1)
    assert not is_undone(torch.ones(4), torch.ones(4).half())
    assert not is_undone(torch.ones(4), torch.ones(3))
    pairs = torch.tensor([1 + 2j, 3 - 1j])
    assert is_undone(pairs, pairs + 1e-7j) and not is_undone(pairs, pairs + 1e-3j)


def test_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills: a last piece that nobody looks at.
    monkeypatch.setattr(undone_edits, "PIECE_NUMEL", 4)
    before = small(3, 3)
    for index in range(9):
        after = before.clone().view(-1)
        after[index] += 1e-3
        assert not is_undone(before, after.view(3, 3))
    assert is_undone(before, before + 1e-9)
