"""Checkpoint files of a pipeline: one per layer, named by its place in the whole model, so that any
number of stages can read them. Experts in a layer are in files of their own.

Nothing here communicates: a rank writes its share and reads its own, when and where it is told.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.experts import without_experts
from deepspeed.checkpoint.files import CheckpointError, read_file
from deepspeed.checkpoint.torch_files import write_file
from deepspeed.checkpoint.utils import separate
from deepspeed.runtime.checkpointing.folders import Put, StorageNode, shared_storage
from deepspeed.runtime.checkpointing.model_files import ModelExperts
from deepspeed.runtime.pipe.topology import DATA_AXIS, PipelineParallelGrid
from deepspeed.runtime.utils import partition_uniform

LoadedLayers = list[tuple[nn.Module, dict[str, Any]]]


class LayerFiles:
    """Saving and loading of `PipelineModule`.

    Attributes:
        checkpoint_parallel_write_pipeline: Let the data-parallel ranks of a stage share its layers
            when saving; False: the first of them writes all.
    """

    grid: PipelineParallelGrid
    checkpoint_parallel_write_pipeline: bool = True
    _own_layers: list[int]

    def _layer_modules(self) -> dict[int, nn.Module]:
        """Global index -> module, of the own layers that have a file."""
        raise NotImplementedError(f"{type(self).__name__} must define _layer_modules()")

    def _layer_name(self, index: int) -> str:
        """Name of layer `index` as a submodule."""
        raise NotImplementedError(f"{type(self).__name__} must define _layer_name()")

    def _indices_of_weights(self, index: int) -> list[int]:
        """The layers whose file may hold the weights of layer `index`, itself first."""
        raise NotImplementedError(f"{type(self).__name__} must define _indices_of_weights()")

    def ckpt_prefix(self, checkpoints_path: str, tag: str) -> str:
        """Path prefix of this rank's files: all coordinates but the data-parallel one."""
        name = self.grid.topology().get_rank_repr(self.grid.global_rank, omit_axes=[DATA_AXIS])
        return os.path.join(checkpoints_path, str(tag), f"module-{name}" if name else "module")

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        return self._layer_path(ckpt_dir, self._own_layers[local_layer_idx])

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """The existing files of a layer, one for each tensor-parallel rank, sorted."""
        index = self._own_layers[local_layer_idx]
        return sorted(
            glob.glob(os.path.join(glob.escape(ckpt_dir), file_names.layer_file_glob(index)))
        )

    def files_of_layers(self) -> dict[str, str]:
        """Name of a layer's file -> its name as a submodule, of own layers, whoever writes."""
        return {
            os.path.basename(self._layer_path("", index)): self._layer_name(index)
            for index in self._layer_modules()
        }

    def _layer_path(self, ckpt_dir: str, index: int) -> str:
        name = self.grid.topology().get_rank_repr(self.grid.global_rank)
        return os.path.join(ckpt_dir, file_names.layer_file(file_names.layer_id(index), name))

    def save_state_dict(
        self, save_dir: str, checkpoint_engine: Any = None, exclude_frozen_params: bool = False
    ) -> None:
        """Write this rank's share of the stage's layers and experts into a folder. Collective-free;
        together the ranks write all of them once.

        `checkpoint_engine` has `save(state_dict, path)`; None writes files.
        """

        def put(name: str, state: Any) -> None:
            path = os.path.join(save_dir, name)
            if checkpoint_engine is None:
                write_file(path, state)
            else:
                checkpoint_engine.save(separate(state), path)

        self.put_layers(put, shared_storage(), exclude_frozen_params)

    def put_layers(self, put: Put, node: StorageNode, exclude_frozen: bool) -> None:
        """Give `put` name and content of the files of this rank's share of the stage's layers and
        experts, where the ranks of `node` share the folder. Collective-free.
        """
        for index, module in self._own_share(node):
            put(self._layer_path("", index), without_experts(_state_of(module, exclude_frozen)))
        stage = cast(nn.Module, self)
        ModelExperts(stage).put(put, node, _state_of(stage, exclude_frozen))

    def _own_share(self, node: StorageNode) -> Iterator[tuple[int, nn.Module]]:
        modules = list(self._layer_modules().items())
        writer, writers = node.share(self.grid.get_data_parallel_group_ranks())
        if not self.checkpoint_parallel_write_pipeline:
            yield from modules if writer == 0 else ()
            return
        bounds = partition_uniform(len(modules), writers)
        yield from modules[bounds[writer] : bounds[writer + 1]]

    def load_state_dir(
        self, load_dir: str, checkpoint_engine: object = None, strict: bool = True
    ) -> None:
        self.load_layers(self.read_state_dir(load_dir, checkpoint_engine, strict), strict)

    def read_state_dir(
        self, load_dir: str, checkpoint_engine: Any = None, strict: bool = True
    ) -> LoadedLayers:
        """Read and compare the own layers' files, of any number of stages; nothing changes.

        Args:
            load_dir: Folder with the layer files.
            checkpoint_engine: Object with `load(path, map_location)`; None reads files.
            strict: Each layer must have a file of exactly its names; else what fits is loaded.

        Raises:
            CheckpointError: A file is missing or damaged, or does not fit the layer.
        """

        def read(path: str) -> Any:
            return (
                read_file(path)
                if checkpoint_engine is None
                else checkpoint_engine.load(path, map_location="cpu")
            )

        loaded: LoadedLayers = []
        experts = ModelExperts(cast(nn.Module, self)).read(load_dir, read)
        for index, module in self._layer_modules().items():
            path = self._existing_path(load_dir, index)
            if not strict and not os.path.isfile(path):
                continue
            state, start = read(path), f"{self._layer_name(index)}."
            state.update(
                (name.removeprefix(start), value)
                for name, value in experts.items()
                if name.startswith(start)
            )
            _check_layer(module, state, path, strict)
            loaded.append((module, state))
        return loaded

    @staticmethod
    def load_layers(loaded: LoadedLayers, strict: bool = True) -> None:
        for module, state in loaded:
            module.load_state_dict(state, strict=strict)

    def _existing_path(self, load_dir: str, index: int) -> str:
        """The layer's file, or another layer's with its weights; its own if there is none."""
        paths = [self._layer_path(load_dir, one) for one in self._indices_of_weights(index)]
        return next((path for path in paths if os.path.isfile(path)), paths[0])


def _state_of(module: nn.Module, exclude_frozen: bool) -> dict[str, Any]:
    state = module.state_dict()
    for name, param in module.named_parameters(remove_duplicate=False) if exclude_frozen else ():
        if not param.requires_grad:
            state.pop(name, None)
    return state


def _check_layer(module: nn.Module, state: dict[str, Any], path: str, strict: bool) -> None:
    own = module.state_dict()
    differ = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own
        if name in state and hasattr(own[name], "shape") and state[name].shape != own[name].shape
    ]
    if strict:
        differ += [f"{name} is missing" for name in own if name not in state]
        differ += [f"{name} is not in the layer" for name in state if name not in own]
    if differ:
        raise CheckpointError(
            f"{path} does not fit the layer {type(module).__name__}: {'; '.join(differ)}"
        )
