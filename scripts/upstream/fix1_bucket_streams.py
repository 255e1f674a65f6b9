"""Fix 1: the reduction of a bucket waits for all streams that produced its gradients. See
docs/fixes/fix1.md.
"""

from __future__ import annotations

import sys

import libcst as cst
from fix import Fix, program
from shapes import assigns, branches, calls, walk
from trees import AlreadyFixed, PlaceNotFound, Tree

HOME = "deepspeed/runtime/zero/stage_1_and_2.py"
OPTIMIZER = "DeepSpeedZeroOptimizer"

RECORD = """
    # The reduction has to wait for the stream of every gradient: with and without overlap_comm, and
    # also of a gradient that is too large for the bucket.
    if not get_accelerator().resolves_data_dependency():
        bucket.copy_streams.add(get_accelerator().current_stream())
"""
WAIT_FOR_ALL = """
    bucket = self.ipg_buckets[communication_data_type]
    for producer_stream in bucket.copy_streams or {get_accelerator().current_stream()}:
        stream.wait_stream(producer_stream)
"""
WAIT_WITHOUT_OVERLAP = """
    # Without overlap_comm too the gradients come from the streams of all their hooks.
    if not get_accelerator().resolves_data_dependency():
        for producer_stream in self.ipg_buckets[communication_data_type].copy_streams:
            stream.wait_stream(producer_stream)
"""


def edit(tree: Tree) -> None:
    """Record the stream of every gradient, and wait for all recorded ones."""
    bucket = tree.find("IPGBucket", HOME)
    hook = tree.find(f"{OPTIMIZER}.reduce_independent_p_g_buckets_and_remove_grads", HOME)
    average = tree.find(f"{OPTIMIZER}.average_tensor", HOME)
    choices = average.all(branches("self.overlap_comm"))
    if not choices:
        raise PlaceNotFound(f"{average}: an if on self.overlap_comm was not found")
    if any(isinstance(c, cst.If) and _waits(c.orelse) for c in choices):
        raise AlreadyFixed(f"{average} waits for recorded streams without overlap_comm too")
    known = bucket.mentions("copy_streams")
    if not known:
        bucket.after(
            assigns("has_moe_params"),
            """
            # The streams that the gradients in the bucket were produced on.
            copy_streams: set = field(default_factory=set)
            """,
        )
        tree.find("IPGBucket.clear", bucket.source.name).last("self.copy_streams.clear()")
        average.replace(calls("stream.wait_stream"), WAIT_FOR_ALL)
    else:
        hook.remove(branches("get_accelerator.resolves_data_dependency", "bucket.copy_streams.add"))
        # What stands there says that large gradients record no stream.
        hook.uncomment(assigns("self.extra_large_param_to_reduce"))
    hook.before(assigns("bucket.elements"), RECORD)
    average.after(assigns("stream"), WAIT_WITHOUT_OVERLAP, which=-1)


def _waits(branch: cst.CSTNode | None) -> bool:
    return isinstance(branch, cst.Else) and any(
        isinstance(part, cst.Attribute) and part.attr.value == "copy_streams"
        for part in walk(branch)
    )


FIX = Fix(
    name="fix1-bucket-streams",
    subject="ZeRO 1/2: wait for the streams of all gradients in a bucket",
    hazard=(
        "Gradients of one IPG bucket can be produced on several streams (torch.compile, side "
        "streams in the model), because a gradient hook runs on the stream of its accumulation "
        "node. The reduction has to wait for all of them (#8061). A wait that is missing gives NaN "
        "or old gradients now and then: for a parameter larger than reduce_bucket_size, for which "
        "no stream is recorded, and without overlap_comm, where the first slices are reduced on "
        "the stream of the last hook."
    ),
    change=(
        "Record the stream of every gradient in IPGBucket.copy_streams, whatever its size, and let "
        "average_tensor wait for all of them with and without overlap_comm. With one stream "
        "nothing changes."
    ),
    test="test_bucket_producer_streams.py",
    folder="tests/unit/v1/zero",
    edit=edit,
)

if __name__ == "__main__":
    sys.exit(program(FIX))
