"""Shards of parameters: where they live, and what scripts and state dicts have of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.state_files import StateFiles, place_in_file
from deepspeed.runtime.zero.parameters.guarded_writes import is_write, written_by
from deepspeed.utils.logging import warn_once


class ShardMemory(NamedTuple):
    """Where shards live between uses: on the device, or the host (`offload_param`), page-locked, or
    in files.
    """

    on_host: bool = False
    pinned: bool = False
    files: StateFiles | None = None

    @torch.no_grad()
    def place(self, shard: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Bring a 1-D shard here; `device` is that of whole parameters."""
        accelerator = get_accelerator()
        is_in_file = place_in_file(shard) is not None
        if self.files is not None:
            made = shard if is_in_file else self.files.zeros(shard.numel(), shard.dtype, True)
            return made if is_in_file else made.copy_(shard)
        if accelerator.is_synchronized_device():
            return shard.to(device, copy=is_in_file)
        if not self.on_host:
            if accelerator.on_accelerator(shard):
                return shard.to(device)
            moved = torch.empty(shard.shape, dtype=shard.dtype, device=device)
            return moved.copy_(shard)
        is_loose = self.pinned and not accelerator.is_pinned(shard)
        if not is_loose and not is_in_file and not accelerator.on_accelerator(shard):
            return shard
        return accelerator.host_empty(shard.numel(), shard.dtype, self.pinned).copy_(shard)


ON_DEVICE = ShardMemory()


class OwnShard(torch.Tensor):
    """`ds_tensor` as scripts get it: an alias of a shard. Gathers and masters would not know that a
    script has let it be somewhere else, so `shard.data = values` writes the values instead. What is
    computed with it is an ordinary tensor, and so is what is copied or saved.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way, as of nn.Parameter
    _replace: Callable[[torch.Tensor], None]

    @classmethod
    def of(cls, shard: torch.Tensor, replace: Callable[[torch.Tensor], None]) -> OwnShard:
        """Make the alias; `replace` is called with what it is to hold."""
        alias: OwnShard = shard.detach().as_subclass(cls)
        alias._replace = replace
        return alias

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self._replace(values)

    def set_(self, values: Any, *place: object) -> OwnShard:
        self._replace(values)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return self.detach().__reduce_ex__(protocol)


def tell_saved() -> None:
    """Warn once that a sharded parameter is being saved."""
    warn_once(
        "saving parameters that are sharded (ZeRO stage 3): what is written has shape (0,) and no "
        "weights. Save whole ones by engine.save_16bit_model(folder), take them from "
        "engine._zero3_consolidated_16bit_state_dict(), or call state_dict() inside `with "
        "deepspeed.zero.GatheredParameters(list(module.parameters()))`, on all ranks; zero_to_fp32 "
        "makes them of what engine.save_checkpoint(folder) has saved"
    )


# They answer with a number or a truth, which of no elements would be that of nothing.
_COMPARISONS = frozenset(("equal", "allclose"))


class ShardedValue(torch.Tensor):
    """`.data` and `.detach()` of a sharded parameter, which have no elements: writing to them, or
    comparing them, is an error that names the parameter. To ask for a state dict is no mistake, and
    clients do it who save otherwise; to save it, or a copy, is, and is told.
    """

    _refuse: Callable[[str], str] | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        name = getattr(func, "__name__", "")
        asked: Iterable[Any] = ()
        if is_write(name):
            asked = written_by(args, kwargs or {})
        elif name in _COMPARISONS:
            asked = (*args, *(kwargs or {}).values())
        for target in asked:
            refuse = getattr(target, "_refuse", None)
            if refuse is not None and not target.numel():
                raise RuntimeError(refuse(name))
        return super().__torch_function__(func, types, args, kwargs or {})

    def set_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Be a write too: torch does not ask `__torch_function__` for this one."""
        if self._refuse is not None and not self.numel():
            raise TypeError(self._refuse("set_"))
        return super().set_(*args, **kwargs)

    def data_ptr(self) -> int:
        """Say so where safetensors asks for the memory, and saves."""
        tell_saved()
        return super().data_ptr()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        if not self.numel():  # a sum over it has one
            tell_saved()
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy it; torch's way asks for the memory."""
        return self.clone()
