"""A write under `GatheredParameters` that will be lost is said."""

from __future__ import annotations

import sys

from fix import Fix, program
from shapes import branches
from trees import AlreadyFixed, Tree

HOME = "deepspeed/runtime/zero/partition_parameters.py"

REMEMBER = """
    self._versions_at_entry = {p.ds_id: p._version for p in self.params}
"""
CHECK = """
    if self.src_rank is None and not any(exc):
        # Another rank may have changed nothing, so that no collective can be issued here.
        changed = [p.ds_id for p in self.params if p._version != self._versions_at_entry[p.ds_id]]
        if changed:
            logger.warning(f"GatheredParameters: changes on rank {dist.get_rank()} to the parameters with ds_id "
                           f"{changed} are lost: only their gathered copies were changed. Give modifier_rank to "
                           "keep the changes of that rank.")
"""


def edit(tree: Tree) -> None:
    """Compare versions at the exit with those at the entry."""
    enter = tree.find("GatheredParameters.__enter__", HOME)
    leave = tree.find("GatheredParameters.__exit__", HOME)
    if leave.mentions("p._version") or leave.mentions("self._versions_at_entry"):
        raise AlreadyFixed(f"{leave} compares versions")
    enter.last(REMEMBER)
    leave.after(branches("self.enabled"), CHECK, which=0)


FIX = Fix(
    name="gathered-writes",
    subject="GatheredParameters: warn of changes that are lost",
    hazard=(
        "Parameters that are changed under GatheredParameters without modifier_rank keep their "
        "old values: only the gathered copy was changed, and it is dropped at the exit. Nothing "
        "says so, and weights that were meant to be initialized or loaded are not."
    ),
    change=(
        "Compare the versions of the tensors at the exit with those at the entry and log a warning "
        "with the parameters' ids and the remedy. It is local and costs nothing on devices."
    ),
    test="test_gathered_writes_warning.py",
    folder="tests/unit/v1/zero",
    edit=edit,
)

if __name__ == "__main__":
    sys.exit(program(FIX))
