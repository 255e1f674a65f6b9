"""Fix 4: the boundary micro-batch is accumulated before the accumulator is reduced. See
docs/fixes/fix4.md.
"""

from __future__ import annotations

import sys

from fix import Fix, program
from shapes import branches, calls
from trees import AlreadyFixed, PlaceNotFound, Tree

HOME = "deepspeed/runtime/engine.py"
ACCUMULATE = "self.optimizer.backward_epilogue"
REDUCE = "self.allreduce_gradients"

FIRST = """
    # BF16_Optimizer adds the micro-batch to its fp32 accumulator here, and the accumulator is what is reduced.
    accumulates_in_epilogue = isinstance(self.optimizer, BF16_Optimizer)
    if accumulates_in_epilogue:
        self.optimizer.backward_epilogue()
"""
OTHERS = """
    if not accumulates_in_epilogue:
        self.optimizer.backward_epilogue()
"""


def edit(tree: Tree) -> None:
    """Accumulate before reducing."""
    epilogue = tree.find("DeepSpeedEngine._backward_epilogue", HOME)
    places = [epilogue.code.find(f"{name}(") for name in (ACCUMULATE, REDUCE)]
    if min(places) < 0:
        missing = (ACCUMULATE, REDUCE)[places.index(min(places))]
        raise PlaceNotFound(f"{epilogue}: a call of {missing} was not found")
    if places[0] < places[1]:
        raise AlreadyFixed(f"{epilogue} calls {ACCUMULATE} before {REDUCE}")
    epilogue.replace(calls(ACCUMULATE), OTHERS)
    epilogue.before(branches("self.enable_backward_allreduce"), FIRST)


FIX = Fix(
    name="fix4-boundary-micro-batch",
    subject="BF16_Optimizer: accumulate the last micro-batch before reducing",
    hazard=(
        "BF16_Optimizer sums gradients in a fp32 accumulator of its own, in backward_epilogue. "
        "That ran after the accumulator was all-reduced, so that the boundary micro-batch stayed "
        "local: every rank steps its shard with another gradient, and the error depends on the "
        "number of micro-batches. (#7985 in later releases.)"
    ),
    change=(
        "Call backward_epilogue of BF16_Optimizer before allreduce_gradients. The other optimizers "
        "keep their order: theirs does not touch what is reduced."
    ),
    test="test_bf16_boundary_micro_batch.py",
    folder="tests/unit/runtime/half_precision",
    edit=edit,
)

if __name__ == "__main__":
    sys.exit(program(FIX))
