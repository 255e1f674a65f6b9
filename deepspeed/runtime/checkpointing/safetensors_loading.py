"""`load_sharded_safetensors`: weights of a safetensors folder, of which each rank reads what it
keeps.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.experts import renumbered
from deepspeed.checkpoint.files import CheckpointError, together
from deepspeed.checkpoint.safetensors_files import SafetensorsFolder
from deepspeed.comm.initialization import ensure_distributed
from deepspeed.moe.expert_rows import whole_shape
from deepspeed.runtime.checkpointing.model_files import ModelExperts
from deepspeed.runtime.checkpointing.sharded_loading import own_fragment
from deepspeed.runtime.sharding.model_ranks import is_model_parallel_parameter
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.parameters.zero_parameter import is_zero_param, record_of


class LoadedSafetensors(NamedTuple):
    """What `load_sharded_safetensors` did.

    Attributes:
        missing_keys: Names of the model that are not in the files.
        unexpected_keys: Names in the files that are not the model's.
        bytes_read: Read by this rank, headers included.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    bytes_read: int


def load_sharded_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
) -> LoadedSafetensors:
    """Load weights into a model whose parameters ZeRO stage 3 shards, so that the model never
    stands whole on any host. All ranks call it.

    Of each sharded parameter a rank reads the elements that it owns, 16 MiB at a time; buffers and
    parameters that are not sharded are read by all. Names, shapes and sizes of files are compared
    before anything changes.

    Args:
        model: Made under `deepspeed.zero.Init`, or an engine's module, whose masters follow. Of
            tied weights one name is enough.
        path: A file, or a folder with files and their index as Hugging Face's `save_pretrained`
            writes them.
        strict: Names must be the same; False leaves what is missing as it is.
        rename: Name in the files -> name in the model, where experts of `deepspeed.moe` are
            numbered over all ranks.

    Returns:
        Names that differ, and how much this rank has read.

    Raises:
        CheckpointError: On all ranks: a file is missing or damaged, a shape is another, or
            (`strict`) names differ. After an error of a disk in the middle the weights are neither
            the old nor the new ones.
    """
    ensure_distributed(None)
    device = torch.device(get_accelerator().current_device_name())
    what = f"loading {os.fspath(path)}"
    loading: _Loading = together(lambda: _Loading(model, path, strict, rename), device, what)
    for owner in loading.owners:
        owner.before_update()
    together(loading.load, device, what)
    loading.tell()
    for owner in loading.owners:
        owner.after_update()
    return LoadedSafetensors(loading.missing, loading.unexpected, loading.files.bytes_read)


class _Loading:
    """What goes where, compared; and the loading itself. Knows this rank alone."""

    def __init__(
        self,
        model: nn.Module,
        path: str | os.PathLike[str],
        strict: bool,
        rename: Callable[[str], str] | None,
    ) -> None:
        self.files = SafetensorsFolder(path)
        sources = {(rename(name) if rename else name): name for name in self.files.tensors}
        if len(sources) != len(self.files.tensors):
            raise CheckpointError("rename gives several tensors of the files one name")
        experts = ModelExperts(model)
        # Files number all experts, a model those of its own rank.
        state = {
            renumbered(name, experts.first): value
            for name, value in model.state_dict(keep_vars=True).items()
            if isinstance(value, torch.Tensor)
        }
        self.targets: dict[torch.Tensor, str] = {}
        for name, tensor in state.items():
            if name in sources and tensor not in self.targets:
                self._check(name, tensor, sources[name])
                self.targets[tensor] = sources[name]
        self.missing = [
            name for name, tensor in state.items() if name not in sources and not self._has(tensor)
        ]
        self.unexpected = [
            source
            for name, source in sources.items()
            if name not in state and not experts.are_elsewhere(name)
        ]
        if strict and (self.missing or self.unexpected):
            raise CheckpointError(
                f"the files are of another model: {_told(self.missing)} missing from them, "
                f"{_told(self.unexpected)} not in the model. Give rename, or strict=False"
            )
        units = [record_of(param).unit for param in self.targets if is_zero_param(param)]
        found = dict.fromkeys(unit.resources.owner for unit in units if unit is not None)
        self.owners: list[DeepSpeedZeRoOffload] = [owner for owner in found if owner is not None]

    def _has(self, tensor: torch.Tensor) -> bool:
        return tensor in self.targets

    def _check(self, name: str, tensor: torch.Tensor, source: str) -> None:
        saved = self.files.tensors[source]
        if is_model_parallel_parameter(tensor):
            raise CheckpointError(
                f"{name} is a slice of a layer that tensor-parallel ranks share: load before the "
                "layers are cut (by deepspeed.tp_model_init or deepspeed.initialize)"
            )
        shape = whole_shape(tensor) if is_zero_param(tensor) else tensor.shape
        if saved.shape != shape:
            raise CheckpointError(
                f"{name} has shape {tuple(saved.shape)} in {saved.path}, in this model "
                f"{tuple(shape)}"
            )
        if saved.dtype.is_floating_point != tensor.is_floating_point():
            raise CheckpointError(f"{name} is {saved.dtype} in {saved.path}, here {tensor.dtype}")
        if is_zero_param(tensor):
            if record_of(tensor).readers:
                raise CheckpointError(f"{name} is gathered; load outside of GatheredParameters")
        elif hasattr(tensor, "_hp_mapping"):
            raise CheckpointError(
                f"{name} has a master weight, which would not follow: load before "
                "deepspeed.initialize (below ZeRO stage 3)"
            )

    @torch.no_grad()
    def load(self) -> None:
        """Read every tensor, or this rank's elements of it, to where it is."""
        for tensor, source in self.targets.items():
            if is_zero_param(tensor):
                own = own_fragment(tensor)
                record_of(tensor).before_write()
                self.files.read(source, own.param_start, record_of(tensor).shard[: own.numel])
            elif tensor.is_contiguous():
                self.files.read(source, 0, tensor.detach().view(-1))
            else:
                whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                self.files.read(source, 0, whole.view(-1))
                tensor.copy_(whole)

    def tell(self) -> None:
        """Have masters follow."""
        for tensor in self.targets:
            on_edit = record_of(tensor).on_edit if is_zero_param(tensor) else None
            if on_edit is not None:
                on_edit(cast(nn.Parameter, tensor))


def _told(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3]) or 'nothing'}{more}"
