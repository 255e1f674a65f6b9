"""Fix 3, the norm of ZeRO 1 and 2: one reduction, however many parameter groups a rank has. See
docs/fixes/fix3.md.
"""

from __future__ import annotations

import sys

from fix import Fix, program
from shapes import assigns, branches, calls, returns
from trees import AlreadyFixed, Tree

HOME = "deepspeed/runtime/zero/stage_1_and_2.py"
OPTIMIZER = "DeepSpeedZeroOptimizer"

LOCAL_OFFLOADED = """
    # Local, without a root: scaled_global_norm adds up groups and ranks.
    return torch.tensor(total_norm, device=self.device, dtype=torch.float)
"""
ONE_REDUCTION = """
    # One reduction of the sum over all groups: how many groups a rank has may differ between pipeline
    # stages. Each rank adds its own shards, so experts need no correction.
    total_norm = torch.stack([norm.float() for norm in norm_groups]).sum()
    total_norm = total_norm.to(get_accelerator().current_device_name())
    dist.all_reduce(total_norm, op=dist.ReduceOp.SUM, group=self.dp_process_group)
    self._model_parallel_all_reduce(tensor=total_norm, op=dist.ReduceOp.SUM)
    total_norm = total_norm.sqrt().to(self.device)

    mask_nan_or_inf_with_val_inplace(total_norm, device=self.device)

    return total_norm
"""
DIRECT = """The contribution of this rank's shards to a gradient norm: no collective, no root.

        Arguments:
            gradients (Iterable[Tensor]): shards of gradients
            params (Iterable[Tensor]): the parameters that they belong to
            norm_type (float or int): type of the used p-norm, or ``'inf'``

        Returns:
            The sum of the absolute values to the power of norm_type in fp32, or the largest one for ``'inf'``.
        """


def edit(tree: Tree) -> None:
    """Make the norms of groups local, and reduce their sum once."""
    offloaded = tree.find(f"{OPTIMIZER}.complete_grad_norm_calculation_for_cpu_offload", HOME)
    direct = tree.find(f"{OPTIMIZER}.get_grad_norm_direct", HOME)
    total = tree.find(f"{OPTIMIZER}.scaled_global_norm", HOME)
    if not direct.mentions("dist.all_reduce") and not offloaded.mentions("dist.all_reduce"):
        raise AlreadyFixed(f"{direct} has no collective")
    offloaded.cut(assigns("total_dev_norm"), LOCAL_OFFLOADED)

    for place in (calls("dist.all_reduce"), calls("self._model_parallel_all_reduce")):
        for _ in direct.all(place):
            direct.remove(place, which=0)
    # Of the assignments to the norm the last one takes the root.
    direct.remove(assigns("total_norm"), which=-1)
    direct.remove(calls("mask_nan_or_inf_with_val_inplace"))
    direct.describe(DIRECT)

    scale = "self._muon_update_lacks_loss_scale"
    if total.mentions(scale):
        # Squares carry the scale twice.
        total.replace(branches(scale), _rescaled("self.loss_scale**2"))
    if total.all(branches("self.has_moe_layers")):
        total.remove(branches("self.has_moe_layers"))
    total.cut(returns(), ONE_REDUCTION)
    total.source.drop_unused_import("combine_grad_norm_groups")


def _rescaled(scale: str) -> str:
    return f"""
        if self._muon_update_lacks_loss_scale(i):
            norm = norm * {scale}
    """


FIX = Fix(
    name="fix3-zero-norm",
    subject="ZeRO 1/2: reduce the gradient norm once, not once per group",
    hazard=(
        "The gradient norm takes an all-reduce per parameter group over the data-parallel and the "
        "model-parallel ranks. Pipeline stages that own different numbers of groups issue "
        "different numbers of collectives: one stage waits for ever, or two norms that do not "
        "belong together are summed. A group whose norm is not finite counts as -1, so that the "
        "total looks finite. (See also #7847.)"
    ),
    change=(
        "get_grad_norm_direct and complete_grad_norm_calculation_for_cpu_offload return the local "
        "sum of squares in fp32. scaled_global_norm adds up the groups, reduces the sum once and "
        "takes the root. Shards of experts are disjoint over the data-parallel ranks, so that they "
        "need no correction of their own: nothing calls _average_expert_grad_norms any more, which can go "
        "in a change of its own."
    ),
    test="test_grad_norm_one_reduction.py",
    folder="tests/unit/v1/zero",
    edit=edit,
)

if __name__ == "__main__":
    sys.exit(program(FIX))
