"""The training configuration: what the user gave, validated, with the batch numbers resolved.

A key is read in one spelling, ``config.tree.block.key`` (``config_models``). What is derived is an
attribute of ``DeepSpeedConfig``; the others are upstream's names, which only scripts read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import torch

from deepspeed import comm as dist
from deepspeed._lazy import lazy_attributes
from deepspeed.elasticity.elasticity import elastic_batch_sizes
from deepspeed.runtime.config_models.enums import ZeroStageEnum
from deepspeed.runtime.config_models.sizes import (
    BatchSizes,
    WorldSize,
    check_secondary,
    divisors,
    instances_at_stage_3,
    resolve_batch_sizes,
)
from deepspeed.runtime.config_models.source import load_config
from deepspeed.runtime.config_utils import (
    DeepSpeedConfigError,
    ScientificNotationEncoder,
    dict_raise_error_on_duplicate_keys,
    parse_dtype,
)
from deepspeed.runtime.constants import DEEPSPEED_OPTIMIZERS, TENSOR_CORE_ALIGN_SIZE
from deepspeed.utils.logging import print_dist, warn_once

if TYPE_CHECKING:
    from deepspeed.runtime.config_models.features import DeepSpeedMonitorConfig
    from deepspeed.runtime.config_models.getters import get_zero_config
    from deepspeed.runtime.config_models.training import TrainingConfig

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedConfigWriter",
    "DtypeEnum",
    "get_zero_config",
    "parse_dtype",
]

# Scripts import the constants and the getters of raw dicts from here.
__getattr__ = lazy_attributes(
    __name__,
    tables=(
        "deepspeed.runtime.constants:__dict__",
        "deepspeed.runtime.config_models.getters:CONSTANTS",
        "deepspeed.runtime.config_models.getters:GETTERS",
    ),
)


Value = TypeVar("Value", covariant=True)


class Reading(Generic[Value]):
    """A read-only attribute that reads the tree: upstream's second name of a part of it."""

    def __init__(self, read: Callable[[TrainingConfig], Value]) -> None:
        self._read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, config: DeepSpeedConfig, owner: type) -> Value:
        return self._read(config.tree)

    def __set__(self, config: DeepSpeedConfig, value: object) -> NoReturn:
        # Set beside the tree, it would reach nobody.
        raise AttributeError(f"{self._name}: it is read from the tree of the configuration")


class DtypeEnum(Enum):
    """Data types by the names that configurations use."""

    fp16 = torch.float16
    fp32 = torch.float32
    int8 = torch.int8
    bf16 = torch.bfloat16

    @classmethod
    def _missing_(cls, value: object) -> DtypeEnum | None:
        if value in ("int8", "torch.int8"):
            return cls.int8
        try:
            return cls(parse_dtype(str(value)))
        except DeepSpeedConfigError:
            return None


def data_parallel_world_size(mpu: Any = None, mesh_device: Any = None) -> WorldSize:
    """Return how many ranks share the data, as the mpu says, or the mesh's ``data_parallel``."""
    if mpu is None and mesh_device is not None:
        return WorldSize(
            mesh_device.get_group(mesh_dim="data_parallel").size(),
            "of the mesh's data_parallel dimension",
        )
    if mpu is not None and hasattr(mpu, "get_data_parallel_world_size"):
        return WorldSize(
            mpu.get_data_parallel_world_size(), "from mpu.get_data_parallel_world_size()"
        )
    if dist.is_initialized():
        whole = WorldSize(dist.get_world_size(), "from the process group")
    elif "WORLD_SIZE" in os.environ:
        whole = WorldSize(_env_world_size(), "from environment variable WORLD_SIZE")
    else:
        whole = WorldSize(1, "since there is no process group and WORLD_SIZE is not set")
    for name in ("get_model_parallel_world_size", "get_sequence_parallel_world_size"):
        if mpu is not None and hasattr(mpu, name):
            other = getattr(mpu, name)()
            whole = WorldSize(
                whole.size // other, f"{whole.source}, divided by {other} from mpu.{name}()"
            )
    return whole


