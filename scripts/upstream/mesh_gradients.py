"""``initialize(mesh_param=...)`` reduces gradients over sequence-parallel ranks too."""

from __future__ import annotations

import sys

from fix import Fix, program
from trees import AlreadyFixed, Function, Tree

HOME = "deepspeed/utils/groups.py"
GROUP = "_get_sequence_data_parallel_group"
SIZE = "_get_sequence_data_parallel_world_size"

SPANS = """
    if mesh_device is not None and "sequence_parallel" in mesh_device.mesh_dim_names:
        # Data-parallel and sequence-parallel ranks together are all ranks of the mesh.
        return {value}
"""


def edit(tree: Tree) -> None:
    """Let the group of gradients be all ranks of a mesh with sequence-parallel ranks."""
    group, size = tree.find(GROUP, HOME), tree.find(SIZE, HOME)
    if group.mentions("mesh_device"):
        raise AlreadyFixed(f"{group} knows of the mesh")
    _first(group, "_clone_world_group()")
    _first(size, "mesh_device.size()")


def _first(function: Function, value: str) -> None:
    function.first(SPANS.format(value=value))


FIX = Fix(
    name="mesh-gradients",
    subject="Ulysses: reduce gradients over the sequence-parallel ranks of mesh_param",
    hazard=(
        "With initialize(mesh_param=(data, sequence)) gradients are reduced and ZeRO shards over "
        "the data-parallel dimension of the mesh alone. Ranks that share a sequence step with "
        "their own gradients, multiplied by their number, and their parameters drift apart."
    ),
    change=(
        "The group for gradients and sharding is all ranks of the mesh if the mesh has a "
        "sequence_parallel dimension, as with an mpu. A mesh for tensor parallelism is not "
        "concerned."
    ),
    test="test_mesh_param_gradients.py",
    folder="tests/unit/v1/sequence_parallelism",
    edit=edit,
)

if __name__ == "__main__":
    sys.exit(program(FIX))
