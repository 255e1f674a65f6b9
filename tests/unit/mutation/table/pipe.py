"""Faults of pipelines."""

from __future__ import annotations

from unit.mutation.table.fault import Fault

FAULTS = (
    Fault(
        "two receives ahead on one hardware queue",
        "deepspeed/runtime/pipe/channel.py",
        (("int(given) < DEFAULT_QUEUES else", "int(given) < 1 else"),),
        "tests/unit/v1/device/test_pipelines.py",
        "one_queue",
    ),
    Fault(
        "a receive is posted too early",
        "deepspeed/runtime/pipe/stage_channels.py",
        (("            and self._coming[0][1] <= self._issued\n", ""),),
        "tests/unit/v1/device/test_pipelines.py",
        "posts_what_depends_on_nothing_to_come",
    ),
)