def _env_world_size() -> int:
    text = os.environ["WORLD_SIZE"]
    if not text.isdecimal() or int(text) < 1:
        raise DeepSpeedConfigError(
            f"environment variable WORLD_SIZE is {text!r}; it must be a positive integer "
            "(launchers set it)"
        )
    return int(text)


def read_tree(
    config: str | os.PathLike[str] | dict[str, Any],
) -> tuple[TrainingConfig, dict[str, Any]]:
    """Return the typed configuration, and the dict of present names that it was read from."""
    # startup: the models need pydantic, whose import alone is longer than deepspeed's may be.
    from deepspeed.runtime.config_models.reader import (
        apply_deprecated_names,
        apply_dotted_keys,
        read_block,
        without_unread_keys,
    )
    from deepspeed.runtime.config_models.refusals import refuse_unsupported
    from deepspeed.runtime.config_models.training import TrainingConfig

    param_dict = load_config(config)
    apply_dotted_keys(TrainingConfig, param_dict)
    apply_deprecated_names(param_dict)
    tree = read_block(TrainingConfig, without_unread_keys(TrainingConfig, param_dict))
    refuse_unsupported(tree, param_dict)
    return tree, param_dict


class DeepSpeedConfig:
    """The configuration of one engine.

    Args:
        config: dict, path of a JSON or hjson file, or base64-encoded JSON; a dict is not modified.
        mpu: model-parallel unit that knows the data-parallel size.
        mesh_device: device mesh with a dimension named ``data_parallel``.

    Attributes:
        tree: the typed configuration, with the batch numbers filled in.
        world_size: number of data-parallel ranks.
        sequence_parallel_size: number of ranks that share a sequence.
        train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps: resolved
            batch numbers.

    Raises:
        DeepSpeedConfigError: the configuration cannot be read, is wrong, or asks for what is not
            supported; the text names every offending key, its value and the remedy.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | dict[str, Any],
        mpu: object = None,
        mesh_device: object = None,
    ) -> None:
        # startup: the models need pydantic, whose import alone is longer than deepspeed's may be.
        from deepspeed.runtime.config_models.refusals import inert_keys_of

        self.tree, param_dict = read_tree(config)
        world = self._beside_tensors(data_parallel_world_size(mpu, mesh_device), mpu, mesh_device)
        world = self._beside_sequences(world, mpu, mesh_device)
        self._check_together(world)
        inert = list(inert_keys_of(self.tree, param_dict))
        if inert:
            warn_once(f"configuration keys without effect: {', '.join(inert)}")
        self.mesh_device = mesh_device
        self.world_size = world.size
        self.global_rank = (
            dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        )
        self._param_dict = param_dict
        given = self._elastic_batch_sizes() or (
            self._train_batch_size(world),
            self.tree.train_micro_batch_size_per_gpu,
            self.tree.gradient_accumulation_steps,
        )
        self._set_batch_sizes(resolve_batch_sizes(*given, world))

    def _elastic_batch_sizes(self) -> tuple[int, int, int] | None:
        """Return what an enabled ``elasticity`` block takes for these ranks; None without one."""
        block = self.tree.elasticity
        if not block.enabled:
            return None
        if dist.is_initialized():
            ranks = dist.get_world_size()
        elif "WORLD_SIZE" in os.environ:
            ranks = _env_world_size()
        else:
            ranks = self.world_size * block.model_parallel_size
        self.elastic_model_parallel_size = block.model_parallel_size
        self.num_gpus_per_node = block.num_gpus_per_node
        return elastic_batch_sizes(self._param_dict, self.world_size, ranks)

    def _beside_tensors(self, world: WorldSize, mpu: object, mesh_device: object) -> WorldSize:
        """Divide `world` by `tensor_parallel.autotp_size`, unless an mpu says who shares layers."""
        size = self.tree.tensor_parallel.autotp_size
        if size < 2 or mpu is not None:
            return world
        if mesh_device is not None or (self.tree.sequence_parallel_size or 1) > 1:
            raise DeepSpeedConfigError(
                f"tensor_parallel.autotp_size: {size} beside sequence parallelism is not "
                "supported; use one of them, or an mpu that knows both"
            )
        if world.size % size:
            raise DeepSpeedConfigError(
                f"tensor_parallel.autotp_size: {size} does not divide the {world.size} ranks "
                f"({world.source}); use a size that does"
            )
        source = f"{world.source}, divided by tensor_parallel.autotp_size"
        return WorldSize(world.size // size, source)

    def _train_batch_size(self, world: WorldSize) -> int | None:
        # accelerate and transformers, which fill it in where it is "auto", count a batch for every
        # rank, also where `tensor_parallel.autotp_size` of them share one.
        tree, size = self.tree, self.tree.tensor_parallel.autotp_size
        train, micro = tree.train_batch_size, tree.train_micro_batch_size_per_gpu
        steps = tree.gradient_accumulation_steps
        if size < 2 or train is None or micro is None or steps is None:
            return train
        if train != micro * steps * world.size * size:
            return train
        warn_once(
            f"train_batch_size: {train} counts a batch for each of the {size} ranks that share "
            f"one (tensor_parallel.autotp_size); it is {train // size}"
        )
        return train // size

    def _beside_sequences(self, world: WorldSize, mpu: Any, mesh_device: Any) -> WorldSize:
        """Divide `world` by `sequence_parallel_size`, unless an mpu or a mesh says who shares."""
        tree = self.tree
        wanted = tree.sequence_parallel_size
        if mpu is None and mesh_device is None:
            self.sequence_parallel_size = wanted or 1
            if world.size % self.sequence_parallel_size:
                raise DeepSpeedConfigError(
                    f"sequence_parallel_size: {wanted} does not divide the {world.size} ranks "
                    f"({world.source}); use one that does"
                )
            if self.sequence_parallel_size > 1:
                source = f"{world.source}, divided by sequence_parallel_size"
                world = WorldSize(world.size // self.sequence_parallel_size, source)
        elif mpu is not None:
            getter = getattr(mpu, "get_sequence_parallel_world_size", None)
            self.sequence_parallel_size = int(getter()) if getter is not None else 1
        else:
            self.sequence_parallel_size = mesh_device.size() // world.size
        if wanted is not None and wanted != self.sequence_parallel_size:
            raise DeepSpeedConfigError(
                f"sequence_parallel_size: {wanted}, but the {'mesh' if mpu is None else 'mpu'} has "
                f"{self.sequence_parallel_size} sequence-parallel ranks; remove the key, or make "
                "them equal"
            )
        if tree.data_parallel_size not in (None, world.size):
            raise DeepSpeedConfigError(
                f"data_parallel_size: {tree.data_parallel_size}, but there are {world.size} "
                f"data-parallel ranks ({world.source}); remove the key, or make it that"
            )
        return world

    def _set_batch_sizes(self, sizes: BatchSizes) -> None:
        for name, value in sizes._asdict().items():
            setattr(self, name, value)
            setattr(self.tree, name, value)
            self._param_dict[name] = value

    elastic_model_parallel_size: int
    num_gpus_per_node: int
    sequence_parallel_size: int
    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int

    def _check_together(self, world: WorldSize) -> None:
        tree = self.tree
        if tree.fp16.enabled and tree.bf16.enabled:
            raise DeepSpeedConfigError(
                "fp16.enabled and bf16.enabled are both true; enable one of them"
            )
        self._check_instances(world)
        stage = int(tree.zero_optimization.stage)
        overlaps = tree.zero_optimization.overlap_comm
        if not tree.managed_gradient_accumulation and stage < 2 and overlaps:
            raise DeepSpeedConfigError(
                "managed_gradient_accumulation: false supports ZeRO overlap_comm only with ZeRO "
                f"stage 2 or 3: at stage {stage} gradients are reduced when step() is called, and "
                "no backward is left to overlap with; use zero_optimization.overlap_comm: false"
            )
        bits = tree.reproducibility
        if tree.checkpoint.open_window == "repeat" and not bits.world_size_invariant:
            raise DeepSpeedConfigError(
                'checkpoint.open_window: "repeat" goes back to where in the data a step begins, '
                "which is known with reproducibility.world_size_invariant: true alone; use that, "
                'or "discard"'
            )
        digest_every = bits.digest_every
        if digest_every and not tree.watch.enabled:
            raise DeepSpeedConfigError(
                f"reproducibility.digest_every: {digest_every} writes digests into the record of a "
                "run, which watch.enabled: false does not write; use watch.enabled: true, or 0 and "
                "engine.state_digest()"
            )
        vocabulary = tree.vocabulary_size
        if tree.fp16.enabled and vocabulary and vocabulary % TENSOR_CORE_ALIGN_SIZE:
            warn_once(
                f"vocabulary_size: {vocabulary} is not a multiple of "
                f"{TENSOR_CORE_ALIGN_SIZE}; tensor cores will not be used for its matrices"
            )

    def _check_instances(self, world: WorldSize) -> None:
        zero = self.tree.zero_optimization
        count = zero.num_optimizer_instances
        if count > 1 and int(zero.stage) == 0:
            raise DeepSpeedConfigError(
                f"zero_optimization.num_optimizer_instances: {count} makes copies of sharded "
                "state, and zero_optimization.stage: 0 shards none; use stage 1, 2 or 3, or 1 "
                "instance"
            )
        if world.size % count:
            raise DeepSpeedConfigError(
                f"zero_optimization.num_optimizer_instances: {count} does not divide the "
                f"{world.size} data-parallel ranks ({world.source}); use one of "
                f"{divisors(world.size)}, or start another number of ranks"
            )
        if zero.stage != ZeroStageEnum.weights:
            return
        ranks = world.size * self.sequence_parallel_size
        count = instances_at_stage_3(count, zero.mics_shard_size, ranks)
        on_host = zero.offload_param is not None and zero.offload_param.device.value != "none"
        check_secondary(zero.zero_hpz_partition_size, count, ranks, on_host)
        # Past the validators, which have seen what was given; who shards asks this key alone.
        zero.__dict__["num_optimizer_instances"] = count

    # Upstream's names for parts of the tree.

    zero_config = Reading(lambda tree: tree.zero_optimization)
    zero_optimization_stage = Reading(lambda tree: tree.zero_optimization.stage)
    zero_enabled = Reading(lambda tree: tree.zero_optimization.stage > ZeroStageEnum.disabled)
    float16_config = Reading(lambda tree: tree.fp16)
    bfloat16_config = Reading(lambda tree: tree.bf16)
    amp_enabled = Reading(lambda tree: tree.amp.enabled)
    grad_accum_dtype = Reading(lambda tree: tree.data_types.grad_accum_dtype)
    param_dtype = Reading(lambda tree: tree.data_types.param_dtype)
    buffer_dtype = Reading(lambda tree: tree.data_types.buffer_dtype)
    torch_autocast_enabled = Reading(lambda tree: tree.torch_autocast.enabled)
    torch_autocast_dtype = Reading(
        lambda tree: parse_dtype(tree.torch_autocast.dtype, "torch_autocast.dtype")
    )
    torch_autocast_lower_precision_safe_modules = Reading(
        lambda tree: tree.torch_autocast.lower_precision_safe_modules
    )
    optimizer_params = Reading(lambda tree: tree.optimizer and tree.optimizer.params or None)
    scheduler_name = Reading(lambda tree: tree.scheduler and tree.scheduler.type)
    scheduler_params = Reading(lambda tree: tree.scheduler and tree.scheduler.params or None)
    seq_parallel_communication_data_type = Reading(
        lambda tree: parse_dtype(
            tree.seq_parallel_communication_data_type, "seq_parallel_communication_data_type"
        )
    )
    sparse_gradients_enabled = Reading(lambda tree: tree.sparse_gradients)
    checkpoint_tag_validation_enabled = Reading(
        lambda tree: tree.checkpoint.tag_validation != "IGNORE"
    )
    checkpoint_tag_validation_fail = Reading(lambda tree: tree.checkpoint.tag_validation == "FAIL")
    load_universal_checkpoint = Reading(lambda tree: tree.checkpoint.load_universal)
    use_node_local_storage = Reading(lambda tree: tree.checkpoint.use_node_local_storage)
    timers_config = Reading(lambda tree: tree.timers.throughput)
    activation_checkpointing_config = Reading(lambda tree: tree.activation_checkpointing)
    compile_config = Reading(lambda tree: tree.compile)
    tensor_parallel_config = Reading(lambda tree: tree.tensor_parallel)
    elasticity_enabled = Reading(lambda tree: tree.elasticity.enabled)

    @property
    def optimizer_name(self) -> str | None:
        """Name of the optimizer to build; in lower case where it is one of DeepSpeed's."""
        block = self.tree.optimizer
        if block is None:
            return None
        return block.type.lower() if block.type.lower() in DEEPSPEED_OPTIMIZERS else block.type

    @property
    def communication_data_type(self) -> torch.dtype | None:
        """Type that gradients are reduced in, None for their own."""
        if self.sequence_parallel_size > 1:
            return self.seq_parallel_communication_data_type
        return parse_dtype(self.tree.communication_data_type, "communication_data_type")

    @property
    def monitor_config(self) -> DeepSpeedMonitorConfig:
        """The four monitor blocks together."""
        # startup: as in the constructor.
        from deepspeed.runtime.config_models.features import DeepSpeedMonitorConfig

        names = DeepSpeedMonitorConfig.model_fields
        return DeepSpeedMonitorConfig(**{name: getattr(self.tree, name) for name in names})

    def __getattr__(self, name: str) -> Any:
        """Read a top-level key, such as ``gradient_clipping``, under its own name."""
        tree = self.__dict__.get("tree")
        if tree is not None and name in type(tree).model_fields:
            return getattr(tree, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def print_user_config(self) -> None:
        """Print what the user gave, as JSON, on rank 0 and whatever the log level."""
        given = _without_secrets(self._param_dict)
        text = json.dumps(given, sort_keys=True, indent=4, cls=ScientificNotationEncoder)
        print_dist(f"  json = {text}", ranks=[0])

    def print(self, name: str) -> None:
        """Print the resolved configuration under a headline, and what the user gave."""
        resolved = _without_secrets(self.tree.model_dump(mode="json", by_alias=True, fallback=str))
        lines = [
            f"  {key.ljust(40, '.')} {json.dumps(value)}" for key, value in sorted(resolved.items())
        ]
        print_dist("\n".join([f"{name}:", *lines]), ranks=[0])
        self.print_user_config()


def _without_secrets(value: object) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        key: "***" if key == "api_key" and item else _without_secrets(item)
        for key, item in value.items()
    }


class DeepSpeedConfigWriter:
    """Collects keys and writes them as a JSON file."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = data if data is not None else {}

    def add_config(self, key: str, value: object) -> None:
        """Set one key."""
        self.data[key] = value

    def load_config(self, filename: str) -> None:
        """Replace the keys by those of a JSON file."""
        with open(filename, encoding="utf-8") as file:
            self.data = json.load(file, object_pairs_hook=dict_raise_error_on_duplicate_keys)

    def write_config(self, filename: str) -> None:
        """Write the keys to a JSON file."""
        with open(filename, "w", encoding="utf-8") as file:
            json.dump(self.data, file)
