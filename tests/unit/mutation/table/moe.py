"""Faults of experts."""

from __future__ import annotations

from unit.mutation.table.fault import Fault

STAGE_3_INIT = "tests/unit/v1/moe/test_stage3_init.py"
STAGE_3_EXPERTS = "tests/unit/v1/checkpoint/test_stage3_experts.py"

FAULTS = (
    Fault(
        "a rank without tokens for its experts stays away from exchange and reduction",
        "deepspeed/moe/owner_exchange.py",
        (("outputs = rows + nothing.to(rows.dtype)", "outputs = rows"),),
        "tests/unit/v1/moe/test_auto_ep.py",
        "equals",
    ),
    Fault(
        "a frozen expert of stage 3 is put together of all ranks' shards",
        "deepspeed/checkpoint/resharding/cut_parameters.py",
        (("if prefix is None else self._sizes.get(prefix, 1)", "if prefix is None else 1"),),
        STAGE_3_EXPERTS,
        "by_name",
    ),
    Fault(
        "a frozen expert of stage 3 is exported of all ranks' shards",
        "deepspeed/utils/zero_to_fp32.py",
        (("if match is None else sizes.get(match[1], 1)", "if match is None else 1"),),
        STAGE_3_EXPERTS,
        "by_name",
    ),
    Fault(
        "the experts of other ranks are saved under the numbers of neighbours",
        "deepspeed/runtime/checkpointing/whole_experts.py",
        (("{prefix: share * held}", "{prefix: share}"),),
        STAGE_3_EXPERTS,
        "export",
    ),
    Fault(
        "experts that zero.Init cuts have the first rank's weights",
        "deepspeed/runtime/zero/init_context.py",
        (("drawn = self.draws.of(param)", "drawn = None"),),
        STAGE_3_INIT,
        "built_plainly and turns",
    ),
    Fault(
        "zero.Init cuts experts for all ranks",
        "deepspeed/runtime/zero/init_context.py",
        (("        name = expert_group_of(param)\n", "        name = None\n"),),
        STAGE_3_INIT,
        "built_plainly and turns",
    ),
    Fault(
        "what a script makes of an expert is published by the modifier of others",
        "deepspeed/runtime/zero/gathering/gathered_parameters.py",
        (("if has[group]]", "]"),),
        STAGE_3_INIT,
        "edits",
    ),
    Fault(
        "experts start with the buffers of the first rank's",
        "deepspeed/runtime/model_setup.py",
        (("holders = of_experts.setdefault(layer, holders)", "pass"),),
        STAGE_3_EXPERTS,
        "export",
    ),
    Fault(
        "experts of stage 3 are shared by ranks that hold others",
        "deepspeed/runtime/zero/model_sharding.py",
        (("        holders = ranks.holders(param)\n", "        holders = ranks.replicas\n"),),
        "tests/unit/v1/moe/test_auto_ep.py",
        "equals",
    ),
    Fault(
        "the norm counts experts as if all ranks held them",
        "deepspeed/runtime/zero/stage_1_and_2.py",
        (
            (
                "+= local(group_index).squeeze()\n",
                "+= local(group_index).squeeze() * group.num_shards / self.num_shards\n",
            ),
        ),
        "tests/unit/v1/moe/test_auto_ep.py",
        "equals",
    ),
    Fault(
        "experts of zero.Init stand whole until the last is spread",
        "deepspeed/runtime/zero/model_sharding.py",
        (("    cut_parameters(cut, sharers)\n", ""),),
        "tests/unit/v1/moe/test_auto_ep.py",
        "files",
    ),
)
