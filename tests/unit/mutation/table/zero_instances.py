"""Faults of stage 3 with several optimizer instances and copies of gathered shards."""

from __future__ import annotations

from unit.mutation.table.fault import Fault
from unit.mutation.table.places import HYBRID

FAULTS = (
    Fault(
        "each instance of stage 3 starts with the values of its own first rank",
        "deepspeed/runtime/zero/parameters/zero_parameter.py",
        (("    if across is not None and shard.numel():", "    if False:"),),
        HYBRID,
        "test_init",
    ),
    Fault(
        "an edit stays in the instance of the rank that made it",
        "deepspeed/runtime/zero/gathering/gathered_parameters.py",
        (
            (
                "        group = record_of(same[0]).instances.everyone\n"
                "        flat = torch.cat([param.data.reshape(-1) for param in same])\n"
                "        if dist.get_world_size(group=group) > 1 and flat.numel():",
                "        group = record_of(same[0]).group\n"
                "        flat = torch.cat([param.data.reshape(-1) for param in same])\n"
                "        if source in dist.get_all_ranks_from_group(group):",
            ),
        ),
        HYBRID,
        "edits_reach",
    ),
    Fault(
        "instances of stage 3 do not compare what they enter with",
        "deepspeed/runtime/zero/gathering/gathered_parameters.py",
        (
            (
                "dict.fromkeys(record_of(param).instances.everyone for param in self.params)",
                "dict.fromkeys(record_of(param).group for param in self.params)",
            ),
        ),
        HYBRID,
        "disagree",
    ),
    Fault(
        "zero.Init cuts for all ranks what instances share",
        "deepspeed/runtime/zero/init_context.py",
        (
            (
                "return split_into_instances(group, instances_at_stage_3(count, size, ranks))",
                "return split_into_instances(group, 1)",
            ),
        ),
        HYBRID,
        "test_init",
    ),
    Fault(
        "copies of gathered shards outlive a pass",
        "deepspeed/runtime/zero/gathering/coordinator.py",
        (
            (
                "        for unit in self.units:\n            unit.forget_secondary()\n",
                "",
            ),
        ),
        HYBRID,
        "between_passes",
    ),
    Fault(
        "copies of gathered shards outlive an edit",
        "deepspeed/runtime/zero/gathering/gather_unit.py",
        (
            (
                "        self.forget_secondary()\n        self.resources.before_write()",
                "        self.resources.before_write()",
            ),
        ),
        HYBRID,
        "between_passes",
    ),
    Fault(
        "copies of gathered shards are those of another rank",
        "deepspeed/runtime/zero/gathering/secondary_shards.py",
        (("start = dist.get_rank(group=group) * numel", "start = 0 * numel"),),
        HYBRID,
        "one_process",
    ),
    Fault(
        "backward gathers over all ranks though there are copies",
        "deepspeed/runtime/zero/gathering/secondary_shards.py",
        (("self._is_wanted, self._is_right = False, True", "self._is_wanted = False"),),
        HYBRID,
        "collectives",
    ),
    Fault(
        "a shard is updated that a gather begun ahead still reads",
        "deepspeed/runtime/zero/gathering/gather_unit.py",
        (("current_stream().wait_event(self.last_gather)", "current_stream()"),),
        HYBRID,
        "nobody_came",
    ),
    Fault(
        "masters that gathers read are updated at once",
        "deepspeed/runtime/zero/stage3.py",
        ((" if self.cpu_offload else resources.before_update()", " if self.cpu_offload else 0"),),
        HYBRID,
        "nobody_came",
    ),
    Fault(
        "rows are kept before they are gathered",
        "deepspeed/runtime/zero/gathering/gather_unit.py",
        (
            (
                "            pending.wait()\n            self._keep(rows)\n",
                "            self._keep(rows)\n            pending.wait()\n",
            ),
        ),
        HYBRID,
        "collectives",
    ),
)
