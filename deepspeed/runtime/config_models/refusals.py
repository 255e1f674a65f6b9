"""What this release does not honour, as data: refused values, and keys without effect.

When a feature arrives, its rows are deleted here, or ``needs=`` of its keys, and nothing else
changes. ``reader`` has checked types before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

from pydantic import BaseModel

from deepspeed.runtime.config_models.base import needs, nested_model
from deepspeed.runtime.config_models.training import TrainingConfig
from deepspeed.runtime.config_models.zero import OTHER_STAGES, STAGE_3
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum


class Scope(Enum):
    """How much a refusal refuses."""

    VALUE = "value"  # one value, or kind of value, of a key that is honoured otherwise
    KEY = "key"  # every value but the default
    FEATURE = "feature"  # the key switches a feature on; those beside it mean nothing without it


class Refusal(NamedTuple):
    """A value that is refused: where, when (asked of what is not None), and what to do instead."""

    path: str
    when: Callable[[Any], bool]
    remedy: str
    scope: Scope = Scope.KEY


class Inert(NamedTuple):
    """A key that changes nothing while ``without`` is not there; set to another value than its
    default it is named in one warning.
    """

    path: str
    without: str


LATER = "comes in a later release"
LATER_MANY = "come in a later release"
OUT = "is out of scope"
ONEBIT = ("onebitadam", "onebitlamb", "zerooneadam")
MUP = ("muadam", "muadamw", "musgd")


def _on(value: Any) -> bool:
    return bool(value)


def _off(value: Any) -> bool:
    return not value


def _given(value: Any) -> bool:
    return True


def _above_one(value: Any) -> bool:
    return bool(value > 1)


def _enabled_somewhere(value: Any) -> bool:
    """Whether a free-form block switches anything on."""
    if not isinstance(value, dict):
        return False
    return any(
        _enabled_somewhere(v) or (isinstance(v, bool) and v and key == "enabled")
        for key, v in value.items()
    )


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "zero_optimization.offload_optimizer.device",
        lambda v: v == OffloadDeviceEnum.nvme,
        f'NVMe offload {LATER}; use "cpu"',
        Scope.VALUE,
    ),
    Refusal(
        "zero_optimization.offload_optimizer.super_offload", _on, f"SuperOffload {LATER}; use false"
    ),
    Refusal("zero_optimization.zenflow", _given, f"ZenFlow {LATER}; remove the block"),
    Refusal(
        "zero_optimization.legacy_stage1", _on, "there is one implementation of stage 1; use false"
    ),
    Refusal(
        "zero_optimization.zero_quantized_weights",
        _on,
        f"gathering rounded weights, which are not those of one process, {LATER}; use false",
    ),
    Refusal(
        "zero_optimization.zero_quantized_nontrainable_weights",
        _on,
        f"gathering rounded weights, which are not those of one process, {LATER}; use false",
    ),
    Refusal(
        "zero_optimization.zero_quantized_gradients",
        _on,
        f"reducing rounded gradients, which are not those of one process, {LATER}; use false",
    ),
    Refusal(
        "zero_optimization.zeropp_loco_param",
        _given,
        f"it needs quantized gradients, which {LATER_MANY}; remove the key",
    ),
    Refusal(
        "optimizer.type",
        lambda v: str(v).lower() in ONEBIT,
        f'1-bit optimizers {LATER_MANY}; use "Adam" or "Lamb"',
        Scope.VALUE,
    ),
    Refusal(
        "optimizer.type",
        lambda v: str(v).lower() in MUP,
        'pass the muP optimizer of package "mup" as optimizer=',
        Scope.VALUE,
    ),
    Refusal("optimizer.legacy_fusion", _on, "there is one fused optimizer; use false"),
    Refusal(
        "optimizer.params.max_grad_norm",
        _on,
        'it is no optimizer parameter; set "gradient_clipping"',
        Scope.VALUE,
    ),
    Refusal(
        "fp16.fp16_master_weights_and_grads", _on, f"fp16 master weights {LATER_MANY}; use false"
    ),
    Refusal(
        "bf16.bf16_master_weights_and_grads", _on, f"bf16 master weights {LATER_MANY}; use false"
    ),
    Refusal("bf16.bf16_optimizer_states", _on, f"bf16 optimizer state {LATER}; use false"),
    Refusal(
        "amp.enabled",
        _on,
        'Apex AMP is not supported; use "fp16", "bf16" or "torch_autocast"',
        Scope.FEATURE,
    ),
    Refusal(
        "msamp.enabled",
        _on,
        'MS-AMP is not supported; use "fp16", "bf16" or "torch_autocast"',
        Scope.FEATURE,
    ),
    Refusal(
        "sparse_gradients", _on, f"sparse gradients {LATER_MANY}; use false and dense embeddings"
    ),
    Refusal(
        "disable_allgather",
        _on,
        'use false; "zero_optimization.allgather_partitions": false broadcasts',
    ),
    Refusal("graph_harvesting", _on, f"it {LATER}; use false"),
    Refusal(
        "data_efficiency.data_routing.enabled",
        _on,
        "which of a layer's arguments have to be cut with its tokens nothing says; use false, and "
        "for shorter sequences at the beginning curriculum_learning",
        Scope.FEATURE,
    ),
    Refusal(
        "data_efficiency.data_sampling.dynamic_batching.enabled",
        _on,
        "by what the losses of unequal batches are weighed only the script knows; use false, and "
        "the loop of docs/data.md",
        Scope.FEATURE,
    ),
    Refusal(
        "checkpoint.writer.type",
        lambda v: v == "MOCK",
        'it writes nothing that could be loaded; use "torch", "fast" or "dcp"',
        Scope.VALUE,
    ),
    Refusal(
        "checkpoint.writer.data_parallel",
        _given,
        "every rank writes files of its own, and ranks of a pipeline stage share its layers by "
        "checkpoint.parallel_write; remove the key",
    ),
    Refusal("checkpoint.writer.io_multiplier", _above_one, "a byte is written once; use 1"),
    Refusal(
        "nebula.enabled",
        _on,
        "Nebula is not supported; use false and save to a file system",
        Scope.FEATURE,
    ),
    Refusal(
        "datastates_ckpt.enabled",
        _on,
        "DataStates is not supported; use false and save to a file system",
        Scope.FEATURE,
    ),
    Refusal(
        "pipeline.partition",
        lambda v: v != "best",
        "give it to PipelineModule(partition_method=...), which splits the layers",
    ),
    Refusal(
        "pipeline.seed_layers",
        _on,
        "give it to PipelineModule(seed_layers=True), which builds the layers",
    ),
    Refusal(
        "tensor_parallel.tensor_parallel.tp_size",
        _above_one,
        "it is of inference; use tensor_parallel.autotp_size",
    ),
    Refusal(
        "tensor_parallel.tensor_parallel.tp_grain_size",
        _above_one,
        "slices are of whole heads, or of single elements; use 1",
    ),
    Refusal(
        "tensor_parallel.tensor_parallel.mpu",
        _given,
        "give it to deepspeed.initialize(mpu=...)",
    ),
    Refusal(
        "tensor_parallel.tensor_parallel.tp_group",
        _given,
        "give deepspeed.initialize(mpu=...) an object that knows the group",
    ),
    Refusal(
        "tensor_parallel.injection_policy_tuple",
        _given,
        "use tensor_parallel.partition_config",
    ),
    Refusal(
        "tensor_parallel.keep_module_on_host",
        _on,
        "layers are cut where the model is, and then moved; use false and a model on the host",
    ),
    Refusal("tensor_parallel.replace_with_kernel_inject", _on, f"inference {OUT}; use false"),
    Refusal(
        "compile.deepcompile",
        _on,
        f"DeepCompile {LATER}; use false, and engine.compile() for torch.compile",
        Scope.FEATURE,
    ),
    Refusal("hybrid_engine.enabled", _on, f"inference {OUT}; use false", Scope.FEATURE),
    Refusal("autotuning.enabled", _on, f"autotuning {OUT}; use false", Scope.FEATURE),
    Refusal("progressive_layer_drop.enabled", _on, f"it {LATER}; use false", Scope.FEATURE),
    Refusal("eigenvalue.enabled", _on, f"quantized training {OUT}; use false", Scope.FEATURE),
    Refusal(
        "quantize_training.enabled", _on, f"quantized training {OUT}; use false", Scope.FEATURE
    ),
    Refusal("compression_training", _enabled_somewhere, f"compression {OUT}; remove the block"),
    Refusal("weight_quantization", _on, f"weight quantization {OUT}; remove the block"),
    Refusal("sparse_attention", _on, f"sparse attention {OUT}; remove the block"),
)

AT_STAGE_3: tuple[Refusal, ...] = (
    Refusal(
        "zero_optimization.offload_param.device",
        lambda v: v == OffloadDeviceEnum.nvme,
        f'NVMe offload {LATER}; use "cpu"',
        Scope.VALUE,
    ),
    Refusal(
        "zero_optimization.mics_hierarchical_params_gather",
        _on,
        "a gather of mics_shard_size ranks is one collective, whose way over nodes is the "
        "backend's; use false",
    ),
    Refusal("zero_optimization.elastic_checkpoint", _on, f"at stage 3 it {LATER}; use false"),
    Refusal(
        "zero_optimization.use_all_reduce_for_fetch_params",
        _on,
        "it moves twice the bytes; use false",
    ),
    Refusal(
        "zero_optimization.allgather_sequential",
        _on,
        "use false, and stage3_prefetch_bucket_size 0 for one gather at a time",
    ),
    Refusal("zero_optimization.override_module_apply", _off, f"it {LATER}; use true"),
    Refusal(
        "zero_optimization.enable_sanity_checks",
        _on,
        'use false, and "verify": {"streams": true} to check',
    ),
)
"""What only stage 3 does not honour."""

BELOW_STAGE_3: tuple[Refusal, ...] = (
    Refusal(
        "zero_optimization.offload_optimizer.ratio",
        lambda v: v != 1.0,
        f"a part is offloaded at {STAGE_3} alone; use 1.0, or stage 3",
    ),
)
"""What only stage 3 honours, and would change what others do."""


def _inert_keys(model: type[BaseModel], prefix: str = "") -> Iterator[Inert]:
    for name, field in model.model_fields.items():
        without, inner = needs(field), nested_model(field)
        if without is not None:
            yield Inert(prefix + name, without)
        elif inner is not None:
            yield from _inert_keys(inner, f"{prefix}{name}.")


INERT = tuple(_inert_keys(TrainingConfig))


def value_at(tree: BaseModel, path: str) -> Any:
    """Return the value at a dotted path of field names, or None below a block that is absent."""
    value: Any = tree
    for name in path.split(".") if path else ():
        if value is None:
            return None
        value = value.get(name) if isinstance(value, dict) else getattr(value, name)
    return value


def as_given(path: str, given: Mapping[str, Any]) -> str:
    """Return a dotted path with the names that the user wrote: of a key with an alias, which is
    upstream's name, that one or the other.
    """
    names: list[str] = []
    model: type[BaseModel] | None = TrainingConfig
    block: Any = given
    for name in path.split("."):
        field = None if model is None else model.model_fields.get(name)
        there = block if isinstance(block, dict) else {}
        names.append(field.alias if field and field.alias and name not in there else name)
        block, model = there.get(names[-1]), nested_model(field) if field else None
    return ".".join(names)


def refusals_of(tree: TrainingConfig, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line per refused value: key as in ``given``, value, remedy."""
    has_stage_3 = tree.zero_optimization.stage == ZeroStageEnum.weights
    for refusal in (*REFUSALS, *(AT_STAGE_3 if has_stage_3 else BELOW_STAGE_3)):
        value = value_at(tree, refusal.path)
        if value is not None and refusal.when(value):
            shown = getattr(value, "value", value)
            path = as_given(refusal.path, given)
            yield f"{path}: {shown!r} is not supported: {refusal.remedy}"


