"""Faults of stage 3, and the guard that must find each; see `faults`, which lists them with its
own.
"""

from __future__ import annotations

from unit.verify.mutation_form import Mutation

UNIT = "deepspeed/runtime/zero/gather_unit.py"
POOL = "deepspeed/runtime/zero/memory_pool.py"
OFFLOAD = "deepspeed/runtime/zero/parameter_offload.py"
ROWS = "deepspeed/runtime/sharding/cut_rows.py"

RACE = r"never waits for"
OFF = r"stage 3: "

ZERO3 = (
    Mutation(
        "a shard is gathered before it is updated",
        UNIT,
        (("shared.context.reduction_stream.wait_event(shared.shards_updated)", "pass"),),
        "streams: stage 3",
        RACE,
    ),
    Mutation(
        "rows are copied out before they are gathered",
        UNIT,
        (("            current.wait_event(self._gathered)\n", "            pass\n"),),
        "streams: stage 3",
        RACE + r"(.|\n)*copy_out",
    ),
    Mutation(
        "a buffer of the pool is handed out early",
        POOL,
        (
            (
                "                buffer.wait_for_reads(get_accelerator().current_stream())",
                "                pass",
            ),
        ),
        "streams: stage 3",
        RACE,
    ),
    Mutation(
        "autograd keeps memory that is given away",
        OFFLOAD,
        (
            (
                "        if buffer is None:\n            # Without",
                "        if True:\n            # Without",
            ),
        ),
        "oracle: stage 3",
        OFF,
    ),
    Mutation(
        "what persists is not gathered after a step",
        OFFLOAD,
        (
            (
                "        self.gather_persistent()\n\n    def gather_persistent",
                "\n    def gather_persistent",
            ),
        ),
        "oracle: stage 3, all persist",
        OFF,
    ),
    Mutation(
        "the last cut is left out of the rows",
        ROWS,
        (("            if filling.rest is not None:\n", "            if False:\n"),),
        "oracle: stage 3",
        OFF,
    ),
    Mutation(
        "an absent gradient is what was there",
        ROWS,
        (("                zeros.append(self._columns[filling.param])\n", ""),),
        "oracle: stage 3",
        OFF,
    ),
    Mutation(
        "a parameter read elsewhere is not gathered",
        OFFLOAD,
        (
            (
                "            self.param_coordinator.enter([unit])\n        elif",
                "            pass\n        elif",
            ),
        ),
        "oracle: stage 3",
        OFF,
    ),
)
