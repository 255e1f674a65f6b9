"""The weights of a model in a checkpoint folder: in the model file, experts and pipeline layers in
files of their own. Reading and loading are apart, so that every rank can check everything before
any changes a weight; nothing here communicates.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import nn

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import experts, file_names
from deepspeed.checkpoint.files import CheckpointError, read_file
from deepspeed.moe.auto_ep import gathered_experts, named_spread_experts
from deepspeed.moe.expert_rows import whole_shape
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import named_moe_layers
from deepspeed.runtime.checkpointing.folders import Put, StorageNode
from deepspeed.runtime.zero.parameters.zero_parameter import is_zero_param


@runtime_checkable
class LayeredModule(Protocol):
    """A pipeline's module, which keeps a file per layer."""

    num_forwards: list[int]

    def put_layers(self, put: Put, node: StorageNode, exclude_frozen: bool) -> None: ...

    def files_of_layers(self) -> dict[str, str]:
        """Name of a layer's file -> the layer's name as a submodule."""

    def read_state_dir(
        self, load_dir: str, checkpoint_engine: object = None, strict: bool = True
    ) -> Any: ...

    def load_layers(self, loaded: object, strict: bool = True) -> None: ...

    def numbered_moe_layers(self) -> list[tuple[int, str, MoE]]:
        """Number in the whole model, name and module of this stage's layers with experts."""


class ModelExperts:
    """The layers with experts of a model, whose groups are made.

    Attributes:
        layers: Prefix of the names of a layer's experts -> the layer, in the order of the files'
            numbers. Each expert has a file.
        packed: Name -> module of experts that `expert_parallel` spread, whole in the model file.
        numbers: Prefix -> the layer's number in files: its place in the model over all stages.
        first: Prefix -> number over all ranks of the first expert of this rank.
        group_sizes: Prefix -> how many ranks the experts are spread over.
    """

    def __init__(self, module: nn.Module) -> None:
        if isinstance(module, LayeredModule):
            found = module.numbered_moe_layers()
        else:
            found = [
                (number, name, layer)
                for number, (name, layer) in enumerate(named_moe_layers(module))
            ]
        prefixes = [
            f"{name}.deepspeed_moe.experts.deepspeed_experts.".lstrip(".") for _, name, _ in found
        ]
        self.layers = {prefix: layer for prefix, (_, _, layer) in zip(prefixes, found, strict=True)}
        self.numbers = {
            prefix: number for prefix, (number, _, _) in zip(prefixes, found, strict=True)
        }
        self.first = {
            prefix: layer.global_expert_ids.start for prefix, layer in self.layers.items()
        }
        self.group_sizes = {prefix: layer.ep_size for prefix, layer in self.layers.items()}
        self.packed = dict(named_spread_experts(module))

    @property
    def are_spread(self) -> bool:
        """Whether ranks hold different experts, and so different parameters."""
        return bool(self.layers or self.packed)

    @property
    def largest_group(self) -> str:
        """Name of this model's expert groups by whose ranks files are numbered."""
        names = {layer.ep_size: layer.expert_group_name for layer in self.layers.values()}
        names |= {module.ep_size: module.expert_group_name for module in self.packed.values()}
        return names[max(names)]

    @property
    def counts(self) -> list[int]:
        return [layer.num_experts for layer in self.layers.values()]

    def are_elsewhere(self, name: str) -> bool:
        """Whether a name, numbered over all ranks, is of an expert that some rank has."""
        prefix, number = experts.expert_prefix(name), experts.expert_number(name)
        layer = None if prefix is None else self.layers.get(prefix)
        return layer is not None and number is not None and number < layer.num_experts

    def packed_description(self) -> list[dict[str, Any]]:
        """What a model file says of the packed experts; readers are `checkpoint.experts`'."""
        return [
            {
                keys.AUTOEP_EXPERT_KEY_PREFIX: name,
                keys.AUTOEP_NUM_EXPERTS: module.rows.num_experts,
                keys.AUTOEP_NUM_LOCAL_EXPERTS: module.num_experts,
                keys.AUTOEP_EP_SIZE: module.ep_size,
            }
            for name, module in self.packed.items()
        ]

    def put(self, put: Put, node: StorageNode, state: Mapping[str, Any]) -> None:
        """Give `put` the files of the experts of which this rank is the first owner with the
        folder.
        """
        for prefix, layer in self.layers.items():
            part = layer.parallel_map.model.rank
            if not node.is_first(layer.parallel_map.experts(layer.expert_group_name).data.ranks):
                continue
            for local, number in enumerate(layer.global_expert_ids):
                own = experts.of_expert(state, prefix, local)
                renamed = {
                    experts.renumbered(name, self.first): value for name, value in own.items()
                }
                put(file_names.expert_file(self.numbers[prefix], number, part), renamed)

    def read(self, folder: str, read: Callable[[str], Any] = read_file) -> dict[str, Any]:
        """The weights of this rank's experts, named as in this rank's model, by `read(path)`."""
        state: dict[str, Any] = {}
        back = {prefix: -first for prefix, first in self.first.items()}
        for prefix, layer in self.layers.items():
            for number in layer.global_expert_ids:
                saved = read(self._path(folder, layer, self.numbers[prefix], number))
                state.update(
                    (experts.renumbered(name, back), value) for name, value in saved.items()
                )
        return state

    @staticmethod
    def _path(folder: str, layer: MoE, index: int, number: int) -> str:
        """Path of an expert's file, whose layer may have been on another stage."""
        part, num_slices = layer.parallel_map.model.rank, layer.parallel_map.tensor.size
        path = os.path.join(folder, file_names.expert_file(index, number, part))
        if os.path.isfile(path) or not os.path.isdir(folder):
            return path
        files = filter(None, map(file_names.parse_expert_file, os.listdir(folder)))
        writers = [file.model_parallel_rank for file in files if file[:2] == (index, number)]
        of_slice = [writer for writer in writers if writer % num_slices == part % num_slices]
        usable = of_slice if of_slice or layer.enable_expert_tensor_parallelism else writers
        if not usable:
            return path
        return os.path.join(folder, file_names.expert_file(index, number, min(usable)))


