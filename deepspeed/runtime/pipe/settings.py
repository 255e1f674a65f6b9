"""Which configurations a pipeline honours, and what it says of the others."""

from __future__ import annotations

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.pipe.module import PipelineModule


def apply_settings(config: DeepSpeedConfig, module: PipelineModule) -> str:
    """Check the configuration against the module, pass on to it what is said of its layers, and
    return the name of the schedule.

    A `DeepSpeedConfigError` names the key of what a pipeline cannot do; nothing was changed then.
    """
    _check_gradients(config)
    schedule = _check_block(config, module)
    block = config.tree.pipeline
    if block.activation_checkpoint_interval > 0:
        module.set_checkpoint_interval(block.activation_checkpoint_interval)
    if not block.use_reentrant:
        # startup: most pipelines keep their activations
        from deepspeed.runtime.activation_checkpointing import checkpointing

        module.activation_checkpoint_func = checkpointing.non_reentrant_checkpoint
    module.checkpoint_parallel_write_pipeline = config.tree.checkpoint.parallel_write.pipeline_stage
    return schedule


def _check_gradients(config: DeepSpeedConfig) -> None:
    stage = int(config.tree.zero_optimization.stage)
    if stage > 1:
        raise DeepSpeedConfigError(
            f"zero_optimization.stage: {stage} with a PipelineModule: it would reduce each "
            "micro-batch's gradients by itself while the pipeline runs, and save nothing, because "
            "the gradients of all micro-batches are summed anyway. Use stage 1"
        )
    if not config.tree.managed_gradient_accumulation:
        raise DeepSpeedConfigError(
            "managed_gradient_accumulation: false is not supported with pipeline parallelism: the "
            "schedule decides the boundary; remove the key"
        )


def _check_block(config: DeepSpeedConfig, module: PipelineModule) -> str:
    block, chunks = config.tree.pipeline, module.num_model_chunks
    if block.stages not in ("auto", module.num_stages):
        raise DeepSpeedConfigError(
            f"pipeline.stages: {block.stages}, but the PipelineModule was made with "
            f"num_stages={module.num_stages}; use 'auto'"
        )
    schedule = block.schedule
    if schedule == "auto":
        schedule = "interleaved" if chunks > 1 else "1f1b"
    if (schedule == "interleaved") != (chunks > 1):
        raise DeepSpeedConfigError(
            f"pipeline.schedule: {schedule!r} with PipelineModule(num_model_chunks={chunks}): "
            "'interleaved' runs several model chunks per stage, the others run one; use 'auto'"
        )
    if (
        schedule == "zero_bubble"
        and max(block.activation_checkpoint_interval, module.activation_checkpoint_interval) > 0
    ):
        raise DeepSpeedConfigError(
            "pipeline.schedule: 'zero_bubble' with activation checkpointing: the backward of a "
            "recomputed layer cannot be run in two parts. Use '1f1b', or "
            "activation_checkpoint_interval 0"
        )
    if (
        block.pipe_partitioned or block.grad_partitioned
    ) and module.grid.get_slice_parallel_world_size() > 1:
        raise DeepSpeedConfigError(
            "pipeline.pipe_partitioned, pipeline.grad_partitioned: true with tensor parallelism: "
            "activations and gradients travel whole between stages; use false"
        )
    return schedule
