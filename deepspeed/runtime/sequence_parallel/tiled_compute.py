"""Functions of single positions, computed tile by tile along the sequence: activations of one tile
are held at a time. Tiles are computed again inside of the one backward, so that a parameter's
gradients of all tiles are added up by autograd, and its hook, on which reductions hang, fires once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from deepspeed.runtime.activation_checkpointing.checkpointing import recomputed
from deepspeed.sequence.cross_entropy import IGNORE_INDEX
from deepspeed.sequence.layer import shares

REDUCTIONS = ("mean", "sum")


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, torch.Tensor | None],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str | None,
    compute_params: Iterable[torch.nn.Parameter] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """Compute `fn(**kwargs_to_shard, **kwargs_to_pass)`, one of `shards` tiles after the other.

    `fn`'s result at a position depends on that position's inputs alone: a tensor with the tile's
    positions in dimension `output_unshard_dimension`, which are joined, or a scalar, of which
    `output_reduction` takes the "mean", weighted with each tile's positions, or the "sum".
    `kwargs_to_shard` are tensors [b, seqlen, ...] or None. Every tensor that requires a gradient
    gets it, also beside `grad_requiring_tensor_key`, and `compute_params` need not be given.
    ValueError for tensors without `seqlen` positions, more tiles than positions, an unknown key or
    reduction.
    """
    _check_params(compute_params)
    if grad_requiring_tensor_key is not None and grad_requiring_tensor_key not in kwargs_to_shard:
        raise ValueError(
            f"grad_requiring_tensor_key {grad_requiring_tensor_key!r} is not in kwargs_to_shard "
            f"({sorted(kwargs_to_shard)}): name the tensor there that the function differentiates"
        )
    for key, tensor in kwargs_to_shard.items():
        if tensor is not None and (tensor.dim() < 2 or tensor.shape[1] != seqlen):
            raise ValueError(
                f"kwargs_to_shard[{key!r}] of shape {tuple(tensor.shape)} has not {seqlen} "
                "positions in dimension 1: give seqlen as it is there, or pass what has no "
                "positions in kwargs_to_pass"
            )
    sizes = _sizes(seqlen, shards)
    pieces = {
        key: (None,) * shards if tensor is None else tensor.split(sizes, dim=1)
        for key, tensor in kwargs_to_shard.items()
    }
    results = [
        recomputed(fn, **{key: piece[tile] for key, piece in pieces.items()}, **kwargs_to_pass)
        for tile in range(shards)
    ]
    if results[0].dim():
        return torch.cat(results, dim=output_unshard_dimension)
    return _reduced(results, sizes, output_reduction)


class SequenceTiledCompute:
    """`sequence_tiled_compute` as upstream's autograd function is called."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str | None,
        compute_params: Iterable[torch.nn.Parameter] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> torch.Tensor:
        """Call `sequence_tiled_compute`; `args` are the values of both lists of keys, in order."""
        if len(args) != len(keys_to_shard) + len(keys_to_pass):
            raise ValueError(
                f"{len(args)} values for {len(keys_to_shard)} keys_to_shard and "
                f"{len(keys_to_pass)} keys_to_pass: give one value for each key"
            )
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            dict(zip(keys_to_shard, args[: len(keys_to_shard)], strict=True)),
            dict(zip(keys_to_pass, args[len(keys_to_shard) :], strict=True)),
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


class TiledMLP:
    """A feed-forward layer in tiles; to be put in place of its `forward`."""

    @staticmethod
    def apply(
        fn: Callable[[Any, torch.Tensor], torch.Tensor],
        self: Any,
        x: torch.Tensor,
        shards: int,
        compute_params: Iterable[torch.nn.Parameter] | None = None,
    ) -> torch.Tensor:
        """Compute `fn(self, x)`, a layer that treats positions of x [..., s, h] alone, in tiles."""
        _check_params(compute_params)
        if x.dim() < 2:
            raise ValueError(f"TiledMLP: x of shape {tuple(x.shape)} is not [..., positions, h]")
        pieces = x.split(_sizes(x.shape[-2], shards), dim=-2)
        return torch.cat([recomputed(fn, self, piece) for piece in pieces], dim=-2)


