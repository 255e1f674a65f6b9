"""Fix 3, the norm of `BF16_Optimizer`: one reduction, with experts and on every pipeline stage. See
docs/fixes/fix3.md.
"""

from __future__ import annotations

import sys

from fix import Fix, program
from shapes import assigns, branches
from trees import AlreadyFixed, Tree

HOME = "deepspeed/runtime/bf16_optimizer.py"

CALL = """
    all_groups_norm = self._global_norm_in_one_reduction(non_expert_grads_for_norm, expert_grads_for_norm)
"""
METHOD = '''
def _global_norm_in_one_reduction(self, non_expert_grads, expert_grads):
    """The norm of all gradients, of which every rank holds copies.

        Each rank divides its sums of squares by the number of copies, which is the size of the group that
        the gradients were averaged over. One reduction over all ranks then counts every gradient once,
        whatever a rank owns: pipeline stages may have other experts, or nothing at all.
        """
    assert self.norm_type == 2, "only L2 norm supported"
    device = get_accelerator().current_device_name()
    total_norm = torch.zeros([], dtype=torch.float, device=device)
    # With neither, every rank holds all gradients, and there is nothing to reduce.
    reduces = self.mpu is not None or self.has_moe_layers
    dense_copies = dist.get_world_size(group=self.dp_process_group) if reduces else 1
    copies_and_grads = [(dense_copies, non_expert_grads)]
    for name, grads in expert_grads.items():
        copies_and_grads.append((groups._get_expert_data_parallel_world_size(name), grads))
    for copies, grads in copies_and_grads:
        for grad in grads:
            total_norm += grad.detach().float().square().sum().to(device) / copies

    if reduces:
        dist.all_reduce(total_norm, op=dist.ReduceOp.SUM)
    total_norm = total_norm.sqrt()
    mask_nan_or_inf_with_val_inplace(total_norm, device=device)
    return total_norm
'''


def edit(tree: Tree) -> None:
    """Put one reduction in the place of one per kind of gradient."""
    step = tree.find("BF16_Optimizer.step", HOME)
    if not step.mentions("get_norm_with_moe_layers"):
        raise AlreadyFixed(f"{step} does not reduce the norm of experts on its own")
    step.replace(assigns("non_expert_groups_norm"), CALL)
    step.remove(assigns("all_groups_norm"), which=1)
    step.remove(branches("self.has_moe_layers", "get_norm_with_moe_layers"))
    step.follow(METHOD)
    step.source.drop_unused_import("get_norm_with_moe_layers", "get_global_norm_of_tensors")
    step.source.add_import("deepspeed.accelerator", "get_accelerator")
    step.source.add_import("deepspeed.utils", "groups")
    step.source.add_import("deepspeed.runtime.utils", "mask_nan_or_inf_with_val_inplace")


FIX = Fix(
    name="fix3-bf16-norm",
    subject="BF16_Optimizer: reduce the gradient norm once, experts included",
    hazard=(
        "BF16_Optimizer reduces the norm of dense gradients over the model-parallel ranks, and "
        "then that of each expert group over other ranks. Pipeline stages with other experts "
        "issue other collectives and wait for each other for ever. A rank without any gradient "
        "to count raises an IndexError instead of joining the reduction."
    ),
    change=(
        "Sum squares in fp32, divided by the number of ranks that hold a copy, and reduce one "
        "scalar over all ranks. Without an mpu and experts there is still no collective."
    ),
    test="test_bf16_norm_one_reduction.py",
    folder="tests/unit/runtime/half_precision",
    edit=edit,
)

if __name__ == "__main__":
    sys.exit(program(FIX))
