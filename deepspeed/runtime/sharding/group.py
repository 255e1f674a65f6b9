"""One parameter group's tensors: the flat model-precision buffer, the owned master shard and its
gradient.

Owns the storage of the parameters (they become views of `flat`). Remembers which ranks share the
group, and calls no collective.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sharding.flattening import flatten, make_master, write_master
from deepspeed.runtime.sharding.fragments import Fragment, FragmentTable, NumEl, ShardRank


def expert_group_of(param: torch.Tensor) -> str | None:
    """The group name of an expert, whose replicas are the expert-data-parallel ranks; None for a
    dense parameter.
    """
    return None if getattr(param, "allreduce", True) else param.group_name  # type: ignore[attr-defined]  # deepspeed.moe sets it


def expert_group_of_all(params: Iterable[torch.Tensor]) -> str | None:
    """`expert_group_of` of one optimizer group's parameters, which share buffers and so must agree.

    Raises:
        ValueError: If they don't.
    """
    names = {expert_group_of(param) for param in params}
    if len(names) > 1:
        found = ", ".join(
            sorted("dense parameters" if name is None else f"experts of {name!r}" for name in names)
        )
        raise ValueError(
            f"one optimizer group holds {found}, whose gradients are reduced over different ranks: "
            "make the groups with "
            "deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer"
        )
    return next(iter(names), None)


class ShardedGroup:
    """Parameters of one optimizer group, laid out flat, with the shard this rank owns.

    Args:
        params: Trainable parameters, in the order in which files have them; their `.data` is moved
            into the flat buffer.
        table: Layout of `params`.
        file_table: Their layout in checkpoint files; None: the same.
        shard: Which shard this rank owns.
        master_dtype: Dtype of the master shard.
        grad_dtype: Dtype in which the owned gradient is accumulated.
        device: Device of master and gradient (the model's own, or the host when offloaded).
        model_device: Device of the parameters, which a group without any cannot be asked for; None
            is `device`.
        pin: Whether host buffers are page-locked, so that copies can be asynchronous.
        offload: Keep master and gradient apart from the model's buffer, on `device`, the host.
        process_group: Ranks that own the shards; None if this rank owns everything.
        replicas: Ranks that hold the same parameters, over which their gradients are averaged; None
            is the world.

    Attributes:
        num_shards: How many owners there are.
        shard_rank: Which of them this rank is.
        flat: Model-dtype buffer of all parameters and padding, shape `[padded_numel]`.
        master: fp32 shard that the optimizer updates, shape `[shard_numel]`. It *is* this rank's
            part of `flat` (`aliased`) when the model trains in the master dtype on the same device
            and the shard is one piece of `flat`, so that no second copy exists and nothing needs to
            be written back.
        grad: Reduced gradient of the shard, shape `[shard_numel]`.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        table: FragmentTable,
        shard: ShardRank,
        *,
        file_table: FragmentTable | None = None,
        master_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        device: torch.device,
        model_device: torch.device | None = None,
        pin: bool = False,
        offload: bool = False,
        process_group: dist.Group = None,
        replicas: Any = None,
    ) -> None:
        self.params = list(params)
        self.table = table
        self.file_table = file_table or table
        self.num_shards = table.num_shards
        self.shard_rank = shard
        self.process_group = process_group
        self.replicas = replicas
        self.offload = offload
        self.pin = pin and offload
        self.grad_dtype = grad_dtype
        self.device = device
        self.flat = self._flatten(model_device or device, master_dtype)
        self.aliased = (
            self._shares_memory(offload) and self.flat.dtype == master_dtype and self.is_one_piece
        )
        self.master = self._make_master(master_dtype)
        self.masters = [nn.Parameter(self.master, requires_grad=True)]  # what the optimizer updates
        self._grad: torch.Tensor | None = None

    def _flatten(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        if not self.params:
            return torch.zeros(self.table.padded_numel, dtype=dtype, device=device)
        return flatten(self.params, self.table.offsets, self.table.padded_numel)

    def _shares_memory(self, offload: bool) -> bool:
        """Whether masters may lie in `flat`: what is offloaded is kept apart."""
        return not offload

    @property
    def is_one_piece(self) -> bool:
        """Whether this rank's shard is one piece of `flat`."""
        return len(self.table.sections) < 2

    def _make_master(self, dtype: torch.dtype) -> torch.Tensor:
        if self.is_one_piece:
            part = self.only_part(self.flat)
            if self.aliased:
                return part
            return self.host_or_device(make_master(part, self.device, dtype))
        numel = self.table.shard_numel
        master = self.host_or_device(torch.empty(numel, dtype=dtype, device=self.device))
        self._write_master(master)
        return master

    def _write_master(self, master: torch.Tensor) -> None:
        for section, part in zip(self.table.sections, self.own_parts(self.flat), strict=True):
            end = section.shard_start + section.part_numel
            write_master(master[section.shard_start : end], part)

    def host_or_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, page-locked if this group's buffers are."""
        return get_accelerator().pin_memory(tensor) if self.pin else tensor

    @property
    def grad(self) -> torch.Tensor:
        """The owned gradient; allocated and zeroed at first use, so that a group that only
        evaluates costs nothing.
        """
        if self._grad is None:
            zeros = torch.zeros(self.table.shard_numel, dtype=self.grad_dtype, device=self.device)
            self._grad = self.host_or_device(zeros)
        return self._grad

    @property
    def has_grad(self) -> bool:
        """Whether the owned gradient has been allocated."""
        return self._grad is not None

    def drop_grad(self) -> None:
        """Let go of the owned gradient, which nobody needs any more."""
        self._grad = None

    def use_grad(self, grad: torch.Tensor) -> None:
        """Let the owned gradient be `grad`, a buffer that lives elsewhere (a part of a full
        accumulator).
        """
        self._grad = grad

    def grad_for_step(self) -> torch.Tensor:
        """The owned gradient in the master's dtype, as the optimizer wants it."""
        return (
            self.grad if self.grad.dtype == self.master.dtype else self.grad.to(self.master.dtype)
        )

    def param_view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """The part of a flat, padded buffer that holds parameter `index`, in its shape."""
        start = self.table.offsets[index]
        return flat[start : start + self.table.numels[index]].view(self.params[index].shape)

    def param_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """`param_view` of every parameter."""
        return [self.param_view(flat, index) for index in range(len(self.params))]

    def owned(self, index: int) -> Fragment | None:
        """The fragment of parameter `index` that this rank owns, if there is one."""
        return self.table.owned(index, self.shard_rank)

    def own(self, start: NumEl, end: NumEl) -> torch.Tensor:
        """The part of `flat` that is elements `start` to `end` of this rank's shard, of which one
        section has all.
        """
        sections = self.table.sections
        after = bisect_right(sections, start, key=lambda section: section.shard_start)
        section = sections[after - 1]
        first = section.part_start(self.shard_rank) + start - section.shard_start
        return self.flat[first : first + end - start]

    def own_parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a flat, padded buffer that are this rank's shard, in its order."""
        starts = [
            (section.part_start(self.shard_rank), section.part_numel)
            for section in self.table.sections
        ]
        return [flat[start : start + numel] for start, numel in starts]

    def only_part(self, flat: torch.Tensor) -> torch.Tensor:
        """The part of a flat, padded buffer that is this rank's shard, where that is one piece."""
        parts = self.own_parts(flat)
        assert len(parts) < 2, f"the shard is {len(parts)} parts of the flat buffer"
        return parts[0] if parts else flat[:0]

    def named_memory(self, index: int, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Names of the buffers, for `deepspeed.utils.memory_names`: first by parameter, then
        (padding) by buffer.

        Args:
            index: Which group this is.
            names: Name of each parameter.
        """
        buffers = (
            [("flat parameters", self.flat)]
            if self.aliased
            else [("flat parameters", self.flat), ("master shard", self.master)]
        )
        if self._grad is not None:
            buffers.append(("gradient shard", self._grad))
        for what, buffer in buffers:
            label = f"{what} of group {index}"
            yield from (
                (f"{label} ({names[param]})", buffer[start : start + numel])
                for param, start, numel in self._pieces_of(buffer)
            )
            yield f"{label} (padding)", buffer

    def _pieces_of(self, buffer: torch.Tensor) -> list[tuple[int, int, int]]:
        """Parameter, start and size of what lies in `flat`, or in a buffer like `shard`."""
        if buffer is self.flat:
            return [
                (param, start, self.table.numels[param])
                for param, start in enumerate(self.table.offsets)
            ]
        return [
            (part.param, part.shard_start, part.numel)
            for part in self.table.of_shard(self.shard_rank)
        ]

    @torch.no_grad()
    def refresh_master(self) -> None:
        """Master shard <- model-precision shard (after weights were loaded or edited)."""
        if not self.aliased:
            self._write_master(self.master)

    def release(self) -> None:
        """Give the parameters storage of their own again, so that the model outlives the
        optimizer.
        """
        with torch.no_grad():
            for param in self.params:
                param.data = param.data.clone()
                param.grad = None
        self._grad = None
