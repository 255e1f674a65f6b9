"""Prints faults as patches: `python -m unit.mutation.table NAME...`."""

import sys

from unit.mutation.table import FAULTS, REPOSITORY, UNDO_FIXES


def main(names: list[str]) -> int:
    """Print the named faults."""
    known = {fault.name: fault for fault in (*UNDO_FIXES, *FAULTS)}
    for name in names:
        sys.stdout.write(known[name].patch(REPOSITORY))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
