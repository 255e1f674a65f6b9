"""Upstream's modules that have no file here, made when a script imports them.

Some give names that live elsewhere (`DOORS`); some are imported in the first lines of scripts that
may never use them, and explain when they are used (`STAND_INS`). All others raise an error that
says why they are absent, from the table in `_absent`. One finder at the end of `sys.meta_path` does
it: nothing that has a file is slower to import.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from deepspeed._absent import reason


class AbsentModuleError(ModuleNotFoundError):
    """A module of upstream's that is not here; the text says why, and what to use instead.

    Its `name` is None: `from package import module` hides an error that names the module.
    """


class StandIns(NamedTuple):
    """Names of a module that can be imported, and say why they are absent when they are used."""

    names: str
    why: str


_SWAPPABLE = {"MIN_SWAPPABLE_BYTES": "deepspeed.runtime.zero.offload_config"}

DOORS: dict[str, dict[str, str]] = {
    "deepspeed.checkpoint.reshape_3d_utils": dict.fromkeys(
        ("get_model_3d_descriptor", "model_3d_desc"), "deepspeed.checkpoint.zero_checkpoint"
    ),
    "deepspeed.constants": dict.fromkeys(
        ("TORCH_DISTRIBUTED_DEFAULT_PORT", "default_pg_timeout"), "deepspeed.comm.constants"
    ),
    "deepspeed.io.constants": dict.fromkeys(
        (
            "CLOSE_COUNT_KEY",
            "FILENO_COUNT_KEY",
            "FLUSH_COUNT_KEY",
            "INVALID_FD",
            "WRITE_BYTES_KEY",
            "WRITE_COUNT_KEY",
            "WRITE_SEC_KEY",
            "WRITE_SPEED_KEY",
        ),
        "deepspeed.io.base_file_writer",
    ),
    "deepspeed.io.mock_file_writer": {"MockFileWriter": "deepspeed.io.base_file_writer"},
    "deepspeed.io.py_file_writer": {"PyFileWriter": "deepspeed.io.base_file_writer"},
    "deepspeed.ops.lion.fused_lion": {"FusedLion": "deepspeed.ops.lion.lion"},
    "deepspeed.runtime.tensor_parallel.config": dict.fromkeys(
        ("TPConfig", "TPTrainingConfig"), "deepspeed.runtime.config_models.features"
    ),
    "deepspeed.runtime.zero.muon": {},
    "deepspeed.runtime.zero.muon.muon_optimizer": {"MuonWithAuxAdam": "deepspeed.ops.muon.muon"},
    "deepspeed.runtime.zero.muon.original_muon": {"MuonWithAuxAdam": "deepspeed.ops.muon.muon"},
    "deepspeed.runtime.swap_tensor": _SWAPPABLE,
    "deepspeed.runtime.swap_tensor.constants": _SWAPPABLE,
    "deepspeed.runtime.swap_tensor.optimizer_utils": _SWAPPABLE,
    "deepspeed.runtime.swap_tensor.utils": _SWAPPABLE,
    "deepspeed.runtime.torch_autocast": {"autocast_if_enabled": "deepspeed.runtime.engine"},
    "deepspeed.runtime.zero.mics_utils": dict.fromkeys(
        ("MiCS_CommGroups", "create_mics_comm_groups", "scale_tensors"),
        "deepspeed.runtime.zero.mics",
    ),
    "deepspeed.runtime.zero.leaf_module_config": dict.fromkeys(
        (
            "DEFAULT_LEAF_MODULE_CLASSES",
            "DEFAULT_LEAF_MODULE_NAMES",
            "DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
            "DeepSpeedZeroLeafModuleConfig",
        ),
        "deepspeed.runtime.config_models.zero",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator": {
        "PartitionedParameterCoordinator": "deepspeed.runtime.zero.gathering.coordinator"
    },
    "deepspeed.utils.config": {
        "DeepSpeedThroughputTimerConfig": "deepspeed.runtime.config_models.features"
    },
}
"""Module -> name -> the module that has it."""

_COMPRESSION = "this project is for training; compression is out of scope"
_RANDOM_LTD = "random layer-token drop is not in this release; curriculum_learning grows sequences"
_SPARSE = "sparse attention is out of scope; use torch's scaled_dot_product_attention with a mask"
_SPARSITY = (
    "SparsityConfig DenseSparsityConfig FixedSparsityConfig VariableSparsityConfig "
    "BigBirdSparsityConfig BSLongformerSparsityConfig LocalSlidingWindowSparsityConfig"
)
_ANALYSIS = (
    "index files are written by write_metric_index of "
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset; see docs/data.md"
)

STAND_INS: dict[str, StandIns] = {
    "deepspeed.compression": StandIns("", _COMPRESSION),
    "deepspeed.compression.compress": StandIns("init_compression redundancy_clean", _COMPRESSION),
    "deepspeed.ops.sparse_attention": StandIns(
        f"SparseSelfAttention BertSparseSelfAttention SparseAttentionUtils {_SPARSITY}", _SPARSE
    ),
    "deepspeed.ops.sparse_attention.sparsity_config": StandIns(_SPARSITY, _SPARSE),
    "deepspeed.runtime.data_pipeline.data_routing": StandIns("", _RANDOM_LTD),
    "deepspeed.runtime.data_pipeline.data_routing.helper": StandIns(
        "convert_to_random_ltd save_without_random_ltd remove_random_ltd_state_dict", _RANDOM_LTD
    ),
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": StandIns(
        "DataAnalyzer DistributedDataAnalyzer", _ANALYSIS
    ),
    "deepspeed.runtime.state_dict_factory": StandIns(
        "SDLoaderFactory SDLoaderBase MegatronSDLoader",
        "it belongs to inference; the command ds_to_universal makes files for other ranks",
    ),
    "deepspeed.sequence.fpdt_layer": StandIns(
        "FPDT_Attention FPDT_FFN FPDT_InputConstruct FPDT_LogitsLoss SequenceChunk",
        "attention in chunks of a sequence is not in this release; use "
        "deepspeed.sequence.layer.DistributedAttention, and for the loss TiledFusedLogitsLoss of "
        "deepspeed.runtime.sequence_parallel.ulysses_sp",
    ),
}


class _Unusable(type):
    """Type of `stand_in`'s classes."""

    why: str

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(cls.why)

    def __getattr__(cls, name: str) -> _Unusable:
        if name.startswith("_"):
            raise AttributeError(cls.why)
        return stand_in(f"{cls.__qualname__}.{name}", cls.__module__, cls.why)