class TiledFusedLogitsLoss:
    """A head and its loss in tiles: the logits of one tile exist at a time."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        self: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Iterable[torch.nn.Parameter] | None = None,
        output_reduction: str = "mean",
    ) -> torch.Tensor:
        """Compute the loss that `fn(self, x, y)`, or `fn(self, x, y, mask)`, gives for all
        positions of x [b, s, h], with targets y [b, s], `IGNORE_INDEX` where nothing is learned; a
        scalar, of "mean" fp32.

        `fn` gets one tile's positions, [n, h], [n] and [n], and returns a scalar, by
        `output_reduction` the "sum" over its positions or the "mean" over those that count. These
        are weighted by `mask`; without one, those whose target is not `IGNORE_INDEX`, however they
        are spread over tiles.
        """
        _check_params(compute_params)
        if y.dim() < 2 or x.shape[:2] != y.shape[:2] or mask is not None and mask.shape != y.shape:
            raise ValueError(
                f"TiledFusedLogitsLoss: x of {tuple(x.shape)}, y of {tuple(y.shape)} and mask of "
                f"{None if mask is None else tuple(mask.shape)} must be [b, s, h], [b, s] and "
                "[b, s] or None"
            )
        sizes = _sizes(y.shape[0] * y.shape[1], shards)
        columns = [tensor.flatten(0, 1) for tensor in (x, y, mask) if tensor is not None]
        tiles = list(zip(*(column.split(sizes) for column in columns), strict=True))
        results = [recomputed(fn, self, *tile) for tile in tiles]
        counting = y != IGNORE_INDEX if mask is None else mask
        weights = [part.sum(dtype=torch.float32) for part in counting.flatten(0, 1).split(sizes)]
        return _reduced(results, weights, output_reduction)


class TiledLoss:
    """A loss of logits that stand already, whose fp32 copies exist for a tile at a time."""

    @staticmethod
    def apply(
        loss_fn: Callable[..., torch.Tensor],
        logits: torch.Tensor,
        vocab_size: int,
        shift_labels: torch.Tensor,
        shards: int,
    ) -> torch.Tensor:
        """Compute the mean, in fp32, over all positions that count of logits [b, s, v].
        `loss_fn(logits=, labels=None, vocab_size=, shift_labels=)`, as transformers', returns a
        tile's mean over the positions whose label in `shift_labels` [b, s] is not `IGNORE_INDEX`.
        """
        if shift_labels.dim() != 2 or logits.shape[:2] != shift_labels.shape:
            raise ValueError(
                f"TiledLoss: logits of {tuple(logits.shape)} and shift_labels of "
                f"{tuple(shift_labels.shape)} must be [b, s, v] and [b, s]"
            )
        sizes = _sizes(shift_labels.shape[1], shards)
        targets = shift_labels.split(sizes, dim=1)

        def of_tile(tile: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            # Losses take views of them.
            here = {"logits": tile.contiguous(), "shift_labels": target.contiguous()}
            return loss_fn(labels=None, vocab_size=vocab_size, **here)

        tiles = zip(logits.split(sizes, dim=1), targets, strict=True)
        results = [recomputed(of_tile, tile, target) for tile, target in tiles]
        counting = [(target != IGNORE_INDEX).sum(dtype=torch.float32) for target in targets]
        return _reduced(results, counting, "mean")


class AutogradComputeMLP:
    """A feed-forward layer that is computed again in backward: one tile."""

    @staticmethod
    def apply(
        fn: Callable[[Any, torch.Tensor], torch.Tensor], self: Any, x: torch.Tensor
    ) -> torch.Tensor:
        """Compute `fn(self, x)`, keeping nothing of it for backward but `x`."""
        result: torch.Tensor = recomputed(fn, self, x)
        return result


def _sizes(positions: int, shards: int) -> list[int]:
    """Deal positions to as many tiles as are asked for, on every rank: under stage 3 ranks that
    entered a layer a different number of times would wait for each other.
    """
    if not 1 <= shards <= positions:
        raise ValueError(
            f"{positions} positions cannot be cut into {shards} tiles: choose shards from 1 to "
            f"{positions}"
        )
    return list(shares(positions, shards))


def _check_params(params: Iterable[torch.nn.Parameter] | None) -> None:
    for param in params or ():
        if not isinstance(param, torch.nn.Parameter):
            raise TypeError(
                f"compute_params holds a {type(param).__name__}: give parameters, or None"
            )


def _reduced(
    results: Sequence[torch.Tensor], weights: Sequence[torch.Tensor | int], reduction: str | None
) -> torch.Tensor:
    """Sum scalars, or take their mean by weight, then in fp32 at least."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"output_reduction {reduction!r}: choose one of {REDUCTIONS}")
    total = torch.zeros_like(results[0])
    if reduction == "sum":
        return sum(results, total)
    total = total.to(torch.promote_types(total.dtype, torch.float32))
    for result, weight in zip(results, weights, strict=True):
        # The mean over nothing is NaN, and a tile may well be all padding.
        if isinstance(weight, torch.Tensor):
            result = result.masked_fill(weight == 0, 0.0)
        total = total + result * weight
    return total / sum(weights)
