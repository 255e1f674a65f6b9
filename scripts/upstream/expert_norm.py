"""The gradient norm of `FP16_Optimizer` counts gradients of experts, not their weights."""

from __future__ import annotations

import sys

from fix import Fix, program
from shapes import calls, returns
from trees import AlreadyFixed, Tree

HOME = "deepspeed/runtime/fp16/fused_optimizer.py"
UTILS = "deepspeed/runtime/utils.py"
WEIGHTS = "self.fp32_groups_flat"


def edit(tree: Tree) -> None:
    """Hand the gradients to the function that takes the norm."""
    step = tree.find("FP16_Optimizer.step", HOME)
    place = calls("expert_grads_for_norm.append")
    names = step.names(place)
    if WEIGHTS not in names or f"{WEIGHTS}.grad" in names:
        raise AlreadyFixed(f"{step} takes the norm of gradients of experts")
    step.replace(
        place, "expert_grads_for_norm[param_group['name']].append(self.fp32_groups_flat[i].grad)"
    )
    # In some releases the conversion of the norm of dense gradients makes a tensor of no value.
    tensor = tree.find("get_norm_with_moe_layers.to_tensor", UTILS)
    if "[" not in tensor.text(returns()):
        tensor.replace(returns(), "return get_accelerator().FloatTensor([float(v)]).detach()")


FIX = Fix(
    name="expert-norm",
    subject="FP16_Optimizer: take the norm of experts' gradients, not of their weights",
    hazard=(
        "At stage 0 FP16_Optimizer adds the norm of the experts' fp32 weights to the norm of the "
        "dense gradients: the reported norm is wrong, and clipping divides every gradient by "
        "something that has nothing to do with gradients."
    ),
    change="Hand over the gradients of the expert groups.",
    test="test_expert_grad_norm.py",
    folder="tests/unit/moe",
    edit=edit,
)

if __name__ == "__main__":
    sys.exit(program(FIX))
