"""What this release does not honour, as data: refused values, and keys without effect. When a
feature arrives, its rows are deleted here, or ``needs=`` of its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

from pydantic import BaseModel

from deepspeed.runtime.config_models.base import needs, nested_model
from deepspeed.runtime.config_models.enums import OffloadDeviceEnum, ZeroStageEnum
from deepspeed.runtime.config_models.training import TrainingConfig
from deepspeed.runtime.config_models.zero import (
    NVME,
    NVME_PARAMS,
    NVME_STATE,
    OTHER_STAGES,
    STAGE_3,
)
from deepspeed.runtime.config_utils import DeepSpeedConfigError


class Scope(Enum):
    """How much a refusal refuses."""

    VALUE = "value"  # one value, or kind of value, of a key that is honoured otherwise
    KEY = "key"  # every value but the default
    FEATURE = "feature"  # the key switches a feature on; those beside it mean nothing without it


class Refusal(NamedTuple):
    """A value that is refused: where, what to do instead, and when (asked of what is not None).
    Keys that stand `apart` in the block of a feature's switch mean something without it.
    """

    path: str
    remedy: str
    when: Callable[[Any], bool] = bool
    scope: Scope = Scope.KEY
    apart: tuple[str, ...] = ()


def feature(switch: str, remedy: str, apart: tuple[str, ...] = ()) -> Refusal:
    """Refuse the feature of a switch."""
    return Refusal(switch, remedy, scope=Scope.FEATURE, apart=apart)


class Inert(NamedTuple):
    """A key that has no effect while ``without`` is not there, which one warning then says."""

    path: str
    without: str


def _under(block: str, *refusals: Refusal) -> tuple[Refusal, ...]:
    return tuple(refusal._replace(path=f"{block}.{refusal.path}") for refusal in refusals)


LATER = "comes in a later release"
LATER_MANY = "come in a later release"
OUT = "is out of scope"
ONEBIT = ("onebitadam", "onebitlamb", "zerooneadam")
MUP = ("muadam", "muadamw", "musgd")


def _given(value: object) -> bool:
    return True


def _above_one(value: int) -> bool:
    return value > 1


def _is_nvme(value: OffloadDeviceEnum) -> bool:
    return value == OffloadDeviceEnum.nvme


def _enabled_somewhere(value: object) -> bool:
    """Whether a free-form block switches anything on."""
    return isinstance(value, dict) and any(
        _enabled_somewhere(inner) or (inner is True and key == "enabled")
        for key, inner in value.items()
    )


_ROUNDED = f"rounded weights, which are not those of one process, {LATER}; use false"
_PRECISIONS = 'is not supported; use "fp16", "bf16" or "torch_autocast"'

REFUSALS: tuple[Refusal, ...] = (
    *_under(
        "zero_optimization",
        Refusal("offload_optimizer.super_offload", f"SuperOffload {LATER}; use false"),
        Refusal("zenflow", f"ZenFlow {LATER}; remove the block", _given),
        Refusal("legacy_stage1", "there is one implementation of stage 1; use false"),
        Refusal("zero_quantized_weights", f"gathering {_ROUNDED}"),
        Refusal("zero_quantized_nontrainable_weights", f"gathering {_ROUNDED}"),
        Refusal(
            "zero_quantized_gradients", f"reducing {_ROUNDED.replace('weights', 'gradients', 1)}"
        ),
        Refusal(
            "zeropp_loco_param",
            f"it needs quantized gradients, which {LATER_MANY}; remove the key",
            _given,
        ),
    ),
    Refusal(
        "optimizer.type",
        f'1-bit optimizers {LATER_MANY}; use "Adam" or "Lamb"',
        lambda v: str(v).lower() in ONEBIT,
        Scope.VALUE,
    ),
    Refusal(
        "optimizer.type",
        'pass the muP optimizer of package "mup" as optimizer=',
        lambda v: str(v).lower() in MUP,
        Scope.VALUE,
    ),
    Refusal("optimizer.legacy_fusion", "there is one fused optimizer; use false"),
    feature("amp.enabled", f"Apex AMP {_PRECISIONS}"),
    feature("msamp.enabled", f"MS-AMP {_PRECISIONS}"),
    Refusal("sparse_gradients", f"sparse gradients {LATER_MANY}; use false and dense embeddings"),
    Refusal(
        "disable_allgather", 'use false; "zero_optimization.allgather_partitions": false broadcasts'
    ),
    Refusal("graph_harvesting", f"it {LATER}; use false"),
    feature(
        "data_efficiency.data_routing.enabled",
        "which of a layer's arguments have to be cut with its tokens nothing says; use false, and "
        "for shorter sequences at the beginning curriculum_learning",
    ),
    feature(
        "data_efficiency.data_sampling.dynamic_batching.enabled",
        "by what the losses of unequal batches are weighed only the script knows; use false, and "
        "the loop of docs/data.md",
    ),
    *_under(
        "checkpoint.writer",
        Refusal(
            "type",
            'it writes nothing that could be loaded; use "torch", "fast" or "dcp"',
            lambda v: v == "MOCK",
            Scope.VALUE,
        ),
        Refusal(
            "data_parallel",
            "every rank writes files of its own, and ranks of a pipeline stage share its layers by "
            "checkpoint.parallel_write; remove the key",
            _given,
        ),
        Refusal("io_multiplier", "a byte is written once; use 1", _above_one),
    ),
    feature("nebula.enabled", "Nebula is not supported; use false and save to a file system"),
    feature(
        "datastates_ckpt.enabled",
        "DataStates is not supported; use false and save to a file system",
    ),
    Refusal(
        "pipeline.partition",
        "give it to PipelineModule(partition_method=...), which splits the layers",
        lambda v: v != "best",
    ),
    Refusal(
        "pipeline.seed_layers",
        "give it to PipelineModule(seed_layers=True), which builds the layers",
    ),
    *_under(
        "tensor_parallel",
        Refusal(
            "tensor_parallel.tp_size",
            "it is of inference; use tensor_parallel.autotp_size",
            _above_one,
        ),
        Refusal(
            "tensor_parallel.tp_grain_size",
            "slices are of whole heads, or of single elements; use 1",
            _above_one,
        ),
        Refusal("tensor_parallel.mpu", "give it to deepspeed.initialize(mpu=...)", _given),
        Refusal(
            "tensor_parallel.tp_group",
            "give deepspeed.initialize(mpu=...) an object that knows the group",
            _given,
        ),
        Refusal("injection_policy_tuple", "use tensor_parallel.partition_config", _given),
        Refusal(
            "keep_module_on_host",
            "layers are cut where the model is, and then moved; use false and a model on the host",
        ),
        Refusal("replace_with_kernel_inject", f"inference {OUT}; use false"),
    ),
    feature(
        "compile.deepcompile",
        f"DeepCompile {LATER}; use false, and engine.compile() for torch.compile",
        apart=("disable", "backend", "kwargs"),
    ),
    feature("hybrid_engine.enabled", f"inference {OUT}; use false"),
    feature("autotuning.enabled", f"autotuning {OUT}; use false"),
    feature("progressive_layer_drop.enabled", f"it {LATER}; use false"),
    feature("eigenvalue.enabled", f"quantized training {OUT}; use false"),
    feature("quantize_training.enabled", f"quantized training {OUT}; use false"),
    Refusal("compression_training", f"compression {OUT}; remove the block", _enabled_somewhere),
    Refusal("weight_quantization", f"weight quantization {OUT}; remove the block"),
    Refusal("sparse_attention", f"sparse attention {OUT}; remove the block"),
)

AT_STAGE_3 = _under(
    "zero_optimization",
    Refusal(
        "mics_hierarchical_params_gather",
        "a gather of mics_shard_size ranks is one collective, whose way over nodes is the "
        "backend's; use false",
    ),
    Refusal("elastic_checkpoint", f"at stage 3 it {LATER}; use false"),
    Refusal("use_all_reduce_for_fetch_params", "it moves twice the bytes; use false"),
    Refusal(
        "allgather_sequential",
        "use false, and stage3_prefetch_bucket_size 0 for one gather at a time",
    ),
    Refusal("override_module_apply", f"it {LATER}; use true", lambda v: not v),
    Refusal("enable_sanity_checks", 'use false, and "verify": {"streams": true} to check'),
)
"""What only stage 3 does not honour."""

BELOW_STAGE_3: tuple[Refusal, ...] = (
    Refusal(
        "zero_optimization.offload_optimizer.ratio",
        f"a part is offloaded at {STAGE_3} alone; use 1.0, or stage 3",
        lambda v: v != 1.0,
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
_INERT_BLOCKS = {inert.path.rpartition(".")[0] for inert in INERT}


def value_at(tree: BaseModel, path: str) -> Any:
    """Return the value at a dotted path of field names, or None below a block that is absent."""
    value: Any = tree
    for name in path.split(".") if path else ():
        if value is None:
            return None
        value = value.get(name) if isinstance(value, dict) else getattr(value, name)
    return value


def as_given(path: str, given: Mapping[str, Any]) -> str:
    """Return a dotted path with the names that the user wrote, fields' or aliases."""
    names: list[str] = []
    model: type[BaseModel] | None = TrainingConfig
    block: Any = given
    for name in path.split("."):
        field = None if model is None else model.model_fields.get(name)
        there = block if isinstance(block, dict) else {}
        names.append(field.alias if field and field.alias and name not in there else name)
        block, model = there.get(names[-1]), nested_model(field) if field else None
    return ".".join(names)


