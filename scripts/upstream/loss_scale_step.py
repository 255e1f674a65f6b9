"""Gradients are divided by the loss scale that they were multiplied with, also on the step where it
grows.
"""

from __future__ import annotations

import sys

import libcst as cst
from fix import Fix, program
from shapes import Place, assigns, calls
from trees import AlreadyFixed, Tree

ZERO = "deepspeed/runtime/zero"
FP16 = "deepspeed/runtime/fp16"
FP16_SCALE = "self.loss_scale_config.cur_scale"

OPTIMIZERS = (
    ("DeepSpeedZeroOptimizer", f"{ZERO}/stage_1_and_2.py", "self.loss_scale"),
    ("DeepSpeedZeroOptimizer_Stage3", f"{ZERO}/stage3.py", "self.loss_scale"),
    ("FP16_Optimizer", f"{FP16}/fused_optimizer.py", FP16_SCALE),
    ("FP16_UnfusedOptimizer", f"{FP16}/unfused_optimizer.py", FP16_SCALE),
)
"""Classes, their files, and the scale that an update changes."""

REMEMBERED = "_grad_scale"
REMEMBER = """
    # The gradients of this step carry the scale from before the update.
    self._grad_scale = {scale}
"""
ASSIGNMENT = Place(
    "an assignment",
    lambda node: isinstance(node, cst.SimpleStatementLine) and isinstance(node.body[0], cst.Assign),
)


def edit(tree: Tree) -> None:
    """Remember the scale when it is updated, and divide by that."""
    done = []
    for optimizer, home, scale in OPTIMIZERS:
        unscale = tree.find(f"{optimizer}.unscale_and_clip_grads", home)
        if not unscale.mentions(scale) or REMEMBERED in unscale.code:
            done.append(str(unscale))
            continue
        remembered = f'getattr(self, "_grad_scale", {scale})'
        unscale.rename(scale, "grad_scale", only=ASSIGNMENT)
        # Nothing is remembered where no scale is ever updated. The line is replaced where it stands:
        # what is above it belongs to another patch.
        unscale.exchange(
            assigns("combined_scale"), f"combined_scale = grad_scale = {remembered}", which=0
        )
        tree.find(f"{optimizer}._update_scale", home).first(REMEMBER.format(scale=scale))
        # The scale is updated before these use it.
        for name in ("step", "step_fused_adam"):
            if not tree.has(f"{optimizer}.{name}", home):
                continue
            step = tree.find(f"{optimizer}.{name}", home)
            for place in (
                assigns("self._global_grad_norm"),
                calls("single_grad_partition.mul_"),
                calls("self.fp32_partitioned_groups_flat.grad.mul_"),
            ):
                step.rename(scale, remembered, only=place)
    if len(done) == len(OPTIMIZERS):
        raise AlreadyFixed(f"{done[0]} does not read the scale of the next step")


FIX = Fix(
    name="loss-scale-step",
    subject="fp16: unscale by the loss scale that the loss was multiplied with",
    hazard=(
        "The dynamic loss scale is updated before the gradients of the step are divided by it. On "
        "a step where it grows they are divided by the scale of the next step: gradients, and the "
        "norm that is clipped and reported at stages 0 and 3, are too small by the growth factor."
    ),
    change=(
        "Remember the scale when it is updated, and divide by that one: ZeRO 1 to 3, "
        "FP16_Optimizer and FP16_UnfusedOptimizer."
    ),
    test="test_loss_scale_growth_step.py",
    folder="tests/unit/runtime/half_precision",
    edit=edit,
)

if __name__ == "__main__":
    sys.exit(program(FIX))
