"""`engine.state_digest`: one hash over what training has made, whoever holds it.

Of every parameter its master (or itself, where it is trained without one) and each tensor of its
optimizer state, in the order of names; of every element its bits and its number in the parameter.
Elements are mixed one by one and added modulo 2^64, so that it cannot be seen how they are cut,
where they lie, or in which order they come; the sums are then hashed by SHA-256. Each changed
element changes its sum; that two changes cancel has a chance of 2^-64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.runtime.optimizers.master_weights import MasterWeights
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.runtime.sharding.parameter_histories import of_parameter

# Odd, with bits everywhere (the finalizer of MurmurHash3 and the golden ratio), as int64.
_FIRST, _SECOND, _NUMBER = -0x00AE502812AA7333, -0x3B314601E57A13AD, -0x61C8864680B583EB
AT_ONCE = 1 << 16  # elements: what is made of them stays in a host's cache
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StepDigests(NamedTuple):
    """What a step with digests has come to.

    Attributes:
        by_name: Digests by parameter.
        loss: Mean over micro-batches of all ranks; None of none, and of pipelines, which tell it
            after the step.
        losses: Of how many; 0 where a caller had divided them, which rounds otherwise on other
            numbers of ranks.
    """

    by_name: dict[str, str]
    loss: torch.Tensor | None
    losses: int


class Piece(NamedTuple):
    """Elements of one tensor of a parameter's state, from number `start`."""

    param: str
    key: str
    start: int
    values: torch.Tensor


def _mixed(values: torch.Tensor, start: int) -> torch.Tensor:
    """Sum one 64-bit number per element, from its bits and its place: int64, shape `[]`."""
    bits = values.view(_BITS[values.element_size()]).to(torch.int64)
    places = torch.arange(start + 1, start + 1 + bits.numel(), device=bits.device)
    mixed = bits ^ (places * _NUMBER)
    for factor in (_FIRST, _SECOND):
        # Shifts keep the sign: bits that come in are as good as zeros.
        mixed ^= mixed >> 33
        mixed *= factor
    return (mixed ^ (mixed >> 33)).sum()


def hash_of(values: torch.Tensor, start: int) -> int:
    """The same of any number of elements."""
    flat = values.detach().reshape(-1)
    parts = [
        _mixed(flat[first : first + AT_ONCE], start + first)
        for first in range(0, flat.numel(), AT_ONCE)
    ]
    return int(torch.stack(parts).sum()) if parts else 0


def pieces(sequence: StepSequence, names: Mapping[nn.Parameter, str]) -> Iterator[Piece]:
    """Yield what this rank holds of masters and optimizer state of the parameters in `names`."""
    masters = sequence.masters
    if not isinstance(masters, MasterWeights) or masters.per_param:
        for one in masters.own_tensors():
            whole, param = slice(0, one.tensor.numel()), one.runs[0].param
            if param not in names:
                continue
            name, state = names[param], sequence.state.get(one.tensor, {})
            yield Piece(name, "master", 0, one.tensor.reshape(-1))
            yield from _state(name, 0, state, whole)
        return
    for group in masters.groups:
        master: torch.Tensor = group.masters[0]
        state = sequence.state.get(master, {})
        for part in group.table.of_shard(group.shard_rank):
            param, own = group.params[part.param], part.in_shard
            if param not in names:
                continue
            name = names[param]
            yield Piece(name, "master", part.param_start, master[own])
            of_param = of_parameter(state, name, master)
            yield from _state(name, part.param_start, of_param, own)
    if masters.owner_steps is not None:
        for tensor, number, index, _ in masters.owner_steps.owned():
            param, whole = masters.groups[number].params[index], slice(0, tensor.numel())
            if param not in names:
                continue
            yield from _state(names[param], 0, masters.owner_steps.inner.state[tensor], whole)


def _state(name: str, start: int, state: Mapping[str, Any], own: slice) -> Iterator[Piece]:
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim():
            yield Piece(name, key, start, value.reshape(-1)[own])
        elif start == 0:  # one for the whole parameter: some optimizers count in tensors
            yield Piece(name, key, 0, torch.tensor([float(value)], dtype=torch.float64))


def digests_by_name(sequence: StepSequence, names: Mapping[nn.Parameter, str]) -> dict[str, str]:
    """Hash the state of each parameter over all ranks, which call it together; `names` are of what
    this one tells: nothing, if another one holds the same and does.
    """
    sums: dict[tuple[str, str], int] = {}
    for piece in pieces(sequence, names):
        at = (piece.param, piece.key)
        sums[at] = sums.get(at, 0) + hash_of(piece.values, piece.start)
    told: list[dict[tuple[str, str], int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(told, sums)
    total: dict[str, dict[str, int]] = {}
    for each in told:
        for (param, key), value in each.items():
            keys = total.setdefault(param, {})
            keys[key] = (keys.get(key, 0) + value) % 2**64
    return {param: _hexed(repr(sorted(total[param].items()))) for param in sorted(total)}


def digest_of_all(by_name: Mapping[str, str]) -> str:
    """One digest of those of all parameters."""
    return _hexed(repr(sorted(by_name.items())))


def _hexed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
