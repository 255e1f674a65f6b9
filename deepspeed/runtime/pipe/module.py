"""A model as a list of layers, cut into the stages of a pipeline.

`PipelineModule` decides which layers this rank owns, builds them, ties weights that several stages
hold, and runs the layers of one chunk. It moves nothing between stages.

With `seed_layers`, layer i is initialized from seed `base_seed + i`, so the weights do not depend
on the number of stages. Without, each stage draws its layers' weights from the random state it has,
so the same script with other stages starts from other weights; the data-parallel replicas of a
stage are made equal by the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import group_store
from deepspeed.moe.layer import MoE
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.pipe.expert_layers import ExpertLayers
from deepspeed.runtime.pipe.layer_files import LayerFiles
from deepspeed.runtime.pipe.layer_spec import (
    Layer,
    LayerSpec,
    PipelineError,
    TiedLayerSpec,
    checked_layers,
    layer_name,
    partition_layers,
    trainable_numel,
)
from deepspeed.runtime.pipe.topology import (
    PIPE_AXIS,
    PipeDataParallelTopology,
    PipelineParallelGrid,
    ProcessTopology,
)
from deepspeed.runtime.utils import set_random_seed, tensors_in
from deepspeed.utils.logging import logger

__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]


class PipelineModule(LayerFiles, nn.Module):
    """The stage of a pipeline that this rank owns. Construction is collective over the world.

    Layer i of the whole model is registered as submodule "i"; a tied one as "tied_modules.KEY",
    once on each stage that uses it. A layer gets the one value that the layer before returned: a
    tuple stays one argument.

    Args:
        layers: Modules, `LayerSpec`s and functions, in order. Specs are built on their stage only.
        num_stages: Number of stages; must divide the number of ranks, the rest is data parallelism.
        topology: Coordinates of all ranks instead, with an axis "pipe".
        loss_fn: `loss_fn(outputs, labels)` on the last stage; None: the last layer returns it.
        seed_layers: Seed before each layer is built (base_seed + index) and before each forward of
            it (so that dropout does not depend on the stages either).
        seed_fn: Called with the seed; None seeds Python, numpy and torch.
        base_seed: Added to the layer's index.
        partition_method: See `partition.partition_layers`.
        activation_checkpoint_interval: Keep the activations of every n-th layer only and recompute
            the others; 0 keeps all.
        activation_checkpoint_func: `func(function, *inputs)` that does it.
        checkpointable_layers: Class names; only these are recomputed. None: all with parameters.
        dynamic_shape: Activations may change shape from one micro-batch to the next.
        num_model_chunks: Chunks per stage for the interleaved schedule: the model has num_stages *
            num_model_chunks parts and part j is on stage j % num_stages.

    Attributes:
        parts: Boundaries of the parts, num_stages * num_model_chunks + 1 of them.
        grid: Process groups of the topology; the `mpu` of the engine.
        num_stages, stage_id, num_model_chunks: Of this pipeline and rank.
        tied_modules: Shared modules of this stage, by key.
        tied_comms: Key -> {"ranks", "group", "weight_attr", "module"} of this stage's shared
            modules that other stages hold too.

    Raises:
        PipelineError: The layers, stages, chunks and ranks do not fit.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[int] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpointing.checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        num_model_chunks: int = 1,
    ) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.seed_layers = seed_layers
        self.seed_fn = seed_fn or set_random_seed
        self.base_seed = base_seed
        self.dynamic_shape = dynamic_shape
        self.checkpointable_layers = (
            None if checkpointable_layers is None else list(checkpointable_layers)
        )
        self.activation_checkpoint_func = activation_checkpoint_func
        self.set_checkpoint_interval(activation_checkpoint_interval)

        self._layer_specs = checked_layers(layers)
        self.grid = PipelineParallelGrid(_chosen_topology(num_stages, topology))
        self.num_stages = self.grid.pipe_parallel_size
        self.stage_id = self.grid.stage_id
        if num_model_chunks < 1:
            raise PipelineError(f"num_model_chunks={num_model_chunks}: a stage has one at least")
        self.num_model_chunks = num_model_chunks
        self.parts = partition_layers(
            self._layer_specs,
            self.num_stages * num_model_chunks,
            partition_method,
            self._count_layer_params,
        )
        self._own_layers = [
            index for chunk in range(num_model_chunks) for index in self.chunk_range(chunk)
        ]
        self._check_shared_modules()

        self.tied_modules = nn.ModuleDict()
        self._functions = {index: self._build_layer(index) for index in self._own_layers}
        self.to(get_accelerator().current_device_name())
        self.tied_comms: dict[str, dict[str, Any]] = self._tie_stages()
        named = {
            index: (self._layer_name(index), own) for index, own in self._layer_modules().items()
        }
        self._expert_layers = ExpertLayers(named, self.grid.pp_proc_group)
        # By chunk; saved, since with `seed_layers` the random numbers of a forward follow from it.
        self.num_forwards = [0] * num_model_chunks

    # -- which layers are where

    def partitions(self) -> list[int]:
        return self.parts

    def chunk_range(self, chunk: int) -> range:
        """Return the indices of the layers of one chunk of this stage."""
        if not 0 <= chunk < self.num_model_chunks:
            raise PipelineError(f"chunk {chunk}: this stage has 0..{self.num_model_chunks - 1}")
        part = chunk * self.num_stages + self.stage_id
        return range(self.parts[part], self.parts[part + 1])

    def part_of(self, layer_idx: int) -> int:
        if not 0 <= layer_idx < len(self._layer_specs):
            raise PipelineError(
                f"layer {layer_idx}: the model has layers 0..{len(self._layer_specs) - 1}"
            )
        return next(part for part, stop in enumerate(self.parts[1:]) if layer_idx < stop)

    def stage_owner(self, layer_idx: int) -> int:
        return self.part_of(layer_idx) % self.num_stages

    def num_pipeline_stages(self) -> int:
        return self.num_stages

    def topology(self) -> ProcessTopology:
        return self.grid.topology()

    def mpu(self) -> PipelineParallelGrid:
        """Return the process groups, with Megatron's getters."""
        return self.grid

    @property
    def _grid(self) -> PipelineParallelGrid:
        # Upstream's name, which model libraries read.
        return self.grid

    @property
    def forward_funcs(self) -> list[Callable[[Any], Any]]:
        """What this stage's layers compute, in order."""
        return list(self._functions.values())

    def extra_repr(self) -> str:
        owned = (
            f"part {part} on stage {part % self.num_stages}: {names}"
            for part, names in enumerate(self._part_names())
        )
        return "\n".join((f"stage {self.stage_id} of {self.num_stages}", *owned))

    def _part_names(self) -> list[str]:
        bounds = zip(self.parts, self.parts[1:], strict=False)
        return [
            ", ".join(f"{index} {layer_name(self._layer_specs[index])}" for index in range(*pair))
            for pair in bounds
        ]

    # -- construction

    # A name of upstream's that clients put functions of their own under.
    def _count_layer_params(self) -> list[int]:
        """What each layer of the whole model weighs for `partition_method="parameters"`."""
        return [trainable_numel(layer) for layer in self._layer_specs]

    def _check_shared_modules(self) -> None:
        """A module instance listed on two stages would quietly become two."""
        first_use: dict[int, int] = {}
        for index, layer in enumerate(self._layer_specs):
            for param in layer.parameters() if isinstance(layer, nn.Module) else ():
                first = first_use.setdefault(id(param), index)
                if self.stage_owner(first) != self.stage_owner(index):
                    raise PipelineError(
                        f"layers {first} and {index} share a parameter but are on stages "
                        f"{self.stage_owner(first)} and {self.stage_owner(index)}: make both a "
                        "TiedLayerSpec of one key"
                    )

    def _build_layer(self, index: int) -> Callable[[Any], Any]:
        layer = self._layer_specs[index]
        if self.seed_layers:
            self.seed_fn(self.base_seed + index)
        if isinstance(layer, TiedLayerSpec):
            return self._build_tied(index, layer)
        if isinstance(layer, LayerSpec):
            layer = layer.build()
        if isinstance(layer, nn.Module):
            self.add_module(str(index), layer)
        return layer

    def _build_tied(self, index: int, spec: TiedLayerSpec) -> Callable[[Any], Any]:
        if spec.key not in self.tied_modules:
            self.tied_modules[spec.key] = spec.build()
        module = self.tied_modules[spec.key]
        for name in spec.tied_weight_attr:
            if not isinstance(self._recursive_getattr(module, name), torch.Tensor):
                raise PipelineError(
                    f"layers[{index}]: tied_weight_attr {name!r} of {spec.key!r} is no tensor"
                )
        return module if spec.forward_fn is None else partial(spec.forward_fn, module)

    # -- tied weights

    @staticmethod
    def _recursive_getattr(module: nn.Module, attr_name: str) -> torch.Tensor:
        try:
            found: torch.Tensor = attrgetter(attr_name)(module)
        except AttributeError as error:
            raise PipelineError(
                f"tied_weight_attr: {type(module).__name__} has no attribute {attr_name!r}"
            ) from error
        return found

    def tied_layers(self) -> dict[str, list[int]]:
        """Key -> indices of its layers in the whole model, by first use: alike on every rank."""
        found: dict[str, list[int]] = {}
        for index, layer in enumerate(self._layer_specs):
            if isinstance(layer, TiedLayerSpec):
                found.setdefault(layer.key, []).append(index)
        return found

    def _tie_stages(self) -> dict[str, dict[str, Any]]:
        """Make groups of stages with a module of one key; weights become the first owner's."""
        comms: dict[str, dict[str, Any]] = {}
        for key, indices in self.tied_layers().items():
            stages = sorted({self.stage_owner(index) for index in indices})
            if len(stages) == 1:
                continue
            group = self._group_of_stages(stages)
            if self.stage_id not in stages:
                continue
            names, module = self._tied_names(indices), self.tied_modules[key]
            owner = self.stage_owner(indices[0])
            ranks = [self.grid.stage_to_global(stage) for stage in stages]
            comms[key] = {"ranks": ranks, "group": group, "weight_attr": names, "module": module}
            self._make_equal(key, comms[key], owner)
        return comms

    def _tied_names(self, indices: list[int]) -> list[str]:
        specs = [self._layer_specs[index] for index in indices]
        tied = (spec.tied_weight_attr for spec in specs if isinstance(spec, TiedLayerSpec))
        return list(dict.fromkeys(name for names in tied for name in names))

    def tied_weights(self, key: str) -> list[nn.Parameter]:
        """The trainable weights of a key that this stage has."""
        names = self._tied_names(self.tied_layers()[key])
        found = [self._recursive_getattr(self.tied_modules[key], name) for name in names]
        return [w for w in found if isinstance(w, nn.Parameter) and w.requires_grad]

    def _group_of_stages(self, stages: list[int]) -> dist.Group:
        """This rank's group over `stages` of its pipeline; of itself if it is on none of them."""
        pipelines = self.grid.pipe_groups
        together = [[pipeline[stage] for stage in stages] for pipeline in pipelines]
        alone = [
            [rank] for line in pipelines for stage, rank in enumerate(line) if stage not in stages
        ]
        return group_store.shared_group(together + alone)

    @torch.no_grad()
    def _make_equal(self, key: str, comm: dict[str, Any], owner: int) -> None:
        weights = [self._recursive_getattr(comm["module"], name) for name in comm["weight_attr"]]
        for weight in weights:
            dist.broadcast(weight.data, src=self.grid.stage_to_global(owner), group=comm["group"])
            if self.stage_id != owner:
                # The norm counts the first owner's replica only.
                setattr(weight, PIPE_REPLICATED, True)
        tied = {id(weight) for weight in weights}
        untied = [name for name, own in comm["module"].named_parameters() if id(own) not in tied]
        if untied and self.stage_id == owner and self.grid.data_parallel_id == 0:
            logger.warning(
                f"tied layer {key!r}: {', '.join(untied)} are not in "
                f"tied_weight_attr={comm['weight_attr']}, so each stage trains its own; with fewer "
                "stages they would be one. List them to tie them"
            )

    def get_tied_weights_and_groups(self) -> list[tuple[torch.Tensor, Any]]:
        """Return each weight of this stage that other stages hold too, with the group to reduce its
        gradient over, in one order on all ranks of a group.
        """
        return [
            (self._recursive_getattr(comm["module"], name), comm["group"])
            for comm in self.tied_comms.values()
            for name in comm["weight_attr"]
        ]

    def allreduce_tied_weight_gradients(self) -> None:
        """Sum `.grad` of tied weights over their stages, where no pipeline engine does."""
        for weight, group in self.get_tied_weights_and_groups():
            if not weight.requires_grad:
                continue
            if weight.grad is None:  # another stage may have one, and waits
                weight.grad = torch.zeros_like(weight)
            dist.all_reduce(weight.grad, group=group)

    # -- experts

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Make the groups of all stages' experts, on this stage too. Collective over the world."""
        self._expert_layers.make_groups(use_data_before_expert_parallel_)

    def numbered_moe_layers(self) -> list[tuple[int, str, MoE]]:
        """Return, of each layer with experts here, number in the whole model, name, module."""
        return self._expert_layers.numbered()

    # -- forward

    def forward(self, forward_input: object) -> Any:
        """Run this stage's layers in order; chunks of several stages are not consecutive."""
        if self.num_stages > 1 and self.num_model_chunks > 1:
            raise PipelineError(
                f"forward(): the {self.num_model_chunks} chunks of a stage are not consecutive "
                "layers; use forward_chunk()"
            )
        for chunk in range(self.num_model_chunks):
            forward_input = self.forward_chunk(chunk, forward_input)
        return forward_input

    def forward_chunk(
        self, chunk: int, inputs: object, seed: Callable[[int], object] | None = None
    ) -> Any:
        """Run the layers of one chunk in order; `inputs` comes back if it has none. `seed` is
        called with the index of each layer before its forward, instead of what `seed_layers` does.
        """
        indices = self.chunk_range(chunk)
        self.num_forwards[chunk] += 1
        if seed is None and self.seed_layers:
            first, seed_fn = self.base_seed * self.num_forwards[chunk], self.seed_fn
            seed = lambda index: seed_fn(first + index)  # noqa: E731
        interval = self.activation_checkpoint_interval
        if interval == 0 or not (self.training and torch.is_grad_enabled()):
            return self._run(indices, seed, inputs)
        for start in range(indices.start, indices.stop, interval):
            segment = range(start, min(start + interval, indices.stop))
            run = partial(self._run, segment, seed)
            inputs = (
                self._recomputed(run, inputs) if self._is_checkpointable(segment) else run(inputs)
            )
        return inputs

    def _run(self, indices: range, seed: Callable[[int], object] | None, inputs: object) -> Any:
        for index in indices:
            if seed is not None:
                seed(index)
            inputs = self._functions[index](inputs)
        return inputs

    def _recomputed(self, run: Callable[[Any], Any], inputs: Any) -> Any:
        is_tuple = isinstance(inputs, tuple)
        returns_single = False

        def unpacked(_anchor: torch.Tensor | None, *values: object) -> Any:
            nonlocal returns_single
            outputs = run(values if is_tuple else values[0])
            returns_single = isinstance(outputs, tuple) and len(outputs) == 1
            return outputs

        # A reentrant checkpoint gives weights a gradient only if some input requires one, which
        # token numbers do not.
        requires_grad = any(tensor.requires_grad for tensor in tensors_in(inputs))
        anchor = (
            None
            if requires_grad
            else torch.zeros(1, device=get_accelerator().current_device_name(), requires_grad=True)
        )
        outputs = self.activation_checkpoint_func(
            unpacked, anchor, *(inputs if is_tuple else (inputs,))
        )
        # Checkpoint functions unpack a tuple of one tensor; the next layer waits for the tuple.
        return (outputs,) if returns_single and not isinstance(outputs, tuple) else outputs

    def _is_checkpointable(self, segment: range) -> bool:
        if self.checkpointable_layers is not None:
            return all(
                layer_name(self._layer_specs[index]) in self.checkpointable_layers
                for index in segment
            )
        # A partial is a tied module with its forward_fn.
        return any(
            isinstance(self._functions[index], partial) or _has_parameters(self._functions[index])
            for index in segment
        )

    def set_checkpoint_interval(self, interval: int) -> None:
        """Keep the activations of every `interval`-th layer only; 0 keeps all."""
        if interval < 0:
            raise PipelineError(
                f"activation_checkpoint_interval={interval}: give 0 (off) or a number of layers"
            )
        self.activation_checkpoint_interval = interval

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Return losses to report beside the main one, of the micro-batch that just went forward on
        the last stage. For subclasses.
        """
        return None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile this stage's layers, each for itself."""
        for index, function in self._functions.items():
            if isinstance(function, nn.Module):
                function.compile(*args, **kwargs)
            else:
                self._functions[index] = torch.compile(function, *args, **kwargs)

    # -- checkpoint files

    def _layer_modules(self) -> dict[int, nn.Module]:
        # A tied module with a forward_fn has a file only at its first use, where upstream may have
        # none.
        found = {
            index: function
            for index, function in self._functions.items()
            if isinstance(function, nn.Module)
        }
        for key, indices in self.tied_layers().items():
            own = [index for index in indices if index in self._functions]
            if own and not any(index in found for index in own):
                found[own[0]] = self.tied_modules[key]
        return dict(sorted(found.items()))

    def _layer_name(self, index: int) -> str:
        layer = self._layer_specs[index]
        return f"tied_modules.{layer.key}" if isinstance(layer, TiedLayerSpec) else str(index)

    def _indices_of_weights(self, index: int) -> list[int]:
        layer = self._layer_specs[index]
        tied = self.tied_layers()[layer.key] if isinstance(layer, TiedLayerSpec) else []
        return [index, *(other for other in tied if other != index)]


def _chosen_topology(num_stages: int | None, topology: ProcessTopology | None) -> ProcessTopology:
    """The topology to use, with torch.distributed initialized."""
    if num_stages is None and topology is None:
        raise PipelineError("PipelineModule: give num_stages or topology")
    if not dist.is_initialized():
        dist.init_distributed()
    if topology is not None:
        if PIPE_AXIS not in topology.axes:
            raise PipelineError(f"topology: its axes {topology.axes} lack {PIPE_AXIS!r}")
        if num_stages not in (None, topology.get_dim(PIPE_AXIS)):
            raise PipelineError(
                f"num_stages={num_stages}, but the topology has {topology.get_dim(PIPE_AXIS)} "
                "stages; give one of them"
            )
        return topology
    world_size = dist.get_world_size()
    stages = int(num_stages or 0)
    if stages < 1 or world_size % stages:
        raise PipelineError(
            f"num_stages={num_stages} must divide the number of ranks, {world_size}"
        )
    return PipeDataParallelTopology(stages, world_size // stages)


def _has_parameters(function: Callable[[Any], Any]) -> bool:
    return isinstance(function, nn.Module) and any(True for _ in function.parameters())
