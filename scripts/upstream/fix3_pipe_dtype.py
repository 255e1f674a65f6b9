"""Fix 3, pipelines: what a stage receives has the dtype that was sent. See docs/fixes/fix3.md."""

from __future__ import annotations

import sys

from fix import Fix, program
from shapes import branches
from trees import AlreadyFixed, Tree

HOME = "deepspeed/runtime/pipe/engine.py"
BUFFER = "self._grad_layer_buf"

CHECK = """
    if len(self._grad_layer_buf) > idx and self._grad_layer_buf[idx].dtype != dtype:
        # A message of another dtype must not be received into this memory.
        self._grad_layer_buf[idx] = self._allocate_buffer(shape, dtype=dtype, num_buffers=1)[0]
"""


def edit(tree: Tree) -> None:
    """Make a buffer of another dtype anew."""
    allocate = tree.find("PipelineEngine._allocate_or_extend_buffers", HOME)
    if allocate.mentions(f"{BUFFER}.dtype"):
        raise AlreadyFixed(f"{allocate} looks at the buffer's dtype")
    allocate.before(branches(BUFFER), CHECK, which=0)


FIX = Fix(
    name="fix3-pipe-dtype",
    subject="Pipeline: receive into a buffer of the dtype that was sent",
    hazard=(
        "With dynamic shapes the buffer of an earlier message is used again if it has room, "
        "whatever its dtype. A message of another dtype is then received as bytes of the wrong "
        "type: fp32 activations as int64, or the other way round. (See also #7847.)"
    ),
    change="Make the buffer anew if its dtype is not that of the message.",
    test="test_pipe_recv_dtype.py",
    folder="tests/unit/runtime/pipe",
    edit=edit,
)

if __name__ == "__main__":
    sys.exit(program(FIX))
