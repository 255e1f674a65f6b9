"""Builders under upstream's names of ops that nothing is compiled for here: those that torch or a
module of this package serves instead, and those that are absent.

Owns: the names, what serves each, and what to say of an absent one. Called by: scripts that import
a builder to see whether it is there, and `deepspeed.ops.__compatible_ops__`.
"""

import importlib
from types import ModuleType

from .builder import OpBuilder, OpBuildError


class ServedBuilder(OpBuilder):
    """An op whose work a module does that needs no compiler.

    Attributes:
        MODULE: Which module; `load()` returns it.
    """

    MODULE: str = ""

    def absolute_name(self) -> str:
        """Return the module's name."""
        return self.MODULE

    def sources(self) -> list[str]:
        """Return nothing: there is nothing to compile."""
        return []

    def _incompatibility(self) -> str | None:
        return None

    def load(self, verbose: bool = True) -> ModuleType:
        """Return the module that serves."""
        return importlib.import_module(self.MODULE)


class AbsentBuilder(OpBuilder):
    """An op that this release does not have.

    Attributes:
        INSTEAD: What to use, or why there is nothing.
    """

    INSTEAD: str = ""

    def absolute_name(self) -> str:
        """Return the op's name: no module has it."""
        return self.NAME

    def sources(self) -> list[str]:
        """Return nothing: there is nothing to compile."""
        return []

    def is_prebuilt(self) -> bool:
        """Return False."""
        return False

    def _incompatibility(self) -> str | None:
        return f"it is not in this release; {self.INSTEAD}"

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """Raise.

        Raises:
            OpBuildError: Always, with what to use instead.
        """
        raise OpBuildError(f"op {self.name} cannot be used here: {self._incompatibility()}")


INFERENCE = "this project is for training"
SPARSE = "use torch's attention with a mask"
QUANTIZED = "quantized weights and gradients come in a later release"
COLLECTIVES = "collectives are torch's, on the host gloo's"

SERVED: dict[str, tuple[str, str]] = {
    "FusedAdamBuilder": ("fused_adam", "deepspeed.ops.adam.fused_adam"),
    "FusedLambBuilder": ("fused_lamb", "deepspeed.ops.lamb.fused_lamb"),
    "FusedLionBuilder": ("fused_lion", "deepspeed.ops.lion.lion"),
    "UtilsBuilder": ("utils", "deepspeed.ops.flattening"),
}
"""Class -> name of the op, module that does its work."""

ABSENT: dict[str, tuple[str, str]] = {
    "CCLCommBuilder": ("deepspeed_ccl_comm", COLLECTIVES),
    "ShareMemCommBuilder": ("deepspeed_shm_comm", COLLECTIVES),
    "DeepCompileBuilder": ("dc", "use engine.compile()"),
    "EvoformerAttnBuilder": ("evoformer_attn", "DeepSpeed4Science is out of scope"),
    "FPQuantizerBuilder": ("fp_quantizer", QUANTIZED),
    "FlashAttentionBuilder": ("flash_attn", "use torch's scaled_dot_product_attention"),
    "GDSBuilder": ("gds", 'use the op "async_io"'),
    "InferenceBuilder": ("transformer_inference", INFERENCE),
    "InferenceCoreBuilder": ("inference_core_ops", INFERENCE),
    "InferenceCutlassBuilder": ("cutlass_ops", INFERENCE),
    "NotImplementedBuilder": ("deepspeed_not_implemented", "it stands for ops that are not there"),
    "PackbitsBuilder": ("packbits", "1-bit optimizers come in a later release"),
    "PinMemoryBuilder": ("pin_memory", "use torch.Tensor.pin_memory"),
    "QuantizerBuilder": ("quantizer", QUANTIZED),
    "RaggedOpsBuilder": ("ragged_device_ops", INFERENCE),
    "RaggedUtilsBuilder": ("ragged_ops", INFERENCE),
    "RandomLTDBuilder": ("random_ltd", "random layer-token drop comes in a later release"),
    "SparseAttnBuilder": ("sparse_attn", SPARSE),
    "SpatialInferenceBuilder": ("spatial_inference", INFERENCE),
    "StochasticTransformerBuilder": ("stochastic_transformer", "use a layer of torch's"),
    "TransformerBuilder": ("transformer", "use a layer of torch's"),
}
"""Class -> name of the op, what to use instead."""


def _make() -> dict[str, type[OpBuilder]]:
    made: dict[str, type[OpBuilder]] = {}
    for cls, (name, module) in SERVED.items():
        about = {"NAME": name, "MODULE": module, "__doc__": f"{name}, which {module} serves."}
        made[cls] = type(cls, (ServedBuilder,), {**about, "__module__": __name__})
    for cls, (name, instead) in ABSENT.items():
        said = {"NAME": name, "INSTEAD": instead, "__doc__": f"{name}: not here; {instead}."}
        made[cls] = type(cls, (AbsentBuilder,), {**said, "__module__": __name__})
    return made


BUILDERS: dict[str, type[OpBuilder]] = _make()
"""Every builder of this file, by the name of its class."""

OTHER_OPS: dict[str, OpBuilder] = {cls.NAME: cls() for cls in BUILDERS.values()}
"""The same by the op's name, as `ALL_OPS`, which has those that are compiled."""
