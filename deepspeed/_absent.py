"""What this release does not have, and what to say when a script asks for it."""

from __future__ import annotations

LATER = {
    "tp_model_init": "tensor parallelism",
    "set_tensor_model_parallel_rank": "tensor parallelism",
}
OUT_OF_SCOPE = (
    "InferenceEngine",
    "DeepSpeedInferenceConfig",
    "init_inference",
    "default_inference_config",
    "DeepSpeedHybridEngine",
    "DeepSpeedTransformerLayer",
    "DeepSpeedTransformerConfig",
    "replace_transformer_layer",
    "revert_transformer_layer",
    "inference",
    "module_inject",
    "compression",
    "autotuning",
)


def reason(package: str, name: str) -> str | None:
    """Why `package.name` is absent; None if it is not one of the known absences."""
    if name in LATER:
        return f"{package}.{name}: {LATER[name]} is not in this release; it comes in a later one"
    if name in OUT_OF_SCOPE:
        return (
            f"{package}.{name}: this project is for training; inference, compression and "
            "autotuning are out of scope"
        )
    return None
