"""Faults of who owns what, and of owners' steps."""

from __future__ import annotations

from unit.mutation.table.fault import Fault
from unit.mutation.table.places import LAYOUT, STATE, WHOLE_PARAMETERS

FAULTS = (
    Fault(
        "a matrix is made orthogonal by its parts",
        "deepspeed/runtime/sharding/dealt_parameters.py",
        (
            (
                "        arrived = arriving()\n",
                "        arrived = arriving()\n"
                "        arrived[: message.numel()] = message[: arrived.numel()]\n",
            ),
        ),
        "tests/unit/v1/optimizers/test_whole_parameters.py",
        "TestAsOneProcess",
    ),
    Fault(
        "a matrix that starts with its owner is taken for whole",
        "deepspeed/runtime/sharding/dealt_parameters.py",
        (("for end in (1, numel)", "for end in (1,)"),),
        WHOLE_PARAMETERS,
        "TestAsOneProcess",
    ),
    Fault(
        "a trust ratio of parts of a parameter",
        "deepspeed/runtime/sharding/dealt_parameters.py",
        (
            (
                "dist.all_reduce(summed, group=self._group.process_group)",
                "dist.all_reduce(summed.clone(), group=self._group.process_group)",
            ),
        ),
        "tests/unit/v1/optimizers/test_whole_parameters.py",
        "TestAsOneProcess",
    ),
    Fault(
        "state is saved as it lies in memory",
        STATE,
        (
            (
                "        return shard if exchange is None else "
                "exchange.move(shard, self._longest[index], device)\n",
                "        if exchange is None or self._to_files:\n"
                "            return shard\n"
                "        return exchange.move(shard, self._longest[index], device)\n",
            ),
        ),
        LAYOUT,
        "one_bucket and fp32",
    ),
    Fault(
        "masters that an owner has updated stay with it",
        "deepspeed/runtime/optimizers/owner_steps.py",
        (
            (
                "shard.data.copy_(of.from_owners(master, shard.device)[: shard.numel()])",
                "of.from_owners(master, shard.device)",
            ),
        ),
        WHOLE_PARAMETERS,
        "TestAsOneProcess",
    ),
    Fault(
        "a rank loads state of whole parameters that are another's",
        "deepspeed/runtime/optimizers/owner_steps.py",
        (("there == here or not there for", "True for"),),
        WHOLE_PARAMETERS,
        "TestCheckpoints",
    ),
)