class ReadWeights(NamedTuple):
    """Weights that were read and checked: a state dict, or layers of a pipeline."""

    state: dict[str, Any] | None
    layers: Any


class ModelFiles:
    """Writes and reads the weights of one engine's model."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.gathered: dict[str, torch.Tensor] = {}
        self.experts = ModelExperts(module)
        self.is_layered = isinstance(module, LayeredModule)
        self.is_sharded = any(map(is_zero_param, module.parameters()))

    @property
    def layered(self) -> LayeredModule:
        return cast(LayeredModule, self.module)

    def collect(self, is_writer: bool) -> None:
        """Gather what this rank's files have of others' weights; on all ranks, before writing."""
        if not self.is_sharded:
            self.gathered = gathered_experts(self.module, keep=is_writer)

    def put(self, put: Put, node: StorageNode, state: dict[str, Any], exclude_frozen: bool) -> None:
        """Give `put` what has files of its own: layers and experts. All ranks call it."""
        if self.is_layered:
            self.layered.put_layers(put, node, exclude_frozen)
        elif not self.is_sharded:
            self.experts.put(put, node, state)

    def in_model_file(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Return what stands in the model file: all that has no file of its own."""
        if self.is_layered:
            return None
        state = self.with_gathered(state)
        has_files = bool(self.experts.layers) and not self.is_sharded
        return experts.without_experts(state) if has_files else state

    def with_gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state dict with packed experts whole; those that are not in it stay out."""
        whole = {name: value for name, value in self.gathered.items() if name in state}
        return type(state)({**state, **whole}) if whole else state

    def read(self, folder: str, model: Mapping[str, Any], strict: bool | None) -> ReadWeights:
        """Read this rank's weights and check them."""
        if self.is_layered:
            return ReadWeights(None, self.layered.read_state_dir(folder, strict=bool(strict)))
        self.refuse_layers(folder, model)
        state = (
            {**model[keys.MODULE], **self.experts.read(folder)}
            if self.experts.layers
            else model[keys.MODULE]
        )
        if strict is not None:
            self.check(state, strict)
        return ReadWeights(state, None)

    @staticmethod
    def refuse_layers(folder: str, model: Mapping[str, Any]) -> None:
        """Raise if a folder, with a model file of this content, is a pipeline's."""
        if model[keys.MODULE] is None:
            raise CheckpointError(
                f"{folder} holds a pipeline's layers: load it into a PipelineModule; num_stages=1 "
                "runs on ranks without a pipeline"
            )

    def load(
        self, read: ReadWeights, strict: bool, custom_load_fn: Callable[..., Any] | None
    ) -> None:
        if read.state is None:
            self.layered.load_layers(read.layers, strict=strict)
        elif custom_load_fn is not None:
            custom_load_fn(src=read.state, dst=self.module)
        else:
            self.module.load_state_dict(read.state, strict=strict)

    def check(self, saved: Mapping[str, Any], strict: bool = True) -> None:
        """Raise what `load_state_dict` would, before anything is changed."""
        own = self.module.state_dict(keep_vars=True)
        problems = [f"{name} is missing" for name in own if strict and name not in saved]
        problems += [f"{name} is not in this model" for name in saved if strict and name not in own]
        problems += [
            f"{name} has shape {tuple(saved[name].shape)}, this model's "
            f"{tuple(whole_shape(own[name]))}"
            for name in own
            if name in saved
            and isinstance(own[name], torch.Tensor)
            and saved[name].shape != whole_shape(own[name])
        ]
        if problems:
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise CheckpointError(
                f"the checkpoint is of another model: {'; '.join(problems[:5])}{more}. If it was "
                "saved without frozen parameters, or only some names are wanted, give "
                "load_module_strict=False; custom_load_fn may load weights of other shapes"
            )
