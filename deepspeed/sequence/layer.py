"""Attention over sequences that are split over ranks, by exchanging positions for heads (Ulysses):
who gets which heads, evenly or not. How pieces travel is `exchange`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.accelerator import Stream, get_accelerator
from deepspeed.sequence.exchange import Cut, Exchange, Pending, exchange


def shares(total: int, ranks: int) -> tuple[int, ...]:
    """Deal `total` things to `ranks`, of which the first get one more where it is uneven."""
    return tuple(total // ranks + (rank < total % ranks) for rank in range(ranks))


def _make_cut(
    shape: Sequence[int],
    scatter: int,
    gather: int,
    group: dist.Group,
    gather_total: int | None = None,
) -> Cut:
    """Make the cut that scatters one dimension of `shape` evenly, and gathers another, of which
    every rank has as much as this one, or its share of `gather_total`.
    """
    world = dist.get_world_size(group)
    gather_sizes = (shape[gather],) * world if gather_total is None else shares(gather_total, world)
    return Cut(scatter, gather, shares(shape[scatter], world), gather_sizes)


# Upstream's functions


def single_all_to_all(
    input: torch.Tensor,
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int,
    group: dist.Group,
    async_op: bool = False,
    handle: dict[str, Any] | None = None,
    type: str | None = None,
) -> torch.Tensor | None:
    """Cut `input` along one dimension for the ranks of `group` and join what they send along
    another, without autograd: [s / P, b, h, d] to [s, b, h / P, d], say, contiguous.

    The one of the two dimensions with the lower index counts positions and has to divide. With
    `async_op` None is returned, and `handle[type]` is what has been started; its `wait()` returns a
    list with the result. ValueError for dimensions that are no such three, positions that the ranks
    do not divide, or fewer heads than ranks.
    """
    cut = _checked_cut(input, scatter_idx, gather_idx, batch_dim_idx, group)
    if not async_op:
        return exchange([input], [cut], group)[0]
    if handle is None or type is None:
        raise ValueError(
            "single_all_to_all: async_op=True needs handle (a dict) and type (its key), got "
            f"{handle!r} and {type!r}"
        )
    handle[type] = Pending([input], [cut], group, async_op=True)
    return None


def uneven_heads_all2all(
    input: torch.Tensor, scatter_idx: int, gather_idx: int, batch_dim_idx: int, group: dist.Group
) -> torch.Tensor:
    """Exchange as `single_all_to_all` heads that need not divide in either direction.

    On the way back ranks tell each other how many they hold: one small collective more and a wait
    of the host, which `DistributedAttention` does without.
    """
    total = None
    if scatter_idx < gather_idx:
        own = torch.tensor([input.shape[gather_idx]], device=input.device)
        dist.all_reduce(own, group=group)
        total = int(own.item())
    return exchange(
        [input], [_checked_cut(input, scatter_idx, gather_idx, batch_dim_idx, group, total)], group
    )[0]


def _checked_cut(
    tensor: torch.Tensor,
    scatter: int,
    gather: int,
    batch: int,
    group: dist.Group,
    gather_total: int | None = None,
) -> Cut:
    _check_dims(tensor, scatter, gather, batch)
    world, size = dist.get_world_size(group), tensor.shape[scatter]
    if scatter < gather and size % world:
        raise ValueError(
            f"a sequence of {size} positions (dimension {scatter} of {tuple(tensor.shape)}) cannot "
            f"be split over {world} sequence-parallel ranks: pad it to a multiple of {world}, or "
            f"use a degree that divides {size}"
        )
    if scatter > gather:
        _check_heads(size, world)
    return _make_cut(tensor.shape, scatter, gather, group, gather_total)


def _check_dims(tensor: torch.Tensor, scatter: int, gather: int, batch: int) -> None:
    if len({scatter, gather, batch}) != 3 or not all(
        0 <= dim < tensor.dim() for dim in (scatter, gather, batch)
    ):
        raise ValueError(
            f"scatter_idx {scatter}, gather_idx {gather}, batch_dim_idx {batch} must be three "
            f"dimensions of {tuple(tensor.shape)}"
        )


def _check_heads(heads: int, ranks: int) -> None:
    if heads < ranks:
        raise ValueError(
            f"{heads} attention heads cannot be split over {ranks} sequence-parallel ranks: use a "
            f"degree of at most {heads}"
        )


class _SeqAllToAll(torch.autograd.Function):
    """`single_all_to_all` with its gradient, the same with the two dimensions exchanged."""

    @staticmethod
    def forward(
        ctx: Any,
        group: dist.Group,
        input: torch.Tensor,
        scatter_idx: int,
        gather_idx: int,
        batch_dim_idx: int,
        stream: Stream | None = None,
        handle: dict[str, Any] | None = None,
        type: str | None = None,
        is_fwd: bool = True,
    ) -> torch.Tensor:
        """Exchange; `handle`, `type` and `is_fwd` steered when upstream waits."""
        if handle is not None or type is not None or not is_fwd:
            raise ValueError(
                f"_SeqAllToAll: handle={handle!r}, type={type!r}, is_fwd={is_fwd!r} are not "
                "supported, the result is complete when apply() returns: leave them out, or use "
                "single_all_to_all(async_op=True, handle=..., type=...)"
            )
        ctx.group, ctx.stream = group, stream
        ctx.cut = _checked_cut(input, scatter_idx, gather_idx, batch_dim_idx, group)
        return exchange([input], [ctx.cut], group, stream)[0]

    @staticmethod
    def backward(ctx: Any, *grad_output: torch.Tensor) -> tuple[Any, ...]:
        grad = exchange(grad_output, [ctx.cut.back()], ctx.group, ctx.stream)[0]
        return (None, grad, None, None, None, None, None, None, None)


class _DimZeroAllToAll(torch.autograd.Function):
    """Equal pieces of dimension 0 to all ranks, and theirs joined along it."""

    @staticmethod
    def forward(ctx: Any, group: dist.Group, input: torch.Tensor) -> torch.Tensor:
        world = dist.get_world_size(group)
        if input.shape[0] % world:
            raise ValueError(
                f"dimension 0 of {tuple(input.shape)} cannot be split evenly over {world} ranks"
            )
        ctx.group = group
        output = torch.empty_like(input, memory_format=torch.contiguous_format)
        dist.all_to_all_single(output, input.contiguous(), group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_output: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _DimZeroAllToAll.apply(ctx.group, *grad_output)


def pre_all2all_fun(
    permute_idx: Sequence[int], inp_shape: Sequence[int], input: torch.Tensor
) -> torch.Tensor:
    """View `input` as `inp_shape` and permute its dimensions, contiguous."""
    return input.reshape(tuple(inp_shape)).permute(tuple(permute_idx)).contiguous()


def post_all2all(
    permute_idx: Sequence[int], res_shape: Sequence[int]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make a function that permutes dimensions and shapes the result as `res_shape`, contiguous."""
    return lambda input: input.permute(tuple(permute_idx)).reshape(tuple(res_shape)).contiguous()


