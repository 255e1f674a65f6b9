"""Ulysses: what is gathered back keeps the layout of a batch in dimension 1."""

from __future__ import annotations

import sys

from fix import Fix, program
from shapes import assigns
from trees import AlreadyFixed, Tree

HOME = "deepspeed/sequence/layer.py"
RESULT = "post_all2all_res_shape"
BATCH_IN_DIM_1 = 2

SHAPE = """
    post_all2all_res_shape = [global_seq_len // seq_world_size, bs, seq_world_size * num_local_head, head_dim]
"""


def edit(tree: Tree) -> None:
    """Give the result the shape that its input had before the heads were scattered."""
    layout = tree.find("_generate_layout_params", HOME)
    place = assigns(RESULT)
    # The third of four cases: the batch in dimension 1, and heads are gathered.
    if "= [bs," not in layout.text(place, which=BATCH_IN_DIM_1):
        raise AlreadyFixed(f"{layout} does not put the batch first where it is in dimension 1")
    layout.replace(place, SHAPE, which=BATCH_IN_DIM_1)


FIX = Fix(
    name="ulysses-layout",
    subject="Ulysses: keep the layout of a batch in dimension 1",
    hazard=(
        "With batch_dim_idx=1 ([s, b, h, d]) the all-to-all after attention gives a tensor of the "
        "shape [b, s * P, h / P, d], with elements in an order that fits neither layout. Attention "
        "runs, and its output is mixed up between samples and positions."
    ),
    change="Give it the shape [s / P, b, h * P, d], which is what its elements are in.",
    test="test_all_to_all_layout.py",
    folder="tests/unit/v1/sequence_parallelism",
    edit=edit,
)

if __name__ == "__main__":
    sys.exit(program(FIX))
