"""Experts of all ranks for export: every one once, numbered over all ranks, on the first rank.

A rank's model numbers the experts that it holds; the ranks of the first one's expert group hold all
of them. They are sent one tensor at a time, so no rank holds more than one that is not its own.
Checkpoints need none of it: there every rank writes what it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint.experts import expert_number, expert_prefix, renumbered
from deepspeed.runtime.checkpointing.model_files import ModelExperts


def names_of_all(experts: ModelExperts, name: str) -> list[str]:
    """What an entry of this rank's state dict stands for: with experts the same one of each rank of
    its expert group, in their order and numbered over all of them; of what all hold alike the entry
    itself.
    """
    prefix = expert_prefix(name)
    if prefix is None or prefix not in experts.layers:
        return [name]
    held, shares = experts.layers[prefix].num_local_experts, range(experts.group_sizes[prefix])
    return [renumbered(name, {prefix: share * held}) for share in shares]


def values_of_all(experts: ModelExperts, name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Each of `names_of_all` with its value, which is there until the next is asked for. All ranks
    go through all of them, with an entry of the same name and shape; those that are in no group
    with the first rank get their own value alone.
    """
    names, prefix = names_of_all(experts, name), expert_prefix(name)
    if len(names) == 1 or prefix is None:
        yield names[0], value
        return
    layer = experts.layers[prefix]
    axis = layer.parallel_map.experts(layer.expert_group_name).expert
    if 0 not in axis.ranks:
        yield names[axis.rank], value
        return
    for share, other in enumerate(names):
        is_own, source = share == axis.rank, dist.get_global_rank(axis.group, share)
        if isinstance(value, torch.Tensor):
            sent = value.detach().contiguous()
            if not is_own:
                sent = torch.empty_like(sent)
            dist.broadcast(sent, src=source, group=axis.group)
            yield other, sent
        else:
            told = [value if is_own else None]
            dist.broadcast_object_list(told, src=source, group=axis.group)
            yield other, told[0]


def in_order(names: Iterable[str]) -> list[str]:
    """The names as a model has them that holds all experts: those of a layer expert by expert."""
    listed, place = list(names), dict[str, int]()
    for name in listed:
        place.setdefault(expert_prefix(name) or name, len(place))

    def key(name: str) -> tuple[int, int]:
        return place[expert_prefix(name) or name], expert_number(name) or 0

    return sorted(listed, key=key)


def state_of_all(experts: ModelExperts, state: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """A state dict with the experts of all ranks, whose tensors are in host memory; empty on ranks
    that don't `keep` it. All ranks call it, with the same names. Entries that share their memory
    share it there too.
    """
    found: dict[str, Any] = {}
    first: dict[Any, list[str]] = {}
    for name, value in state.items():
        names = names_of_all(experts, name)
        if len(names) == 1:
            found[name] = value
            continue
        earlier = first.setdefault(_memory(name, value), names)
        if earlier is not names:
            found |= {
                other: found[same] for other, same in zip(names, earlier, strict=True) if keep
            }
            continue
        for other, whole in values_of_all(experts, name, value):
            if keep:
                is_tensor = isinstance(whole, torch.Tensor)
                found[other] = whole.detach().to("cpu", copy=True) if is_tensor else whole
    return {name: found[name] for name in in_order(found)} if keep else {}


def _memory(name: str, value: Any) -> Any:
    """What two entries have in common that are one tensor."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return name
    return value.data_ptr(), value.dtype, value.shape, value.stride()