def apply_rotary_pos_emb(
    t: torch.Tensor, freqs_cos: torch.Tensor, freqs_sin: torch.Tensor
) -> torch.Tensor:
    """Turn the first `r` features of each head of [..., d] by angles, halves paired; the others
    pass. Cosines and sines broadcast with [..., r], r <= d and even.
    """
    turning = freqs_cos.shape[-1]
    head, rest = t[..., :turning], t[..., turning:]
    first, second = head.chunk(2, dim=-1)
    turned = head * freqs_cos + torch.cat((-second, first), dim=-1) * freqs_sin
    return torch.cat((turned, rest), dim=-1)


def _facing(angles: torch.Tensor, positions: int, dim: int) -> torch.Tensor:
    """Turn `angles` to have positions in dimension `dim`: upstream takes them the other way too."""
    if angles.shape[dim] != positions:
        angles = angles.transpose(0, 1)
    if angles.shape[dim] != positions:
        raise ValueError(
            f"rotary_pos_emb: {tuple(angles.shape)} has not the {positions} positions of the whole "
            "sequence"
        )
    return angles


# Who gets which heads


class HeadPlan(NamedTuple):
    """Query heads, and key heads, of each rank, and the key heads in the order in which they leave,
    some of them repeated (None: as they are).
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    key_order: tuple[int, ...] | None


def plan_heads(query: int, key: int, ranks: int) -> HeadPlan:
    """Deal heads so that each rank's query heads find theirs among its key heads, with one ratio on
    the rank: query head i belongs to key head i // (query / key). ValueError for more ranks than
    query heads, or key heads that do not divide the query heads.
    """
    _check_heads(query, ranks)
    if key < 1 or query % key:
        raise ValueError(
            f"{query} query heads cannot share {key} key heads evenly: give a number of key heads "
            f"that divides {query}"
        )
    ratio = query // key
    if key >= ranks:
        keys = shares(key, ranks)
        return HeadPlan(tuple(count * ratio for count in keys), keys, None)
    queries = shares(query, ranks)
    if ranks % key == 0 and query % ranks == 0:
        # All query heads of a rank belong to one key head: it alone goes to ranks that need it.
        return HeadPlan(queries, (1,) * ranks, tuple(rank * key // ranks for rank in range(ranks)))
    # The border between two ranks lies inside a group: one key head per query head has no borders.
    return HeadPlan(queries, queries, tuple(head // ratio for head in range(query)))


class DistributedAttention(nn.Module):
    """Attention on whole sequences whose positions are split evenly over the ranks of a group.

    `local_attention(query, key, value, *args, **kwargs)` sees all positions of this rank's heads,
    [s, b, heads, d] or in the caller's layout, and returns the context in the same; heads and
    features may be one dimension. Query, key and value travel in one all-to-all, the result in
    another, on `sp_stream` if it is given. Heads (dimension `scatter_idx`) need not divide evenly,
    and there may be fewer key heads than query heads and than ranks.
    """

    def __init__(
        self,
        local_attention: nn.Module,
        sequence_process_group: dist.Group,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Stream | None = None,
    ) -> None:
        super().__init__()
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx = scatter_idx
        self.gather_idx = gather_idx
        self.sp_stream = sp_stream
        self._orders: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}

    def layer_sync(self, layer: object) -> None:
        """Wait for `layer.done_event`, which a layer with a stream of its own leaves."""
        event = getattr(layer, "done_event", None)
        if event is not None:
            get_accelerator().current_stream().wait_event(event)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        *args: object,
        **kwargs: object,
    ) -> torch.Tensor:
        """Attend over the whole sequence; returns the context at this rank's positions.

        `query` is [s / P, b, h, d] or [b, s / P, h, d], or of any layout that the constructor's
        dimensions describe, `key` and `value` have as many heads or a divisor of them.
        `rotary_pos_emb` are cosines and sines for query and key at all s positions, [s, 1, 1, r] or
        [1, s, 1, r].
        """
        _check_dims(query, self.scatter_idx, self.gather_idx, batch_dim_idx)
        world = dist.get_world_size(self.spg)
        plan = plan_heads(query.shape[self.scatter_idx], key.shape[self.scatter_idx], world)
        query, key, value = self._to_heads(query, key, value, plan)
        if rotary_pos_emb is not None:
            length = query.shape[self.gather_idx]
            cos, sin = (_facing(angles, length, self.gather_idx) for angles in rotary_pos_emb)
            query, key = apply_rotary_pos_emb(query, cos, sin), apply_rotary_pos_emb(key, cos, sin)
        context = self.local_attn(query, key, value, *args, **kwargs)
        return self._to_positions(context, plan)

    def _order(self, heads: tuple[int, ...], device: torch.device) -> torch.Tensor:
        # Made once: the host waits while numbers of its own are copied to a device.
        if (heads, device) not in self._orders:
            self._orders[heads, device] = torch.tensor(heads, device=device)
        return self._orders[heads, device]

    def _to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: HeadPlan
    ) -> tuple[torch.Tensor, ...]:
        if plan.key_order is not None:
            # Differentiable: gradients of a repeated head add up.
            order = self._order(plan.key_order, key.device)
            key, value = (
                key.index_select(self.scatter_idx, order),
                value.index_select(self.scatter_idx, order),
            )
        positions = (query.shape[self.gather_idx],) * len(plan.query)
        query_cut, key_cut = (
            Cut(self.scatter_idx, self.gather_idx, heads, positions)
            for heads in (plan.query, plan.key)
        )
        tensors, cuts = (query, key, value), (query_cut, key_cut, key_cut)
        if query.dtype == key.dtype == value.dtype:
            return Exchange.apply(self.spg, cuts, self.sp_stream, *tensors)
        # One buffer has one dtype.
        return tuple(
            Exchange.apply(self.spg, (cut,), self.sp_stream, t)[0]
            for t, cut in zip(tensors, cuts, strict=True)
        )

    def _to_positions(self, context: torch.Tensor, plan: HeadPlan) -> torch.Tensor:
        rank, ranks = dist.get_rank(self.spg), len(plan.query)
        # Heads, or heads and features in one dimension.
        width, uneven = divmod(context.shape[self.scatter_idx], plan.query[rank])
        if uneven or context.shape[self.gather_idx] % ranks:
            raise ValueError(
                f"the local attention returned {tuple(context.shape)}; expected {plan.query[rank]} "
                f"heads (times features) in dimension {self.scatter_idx} and a multiple of {ranks} "
                f"positions in dimension {self.gather_idx}"
            )
        positions = (context.shape[self.gather_idx] // ranks,) * ranks
        widths = tuple(heads * width for heads in plan.query)
        cut = Cut(self.gather_idx, self.scatter_idx, positions, widths)
        (result,) = Exchange.apply(self.spg, (cut,), self.sp_stream, context)
        return result
