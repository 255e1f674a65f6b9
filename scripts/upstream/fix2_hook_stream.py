"""Fix 2: communication waits for the stream that is current inside the hook. See
docs/fixes/fix2.md.
"""

from __future__ import annotations

import sys

from fix import Fix, program
from trees import AlreadyFixed, Tree

ZERO = "deepspeed/runtime/zero/stage_1_and_2.py"
BF16 = "deepspeed/runtime/bf16_optimizer.py"
DEFAULT = "get_accelerator.default_stream"

HOOKS = (
    ("DeepSpeedZeroOptimizer.reduce_independent_p_g_buckets_and_remove_grads", ZERO),
    ("DeepSpeedZeroOptimizer.reduce_ipg_grads", ZERO),
    ("DeepSpeedZeroOptimizer.average_tensor", ZERO),
    ("BF16_Optimizer.accumulate_hp_grads_and_remove_lp", BF16),
)
"""What runs inside of gradient hooks, and its file."""


def edit(tree: Tree) -> None:
    """Ask for the current stream where the default one is asked for."""
    found = [tree.find(name, home) for name, home in HOOKS]
    wrong = [function for function in found if function.mentions(DEFAULT)]
    if not wrong:
        raise AlreadyFixed("no gradient hook asks for the default stream")
    for function in wrong:
        function.rename(DEFAULT, "get_accelerator().current_stream")


FIX = Fix(
    name="fix2-hook-stream",
    subject="ZeRO 1/2, BF16_Optimizer: wait for the stream that is current in the hook",
    hazard=(
        "Autograd runs a gradient hook on the stream of the parameter's accumulation node, which "
        "is a side stream if the engine was made under one. Communication that waits for the "
        "default stream starts before the hook's work is done, and reduces old gradients."
    ),
    change="Ask the accelerator for the current stream inside the hook, each time.",
    test="test_hook_stream.py",
    folder="tests/unit/v1/zero",
    edit=edit,
)

if __name__ == "__main__":
    sys.exit(program(FIX))
