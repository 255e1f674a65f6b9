"""At stage 0 the loss is multiplied by the fp16 loss scale that its gradients are divided by."""

from __future__ import annotations

import sys

from fix import Fix, program
from shapes import branches
from trees import AlreadyFixed, Tree

HOME = "deepspeed/runtime/engine.py"
OTHERS = "self.optimizer.scale_if_loss"
SCALE = "self.optimizer.loss_scale_config.cur_scale"

MULTIPLY = """
    if isinstance(self.optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        # Stage 0: their step divides the gradients by this scale, which is 1 in bf16.
        {loss} = {loss}.float() * self.optimizer.loss_scale_config.cur_scale
"""


def edit(tree: Tree) -> None:
    """Multiply the loss in `backward` and in `scale`, which users call before ``loss.backward()``."""
    done = []
    for name, loss in (("backward", "loss"), ("scale", "scaled_loss")):
        function = tree.find(f"DeepSpeedEngine.{name}", HOME)
        if function.mentions(SCALE):
            done.append(str(function))
            continue
        function.after(branches("ZeROOptimizer", inside=OTHERS), MULTIPLY.format(loss=loss))
    if len(done) == 2:
        raise AlreadyFixed(f"{done[0]} multiplies by the scale of stage 0")


FIX = Fix(
    name="stage0-loss-scale",
    subject="fp16 at stage 0: multiply the loss by the loss scale",
    hazard=(
        "engine.backward() multiplies the loss by the loss scale for the ZeRO optimizers only. At "
        "stage 0 FP16_Optimizer and FP16_UnfusedOptimizer divide the gradients by a scale that "
        "nothing multiplied them by: steps are smaller by the loss scale, with the default one to "
        "nothing for SGD, and small gradients underflow in fp16 as if there was no scaling."
    ),
    change=(
        "Multiply the loss in backward() and scale() by the scale that these two divide by. In "
        "bf16, which they serve too, that scale is 1."
    ),
    test="test_stage0_loss_scale.py",
    folder="tests/unit/runtime/half_precision",
    edit=edit,
)

if __name__ == "__main__":
    sys.exit(program(FIX))