def inert_keys_of(tree: TrainingConfig, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield ``key=value (has no effect without ...)`` for each key that was changed from its
    default in vain, as it is called in ``given``.
    """
    has_stage_3 = tree.zero_optimization.stage == ZeroStageEnum.weights
    there = STAGE_3 if has_stage_3 else OTHER_STAGES
    for inert in INERT:
        block_path, _, name = inert.path.rpartition(".")
        for key, value in _changed(value_at(tree, block_path)):
            if key == name and inert.without != there:
                path = as_given(inert.path, given)
                yield f"{path}={value!r} (has no effect without {inert.without})"
    yield from _keys_of_absent_features(tree)
    if "autotp_size" not in tree.tensor_parallel.model_fields_set:
        for key, value in _changed(tree.tensor_parallel):
            path = as_given(f"tensor_parallel.{key}", given)
            yield f"{path}={value!r} (has no effect without autotp_size)"
    zero = tree.zero_optimization
    offload = zero.offload_optimizer
    if (
        offload
        and offload.device != OffloadDeviceEnum.none
        and zero.stage == ZeroStageEnum.disabled
    ):
        yield (
            f"zero_optimization.offload_optimizer.device={offload.device.value!r} "
            "(has no effect at stage 0)"
        )
    if (
        zero.offload_param
        and zero.offload_param.device != OffloadDeviceEnum.none
        and not has_stage_3
    ):
        yield (
            f"zero_optimization.offload_param.device={zero.offload_param.device.value!r} "
            f"(has no effect without {STAGE_3})"
        )


def _keys_of_absent_features(tree: TrainingConfig) -> Iterator[str]:
    """The same of keys beside the switch of a refused feature that was not given; who gives it, and
    so says off, knows.
    """
    for refusal in REFUSALS:
        if refusal.scope is Scope.FEATURE:
            block_path, _, switch = refusal.path.rpartition(".")
            block = value_at(tree, block_path)
            if block is not None and switch not in block.model_fields_set:
                for key, value in _changed(block):
                    yield f"{block_path}.{key}={value!r} (has no effect without {switch})"


def _changed(block: BaseModel | None) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a block that were given another value than their default."""
    if block is None:
        return
    for name, field in type(block).model_fields.items():
        value = getattr(block, name)
        if name in block.model_fields_set and value != field.get_default(call_default_factory=True):
            yield name, value
    yield from (block.model_extra or {}).items()


def refuse_unsupported(tree: TrainingConfig, given: Mapping[str, Any]) -> None:
    """Raise for everything in the configuration that this release does not honour.

    Args:
        tree: the configuration.
        given: what it was read from, for the names.

    Raises:
        DeepSpeedConfigError: one line per refused value.
    """
    lines = list(refusals_of(tree, given))
    if lines:
        raise DeepSpeedConfigError("\n".join(lines))
