"""The all-to-all under sequence parallelism: layouts, uneven heads, gradients, errors."""

from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.sequence.layer import (
    DistributedAttention,
    _DimZeroAllToAll,
    _SeqAllToAll,
    apply_rotary_pos_emb,
    plan_heads,
    post_all2all,
    pre_all2all_fun,
    single_all_to_all,
    uneven_heads_all2all,
)
from unit.common import DistributedTest
from unit.v1.looping import each

S, B, D = 8, 2, 3
LAYOUTS = ("sbhd", "bshd")


def whole(heads: int, layout: str) -> torch.Tensor:
    """[s, b, h, d] or [b, s, h, d], each element another number."""
    sbhd = torch.arange(float(S * B * heads * D)).view(S, B, heads, D)
    return sbhd if layout == "sbhd" else sbhd.transpose(0, 1).contiguous()


def laid(heads: int, layout: str) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """All, and this rank's positions; the dimensions of positions and of the batch."""
    positions, batch = (0, 1) if layout == "sbhd" else (1, 0)
    full = whole(heads, layout)
    own = full.chunk(dist.get_world_size(), positions)[dist.get_rank()]
    return full, own, positions, batch


class TestLayouts(DistributedTest):
    world_size = [2, 4]

    @each(layout=LAYOUTS, heads=(4, 5, 7))
    def test_there_and_back(self, layout: str, heads: int) -> None:
        # Kills: pieces joined in another order than ranks', the two dimensions swapped, a batch
        # mixed into positions; equal splits of uneven heads, which would lose heads or wait for
        # bytes that nobody sends.
        world, rank, group = dist.get_world_size(), dist.get_rank(), dist.get_world_group()
        full, own, positions, batch = laid(heads, layout)
        exchange = single_all_to_all if heads == 4 else uneven_heads_all2all
        by_heads = exchange(own, 2, positions, batch, group)
        assert torch.equal(by_heads, full.tensor_split(world, 2)[rank])
        assert torch.equal(exchange(by_heads, positions, 2, batch, group), own)
        if heads == 4:
            assert by_heads.is_contiguous()
            merged = by_heads.flatten(2)  # as attention that returns [s, b, hidden]
            assert torch.equal(exchange(merged, positions, 2, batch, group), own.flatten(2))

    @each(layout=LAYOUTS, heads=(4, 5))
    def test_gradient_is_the_exchange_back(self, layout: str, heads: int) -> None:
        # Kills: a backward that is the forward again, or nothing: every element's gradient must be
        # its own weight.
        world, rank = dist.get_world_size(), dist.get_rank()
        full, own, positions, batch = laid(heads, layout)
        own, weights = own.clone().requires_grad_(), full * 2 + 1
        by_heads = _SeqAllToAll.apply(dist.get_world_group(), own, 2, positions, batch)
        (by_heads * weights.tensor_split(world, 2)[rank]).sum().backward()
        assert torch.equal(own.grad, weights.chunk(world, positions)[rank])


class KeepQuery(torch.nn.Module):
    """A local attention that keeps what it is given."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Returns the query."""
        self.query, self.value, self.rest = query, value, (args, kwargs)
        return query


