"""What stage 0 and `BF16_Optimizer` allocate on each rank: the formulas of docs/devices.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.runtime.gradients.local_accumulator import WIDENED_NUMEL
from deepspeed.runtime.optimizers.group_layout import SHARD_ALIGNMENT
from deepspeed.runtime.sharding.fragments import FragmentTable
from deepspeed.runtime.zero.estimates.kept_state import FP32_BYTES
from deepspeed.runtime.zero.estimates.stages_1_and_2 import ADAM_MOMENTS


@dataclass(frozen=True)
class WholeGradientStates:
    """Bytes on one rank that holds all gradients whole.

    Attributes:
        masters: fp32 masters; 0 where the parameters are their own.
        grads: The buffer that is reduced; in fp32 where the model has 16 bits, because gradients in
            its dtype use the same memory.
        arriving: Gradients of a backward that are not in the buffer yet.
        widened: Of those, what is converted to fp32 at a time.
    """

    params: int
    masters: int
    grads: int
    moments: int
    arriving: int
    widened: int

    @property
    def device(self) -> int:
        """Peak on a device, without activations and frozen parameters."""
        resident = self.params + self.masters + self.grads + self.moments
        return resident + self.arriving + self.widened


def plan_whole_gradients(
    numels: Sequence[int],
    *,
    model_bytes: int = 4,
    moments: int = ADAM_MOMENTS,
    fp32_accumulation: bool = False,
    num_shards: int = 1,
    immediate: bool = False,
) -> WholeGradientStates:
    """Plan a rank at stage 0, or with `BF16_Optimizer`.

    Args:
        numels: Elements of each trainable parameter; they form one optimizer group.
        model_bytes: Bytes of a parameter, 2 or 4.
        moments: fp32 numbers that the optimizer keeps per parameter (Adam: 2, momentum: 1).
        fp32_accumulation: `data_types.grad_accum_dtype` is "fp32", in a model of 16 bits.
        num_shards: Ranks that share masters and moments (an optimizer instance's).
        immediate: `bf16.immediate_grad_update`.
    """
    is_half = model_bytes != FP32_BYTES
    table = FragmentTable.build(numels, num_shards, SHARD_ALIGNMENT)
    largest = max(numels, default=0)
    # An accumulator takes all gradients of a micro-batch at the end of its backward.
    together = fp32_accumulation and not immediate
    arriving = sum(numels) if together else largest
    shard = table.shard_numel * FP32_BYTES
    return WholeGradientStates(
        params=table.padded_numel * model_bytes,
        masters=shard if is_half else 0,
        grads=table.padded_numel * FP32_BYTES,
        moments=moments * shard,
        arriving=arriving * model_bytes,
        widened=min(WIDENED_NUMEL, sum(numels)) * FP32_BYTES if together else 0,
    )
