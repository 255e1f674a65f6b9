"""All fixes, in the order of their patches."""

from __future__ import annotations

import expert_norm
import fix1_bucket_streams
import fix2_hook_stream
import fix3_bf16_norm
import fix3_pipe_dtype
import fix3_zero_norm
import fix4_boundary_micro_batch
import gathered_writes
import loss_scale_step
import mesh_gradients
import stage0_loss_scale
import ulysses_layout
from fix import Fix

FIXES: tuple[Fix, ...] = (
    fix1_bucket_streams.FIX,
    fix2_hook_stream.FIX,
    fix3_zero_norm.FIX,
    fix3_bf16_norm.FIX,
    fix3_pipe_dtype.FIX,
    fix4_boundary_micro_batch.FIX,
    loss_scale_step.FIX,
    stage0_loss_scale.FIX,
    mesh_gradients.FIX,
    gathered_writes.FIX,
    expert_norm.FIX,
    ulysses_layout.FIX,
)