class TestRest(DistributedTest):
    world_size = 2

    def test_started_now_complete_later(self) -> None:
        full, own, *_ = laid(4, "sbhd")
        handle: dict[str, Any] = {}
        given = (own, 2, 0, 1, dist.get_world_group())
        assert single_all_to_all(*given, async_op=True, handle=handle, type="q") is None
        (by_heads,) = handle["q"].wait()
        assert torch.equal(by_heads, full.chunk(2, 2)[dist.get_rank()])
        with pytest.raises(ValueError, match="needs handle"):
            single_all_to_all(*given, async_op=True)

    @each(positions=(0, 1))
    def test_rotary_angles_are_those_of_whole_sequences(self, positions: int) -> None:
        # Kills: angles of this rank's positions for all, or laid along the batch.
        rank = dist.get_rank()
        full = whole(4, "sbhd" if positions == 0 else "bshd").sin()
        angles = torch.rand(S, 1, 1, 2, generator=torch.Generator().manual_seed(0))
        core = KeepQuery()
        attention = DistributedAttention(core, dist.get_world_group(), 2, positions)
        for given in (angles, angles.transpose(0, 1)):
            own = full.chunk(2, positions)[rank]
            attention(own, own, own, 1 - positions, (given.cos(), given.sin()), "more", scale=3)
            at = angles if positions == 0 else angles.transpose(0, 1)
            turned = apply_rotary_pos_emb(full, at.cos(), at.sin())
            assert torch.equal(core.query, turned.chunk(2, 2)[rank])
            assert torch.equal(core.value, full.chunk(2, 2)[rank])
            assert core.rest == (("more",), {"scale": 3})
        with pytest.raises(ValueError, match="rotary_pos_emb: .* the 8 positions"):
            attention(own, own, own, 1 - positions, (angles[:4], angles[:4]))

    def test_mixed_dtypes(self) -> None:
        # Kills: keys cast to the queries' dtype in the shared buffer.
        full, own, *_ = laid(4, "sbhd")
        core = KeepQuery()
        DistributedAttention(core, dist.get_world_group())(own, own, own.double(), 1)
        assert core.value.dtype == torch.float64
        assert torch.equal(core.value, full.double().chunk(2, 2)[dist.get_rank()])

    def test_local_attention_that_returns_something_else(self) -> None:
        class Half(torch.nn.Module):
            def forward(self, query: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
                return query[:, :, :1]

        own = laid(4, "sbhd")[1]
        told = r"local attention returned \(8, 2, 1, 3\); expected 2 heads"
        with pytest.raises(ValueError, match=told):
            DistributedAttention(Half(), dist.get_world_group())(own, own, own, 1)

    def test_first_dimension(self) -> None:
        rank = dist.get_rank()
        own = (torch.arange(4.0) + 10 * rank).requires_grad_()
        got = _DimZeroAllToAll.apply(dist.get_world_group(), own)
        assert got.tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]][rank]
        (got * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
        assert own.grad.tolist() == [[1, 2, 1, 2], [3, 4, 3, 4]][rank]
        with pytest.raises(ValueError, match="dimension 0"):
            _DimZeroAllToAll.apply(dist.get_world_group(), torch.ones(3))

    def test_errors_name_the_numbers(self) -> None:
        # All of them before anything is sent: no rank waits for another.
        group = dist.get_world_group()
        for match, shape, dims in (
            ("sequence of 7 positions .* over 2 .*pad", (7, 1, 4, 2), (0, 2, 1)),
            ("1 attention heads .* over 2", (4, 1, 1, 2), (2, 0, 1)),
            ("batch_dim_idx 0 must be three dimensions", (4, 1, 4, 2), (2, 0, 0)),
        ):
            with pytest.raises(ValueError, match=match):
                single_all_to_all(torch.zeros(shape), *dims, group)
        with pytest.raises(ValueError, match="type='q'"):
            _SeqAllToAll.apply(group, torch.zeros(4, 1, 4, 2), 2, 0, 1, None, {}, "q")


class TestPlans:
    """Who gets which heads: pure arithmetic."""

    @pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
    @pytest.mark.parametrize(
        ("query", "key"),
        [(8, 8), (8, 4), (8, 2), (8, 1), (12, 3), (9, 3), (10, 5), (13, 13), (12, 6)],
    )
    def test_every_query_head_finds_its_key_head(self, query: int, key: int, ranks: int) -> None:
        # Kills: a border between ranks inside a group of query heads, whose second half would
        # attend to another key head.
        plan = plan_heads(query, key, ranks)
        order = plan.key_order or tuple(range(key))
        assert sum(plan.query) == query and sum(plan.key) == len(order) and min(plan.query) > 0
        first_query = first_key = 0
        for queries, keys in zip(plan.query, plan.key, strict=True):
            assert queries % keys == 0
            local = [order[first_key + head // (queries // keys)] for head in range(queries)]
            assert local == [(first_query + head) // (query // key) for head in range(queries)]
            first_query, first_key = first_query + queries, first_key + keys

    def test_nothing_is_repeated_without_need(self) -> None:
        assert plan_heads(8, 2, 2).key_order is None
        assert plan_heads(8, 2, 4).key_order == (0, 0, 1, 1)
        assert plan_heads(7, 7, 4) == ((2, 2, 2, 1), (2, 2, 2, 1), None)

    def test_errors(self) -> None:
        with pytest.raises(ValueError, match="2 attention heads .* over 4"):
            plan_heads(2, 2, 4)
        with pytest.raises(ValueError, match="8 query heads cannot share 3 key heads"):
            plan_heads(8, 3, 2)


def test_rotary_turns_pairs() -> None:
    # Kills: neighbours paired instead of halves, the sign, features beyond the angles changed.
    angles = torch.rand(5, 1, 1, 2, dtype=torch.float64)
    cos, sin = (torch.cat((f(angles), f(angles)), dim=-1) for f in (torch.cos, torch.sin))
    t = torch.rand(5, 2, 3, 6, dtype=torch.float64)
    turned = apply_rotary_pos_emb(t, cos, sin)
    pairs = torch.complex(t[..., :2], t[..., 2:4]) * torch.polar(torch.ones_like(angles), angles)
    assert torch.allclose(turned[..., :2], pairs.real)
    assert torch.allclose(turned[..., 2:4], pairs.imag)
    assert torch.equal(turned[..., 4:], t[..., 4:])


def test_layout_helpers() -> None:
    t = torch.arange(24)
    swapped = t.view(2, 3, 4).transpose(0, 1)
    assert torch.equal(pre_all2all_fun((1, 0, 2), (2, 3, 4), t), swapped)
    assert torch.equal(post_all2all((1, 0, 2), (6, 4))(t.view(2, 3, 4)), swapped.reshape(6, 4))
