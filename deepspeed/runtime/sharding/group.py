"""One parameter group's tensors: the flat buffer, which owns the parameters' storage, the master
shard and its gradient. Calls no collective.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.state_files import place_in_file
from deepspeed.runtime.sharding.flattening import (
    CONVERTED_NUMEL,
    flatten,
    joined,
    lies_on_host,
    write_master,
)
from deepspeed.runtime.sharding.fragments import (
    Fragment,
    FragmentTable,
    NumEl,
    ParameterCutTable,
    ShardRank,
)


def expert_group_of(param: torch.Tensor) -> str | None:
    """The group name of an expert; None for a dense parameter."""
    return None if getattr(param, "allreduce", True) else param.group_name  # type: ignore[attr-defined]  # deepspeed.moe sets it


def expert_group_of_all(params: Iterable[torch.Tensor]) -> str | None:
    """Return `expert_group_of` of an optimizer group's parameters; ValueError unless they agree."""
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
        params: Trainable parameters, in the order of files; their `.data` moves into the flat
            buffer.
        shard: Which shard this rank owns.
        shards: At stage 3 this rank's cut of each parameter, 1-D; copied. No rank has the whole
            group then: `flat` is this rank's shard, on the host with `offload_param`.
        file_table: Their layout in checkpoint files; None: the same.
        grad_dtype: Dtype in which the owned gradient is accumulated.
        device: Device of master and gradient (the model's own, or the host when offloaded).
        model_device: Device of the parameters, of which a group may have none; None is `device`.
        offload: Keep master and gradient apart from the model's buffer, on `device`, the host.
            Nothing is copied from or to them but by way of others' buffers, page-locked with `pin`.
        memory: Makes the master's memory, of zeros, in place of the host's own.
        process_group: Ranks that own the shards; None if this rank owns everything.
        replicas: Ranks over which gradients are averaged; None is the world.

    Attributes:
        flat: Model-dtype buffer of all parameters and padding, shape `[padded_numel]`.
        master: fp32 shard that the optimizer updates, shape `[shard_numel]`. It *is* this rank's
            part of `flat` (`aliased`) when the model trains in the master dtype on the same device
            and the shard is one piece of `flat`: no second copy exists, and nothing is written
            back.
        masters: What the optimizer has as parameters.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        table: FragmentTable,
        shard: ShardRank,
        *,
        shards: Sequence[torch.Tensor] | None = None,
        file_table: FragmentTable | None = None,
        master_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        device: torch.device,
        model_device: torch.device | None = None,
        pin: bool = False,
        offload: bool = False,
        memory: Callable[[int, torch.dtype], torch.Tensor] | None = None,
        process_group: dist.Group = None,
        replicas: dist.Group = None,
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
        self.is_cut = shards is not None  # stage 3: parameters are no views of `flat`
        if not params:
            numel = 0 if self.is_cut else table.padded_numel
            self.flat = torch.zeros(numel, dtype=master_dtype, device=model_device or device)
        elif shards is not None:
            self.flat = joined(shards)
        else:
            self.flat = flatten(self.params, table.offsets, table.padded_numel)
        # Cuts on the host are read by copies under way, masters are written by whoever likes.
        on_host = lies_on_host(self.flat) or place_in_file(self.flat) is not None
        is_apart = offload or (self.is_cut and on_host)
        self.aliased = not is_apart and self.flat.dtype == master_dtype and self.is_one_piece
        self.master = self._make_master(master_dtype, memory)
        self.masters = [nn.Parameter(self.master, requires_grad=True)]
        self._grad: torch.Tensor | None = None

    @property
    def is_one_piece(self) -> bool:
        """Whether this rank's shard is one piece of `flat`."""
        return self.is_cut or len(self.table.sections) < 2

    def _make_master(
        self, dtype: torch.dtype, memory: Callable[[int, torch.dtype], torch.Tensor] | None
    ) -> torch.Tensor:
        if self.aliased:
            return self.only_part(self.flat)
        master = self.empty(dtype) if memory is None else memory(self.table.shard_numel, dtype)
        self._write_master(master)
        return master

    def empty(self, dtype: torch.dtype, pin: bool = False) -> torch.Tensor:
        """Make a buffer like the shard, where master and gradient lie."""
        numel = self.table.shard_numel
        if self.offload:
            return get_accelerator().host_empty(numel, dtype, pin)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def _write_master(self, master: torch.Tensor) -> None:
        start = 0
        for part in self.own_parts(self.flat):
            write_master(master[start : start + part.numel()], part)
            start += part.numel()

    @property
    def grad(self) -> torch.Tensor:
        """Reduced gradient of the shard; made at first use: a group that evaluates needs none."""
        if self._grad is None:
            self._grad = self.empty(self.grad_dtype).zero_()
        return self._grad

    @property
    def has_grad(self) -> bool:
        return self._grad is not None

    def drop_grad(self) -> None:
        self._grad = None

    def use_grad(self, grad: torch.Tensor) -> None:
        """Let the owned gradient be a buffer that lives elsewhere (a part of an accumulator)."""
        self._grad = grad

    def grad_for_step(self) -> torch.Tensor:
        return self.grad.to(self.master.dtype)

    def param_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """View a flat, padded buffer as the parameters, in their shapes."""
        return [
            flat[start : start + numel].view(param.shape)
            for param, start, numel in zip(
                self.params, self.table.offsets, self.table.numels, strict=True
            )
        ]

    def owned(self, index: int) -> Fragment | None:
        return self.table.owned(index, self.shard_rank)

    def own(self, start: NumEl, end: NumEl) -> torch.Tensor:
        """Slice elements `start` to `end` of this rank's shard in `flat`; one section has all."""
        if self.is_cut:
            return self.flat[start:end]
        sections = self.table.sections
        after = bisect_right(sections, start, key=lambda section: section.shard_start)
        section = sections[after - 1]
        first = section.part_start(self.shard_rank) + start - section.shard_start
        return self.flat[first : first + end - start]

    def own_parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Slice a buffer like `flat` where this rank's shard is, in its order."""
        if self.is_cut:
            return [flat]
        starts = [(one.part_start(self.shard_rank), one.part_numel) for one in self.table.sections]
        return [flat[start : start + numel] for start, numel in starts]

    def only_part(self, flat: torch.Tensor) -> torch.Tensor:
        """Slice the same, where it is one piece."""
        parts = self.own_parts(flat)
        assert len(parts) < 2, f"the shard is {len(parts)} parts of the flat buffer"
        return parts[0] if parts else flat[:0]

    def cut_of(self, index: int, buffer: torch.Tensor) -> torch.Tensor:
        """Slice a buffer like the shard where the cut of parameter `index` is (stage 3)."""
        assert isinstance(self.table, ParameterCutTable), "only stage 3 cuts each parameter"
        return buffer[self.table.cut_starts[index] :][: self.table.cuts[index]]

    def named_memory(self, index: int, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Name the buffers of group `index` for reports: by parameter, and (padding) by buffer."""
        buffers = [("flat parameters", self.flat)]
        if not self.aliased:
            buffers.append(("master shard", self.master))
        if self._grad is not None:
            buffers.append(("gradient shard", self._grad))
        for what, buffer in buffers:
            label = f"{what} of group {index}"
            for param, start, numel in self._pieces_of(buffer):
                yield f"{label} ({names[param]})", buffer[start : start + numel]
            yield f"{label} (padding)", buffer

    def _pieces_of(self, buffer: torch.Tensor) -> Iterable[tuple[int, int, int]]:
        """Parameter, start and size of what lies in `flat`, or in a buffer like `shard`."""
        if buffer is self.flat and not self.is_cut:
            return zip(range(len(self.params)), self.table.offsets, self.table.numels, strict=True)
        return [
            (one.param, one.shard_start, one.numel) for one in self.table.of_shard(self.shard_rank)
        ]

    @torch.no_grad()
    def refresh_master(self) -> None:
        """Fill the master shard from the model's (after weights were loaded or edited)."""
        if not self.aliased:
            self._write_master(self.master)

    def differs(self, index: int) -> bool:
        """Return whether the model's parameter `index`, where this rank owns it, is another than
        its master rounded. The host waits for it.
        """
        owned = None if self.aliased else self.owned(index)
        if owned is None:
            return False
        model = self.own(owned.shard_start, owned.in_shard.stop)
        master = self.master[owned.in_shard].to(model.device)
        return not torch.equal(master.to(model.dtype), model)

    @torch.no_grad()
    def follow(self, index: int) -> None:
        """Let the master of parameter `index` be the model's values where it does not round to
        them; elsewhere it keeps what 16 bits cannot hold.
        """
        owned = None if self.aliased else self.owned(index)
        if owned is None:
            return
        for start in range(owned.shard_start, owned.in_shard.stop, CONVERTED_NUMEL):
            end = min(start + CONVERTED_NUMEL, owned.in_shard.stop)
            master = self.master[start:end]
            model = self.own(start, end).to(master.device)
            is_rounded = master.to(model.dtype) == model
            master.copy_(torch.where(is_rounded, master, model.to(master.dtype)))

    @torch.no_grad()
    def release(self) -> None:
        """Give the parameters storage of their own again: the model outlives the optimizer."""
        self._grad = None
        for param in () if self.is_cut else self.params:
            param.data = param.data.clone()
            param.grad = None