def _refusals_of(tree: TrainingConfig, given: Mapping[str, Any]) -> Iterator[str]:
    has_stage_3 = tree.zero_optimization.stage == ZeroStageEnum.weights
    for name in ("offload_optimizer", "offload_param"):
        offload = getattr(tree.zero_optimization, name)
        if offload and _is_nvme(offload.device) and offload.nvme_path is None:
            path = as_given(f"zero_optimization.{name}.device", given)
            yield f"{path}: 'nvme' needs nvme_path, a folder on the disk: add it"
    for refusal in (*REFUSALS, *(AT_STAGE_3 if has_stage_3 else BELOW_STAGE_3)):
        value = value_at(tree, refusal.path)
        if value is not None and refusal.when(value):
            shown = getattr(value, "value", value)
            path = as_given(refusal.path, given)
            yield f"{path}: {shown!r} is not supported: {refusal.remedy}"


def inert_keys_of(tree: TrainingConfig, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield ``key=value (has no effect without ...)`` for each key of ``given`` changed in vain."""
    has_stage_3 = tree.zero_optimization.stage == ZeroStageEnum.weights
    there = {STAGE_3 if has_stage_3 else OTHER_STAGES}
    params = tree.zero_optimization.offload_param
    if tree.zero_optimization.stage and _is_nvme(tree.zero_optimization.offload_optimizer_device):
        there |= {NVME_STATE, NVME}
    if has_stage_3 and params and _is_nvme(params.device):
        there |= {NVME_PARAMS, NVME}
    if tree.activation_checkpointing.nvme_path is not None:
        there.add(NVME)
    changed = {path: dict(_changed(value_at(tree, path))) for path in _INERT_BLOCKS}
    for inert in INERT:
        block_path, _, name = inert.path.rpartition(".")
        if name in changed[block_path] and inert.without not in there:
            path, value = as_given(inert.path, given), changed[block_path][name]
            yield f"{path}={value!r} (has no effect without {inert.without})"
    yield from _keys_of_absent_features(tree)
    if "autotp_size" not in tree.tensor_parallel.model_fields_set:
        for key, value in _changed(tree.tensor_parallel):
            path = as_given(f"tensor_parallel.{key}", given)
            yield f"{path}={value!r} (has no effect without autotp_size)"
    zero = tree.zero_optimization
    if zero.stage == ZeroStageEnum.disabled and not zero.ignore_unused_parameters:
        yield "zero_optimization.ignore_unused_parameters=False (has no effect at stage 0)"
    for name, is_in_vain, where in (
        ("offload_optimizer", zero.stage == ZeroStageEnum.disabled, "at stage 0"),
        ("offload_param", not has_stage_3, f"without {STAGE_3}"),
    ):
        offload = getattr(zero, name)
        if is_in_vain and offload and offload.device != OffloadDeviceEnum.none:
            yield (
                f"zero_optimization.{name}.device={offload.device.value!r} (has no effect {where})"
            )


def _keys_of_absent_features(tree: TrainingConfig) -> Iterator[str]:
    """Yield keys beside the switch of a refused feature, unless it is given and so says off."""
    for refusal in REFUSALS:
        if refusal.scope is Scope.FEATURE:
            block_path, _, switch = refusal.path.rpartition(".")
            block = value_at(tree, block_path)
            if block is not None and switch not in block.model_fields_set:
                for key, value in _changed(block):
                    if key not in refusal.apart:
                        yield f"{block_path}.{key}={value!r} (has no effect without {switch})"


def _changed(block: BaseModel | None) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a block that were given another value than their default."""
    if block is None:
        return
    given = block.model_fields_set
    for name, field in type(block).model_fields.items() if given else ():
        if name in given:
            value = getattr(block, name)
            if value != field.get_default(call_default_factory=True):
                yield name, value
    yield from (block.model_extra or {}).items()


def refuse_unsupported(tree: TrainingConfig, given: Mapping[str, Any]) -> None:
    """Raise one line for each value that this release does not honour, named as in ``given``."""
    lines = list(_refusals_of(tree, given))
    if lines:
        raise DeepSpeedConfigError("\n".join(lines))