def stand_in(name: str, module: str, why: str) -> _Unusable:
    """Make a class to import, derive from and assign to; calling it raises NotImplementedError."""
    return _Unusable(name, (), {"__module__": module, "__qualname__": name, "why": why})


class _Maker(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes the modules of the two tables, and raises for those that are absent."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a made module's spec; None for what is not upstream's or only asked after."""
        package, _, name = fullname.rpartition(".")
        if not (package + ".").startswith("deepspeed."):
            return None
        if is_made(fullname):
            # A package, so that what is asked for below it comes here too.
            return ModuleSpec(fullname, self, origin=__name__, is_package=True)
        parent = STAND_INS.get(package)
        why = f"{fullname}: {parent.why}" if parent else reason(package, name)
        if why is None or sys._getframe(2).f_globals.get("__name__") == "importlib.util":
            return None
        raise AbsentModuleError(why)

    def create_module(self, spec: ModuleSpec) -> None:
        """The import system's own."""

    def exec_module(self, module: ModuleType) -> None:
        full = module.__name__
        names = DOORS.get(full, {})
        stand_ins = STAND_INS.get(full)
        if stand_ins is not None:
            for name in stand_ins.names.split():
                setattr(module, name, stand_in(name, full, f"{full}.{name}: {stand_ins.why}"))

        def __getattr__(name: str) -> Any:
            if name in names:
                return getattr(importlib.import_module(names[name]), name)
            if is_made(f"{full}.{name}"):
                return importlib.import_module(f"{full}.{name}")
            if stand_ins is not None and not name.startswith("_"):
                raise AttributeError(f"{full}.{name}: {stand_ins.why}")
            raise AttributeError(f"module {full!r} has no attribute {name!r}")

        module.__dict__.update(
            __getattr__=__getattr__,
            __all__=[*names] if stand_ins is None else stand_ins.names.split(),
            __doc__=stand_ins.why if stand_ins else "Upstream's path of names that live elsewhere.",
        )


def is_made(full: str) -> bool:
    """Tell whether a module is one that is made here."""
    return full in DOORS or full in STAND_INS


sys.meta_path.append(_Maker())
