"""Faults of ZeRO stage 3: units, gathers, offload."""

from __future__ import annotations

from unit.mutation.table.fault import Fault
from unit.mutation.table.places import BACKWARD_ORDER, LIFETIMES, UNDONE, UNEVEN

FAULTS = (
    Fault(
        "weights of an engine without an optimizer leave while they are gathered",
        "deepspeed/runtime/zero/movable_weights.py",
        (("        unit.put_away()\n", "        pass\n"),),
        "tests/unit/v1/offload/test_offload_states.py",
        "without_an",
    ),
    Fault(
        "zero.Init cuts a model for a stage that does not gather it",
        "deepspeed/runtime/zero/init_context.py",
        (('str(stage) in ("3", "3.0", "auto")', "True"),),
        "tests/unit/v1/zero/test_clients_ways.py",
        "TestZeroNames",
    ),
    Fault(
        "a frozen base in bf16 becomes fp32 at stage 3",
        "deepspeed/runtime/zero/model_sharding.py",
        (("wanted = None if dtype == torch.float32 else dtype", "wanted = dtype"),),
        "tests/unit/v1/zero/stage3/test_adapters.py",
        "base_in_bf16",
    ),
    Fault(
        "an adapter that comes late is trained by nobody, in silence",
        "deepspeed/runtime/zero/parameter_offload.py",
        (("        if late and self.give_up is not None:", "        if False:"),),
        "tests/unit/v1/zero/stage3/test_adapters.py",
        "trained_ones",
    ),
    Fault(
        "a frozen layer that comes late keeps each rank's own values",
        "deepspeed/runtime/zero/parameter_offload.py",
        (("            if self._late.may_be_there:", "            if False:"),),
        "tests/unit/v1/zero/stage3/test_adapters.py",
        "frozen_ones",
    ),
    Fault(
        "a unit is let go that a failed gather kept from being taken",
        "deepspeed/runtime/zero/parameter_offload.py",
        (
            (
                "        self._frames.append(frame)\n",
                "        self._frames.append(frame)\n"
                "        frame.units += (*self._uses.get(module, ()), *external)\n",
            ),
            (
                "            frame.units.append(unit)\n            self.param_",
                "            self.param_",
            ),
        ),
        "tests/unit/v1/zero/stage3/test_modes.py",
        "leaves_what",
    ),
    Fault(
        "a failed gather counts as whole",
        "deepspeed/runtime/zero/gathering/coordinator.py",
        (
            (
                "            unit.fetch()  # if it fails",
                "            self.live_numel += added\n            unit.fetch()  # if it fails",
            ),
            (
                "            self.live_numel += added\n            self._prefetch()",
                "            self._prefetch()",
            ),
        ),
        "tests/unit/v1/zero/stage3/test_modes.py",
        "leaves_what",
    ),
    Fault(
        "a block that was not entered still reads its parameters",
        "deepspeed/runtime/zero/gathering/gathered_parameters.py",
        (
            (
                "            hide(param)\n        raise",
                "            record_of(param).readers += 1\n        raise",
            ),
        ),
        "tests/unit/v1/zero/stage3/test_modes.py",
        "leaves_what",
    ),
    Fault(
        "a unit is gathered in backward only where something was computed with it",
        "deepspeed/runtime/zero/parameter_offload.py",
        (
            (
                "(frame.has_saved or not isinstance(frame.module, nn.Embedding))",
                "frame.has_saved",
            ),
        ),
        "tests/unit/v1/zero/stage3/test_rows.py",
        "pass_by",
    ),
    Fault(
        "a frozen module is gathered in backward on the ranks that have a gradient for it",
        "deepspeed/runtime/zero/parameter_offload.py",
        (("        if not frame.carries and not any(", "        if not any("),),
        UNEVEN,
        "frozen_behind",
    ),
    Fault(
        "what is small and trained does not count as coming before a frozen module",
        "deepspeed/runtime/zero/parameter_offload.py",
        (("            or module in self._beside_small\n", ""),),
        UNEVEN,
        "frozen_behind",
    ),
    Fault(
        "what is read and trained does not count as coming before a frozen module",
        "deepspeed/runtime/zero/parameter_offload.py",
        (("self._carries or param.requires_grad\n", "self._carries\n"),),
        UNEVEN,
        "frozen_behind",
    ),
    Fault(
        "a rank whose parameters are unused raises alone",
        "deepspeed/runtime/zero/stage_1_and_2.py",
        (
            (
                "            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)\n",
                "            pass\n",
            ),
        ),
        UNEVEN,
        "refused_on_all",
    ),
    Fault(
        "an edit is not heard without an optimizer",
        "deepspeed/runtime/zero/parameter_offload.py",
        (
            (
                "[[nn.Parameter], None] | None = self.shard_changed\n",
                "[[nn.Parameter], None] | None = None\n",
            ),
        ),
        LIFETIMES,
        "without_an_optimizer",
    ),
    Fault(
        "a weight that a forward changes is what it was in the next one",
        "deepspeed/runtime/zero/gathering/gather_unit.py",
        (("        self.forget()\n        _refuse_lost(written)\n", "        self.forget()\n"),),
        LIFETIMES,
        "be_lost_raises",
    ),
    Fault(
        "a small weight that a forward changes is what it was after the step",
        "deepspeed/runtime/zero/parameter_offload.py",
        (("units:\n            unit.refuse_lost_writes()\n", "units:\n            pass\n"),),
        LIFETIMES,
        "be_lost_raises",
    ),
    Fault(
        "parameters are hidden when a block ends while their unit is whole",
        "deepspeed/runtime/zero/gathering/gathered_parameters.py",
        (("                    record.unit.show_again(param)\n", ""),),
        LIFETIMES,
        "around_a_forward",
    ),
    Fault(
        "a unit that is whole does not follow an edit",
        "deepspeed/runtime/zero/parameter_offload.py",
        (("            unit.follow(param)\n", ""),),
        LIFETIMES,
        "inside_the_block",
    ),
    Fault(
        "a rank whose edit would be lost raises alone",
        "deepspeed/runtime/zero/gathering/gathered_parameters.py",
        (
            (
                '        return said_by_all(found, self._sharers()[0], lambda: "the end of '
                'GatheredParameters")\n',
                "        return [found]\n",
            ),
        ),
        LIFETIMES,
        "on_all_ranks",
    ),
    Fault(
        "what rounding leaves of an undone edit stays in what persists",
        "deepspeed/runtime/zero/gathering/gathered_parameters.py",
        (("                if _stays_whole(param):\n", "                if False:\n"),),
        UNDONE,
        "nothing_has_changed",
    ),
    Fault(
        "an edit of what another rank owns passes for an undone one",
        "deepspeed/runtime/zero/gathering/gathered_parameters.py",
        (("                if not is_undone(original, after):\n", "                if False:\n"),),
        UNDONE,
        "a_small_change_is_lost",
    ),
    Fault(
        "rows of a failed gather are used again",
        "deepspeed/runtime/zero/gathering/gather_unit.py",
        (("            shared.rows.drop(rows)\n", "            shared.rows.give_back(rows)\n"),),
        LIFETIMES,
        "memory_is_not_kept",
    ),
    Fault(
        "rows of a gather that nobody can wait for are kept",
        "deepspeed/runtime/zero/gathering/gather_unit.py",
        (
            (
                "                self.resources.rows.drop(self._rows)"
                "  # others may still write there\n"
                "            self._has_no_gather()\n",
                "                pass\n",
            ),
        ),
        LIFETIMES,
        "memory_is_not_kept",
    ),
    Fault(
        "gradients of a unit leave when the last of them comes",
        "deepspeed/runtime/zero/stage3.py",
        (("has_units = bool(self.parameter_offload.units)", "has_units = False"),),
        UNEVEN,
        "one_process",
    ),
    Fault(
        "gradients of a unit leave before those of its earlier use",
        BACKWARD_ORDER,
        (("        return self._has_forgotten or any(", "        return False and any("),),
        UNEVEN,
        "other_ways",
    ),
    Fault(
        "a recomputation runs ahead of what comes before it",
        BACKWARD_ORDER,
        (("                self.come_to((forward, index))\n", "                pass\n"),),
        UNEVEN,
        "recomputation",
    ),
    Fault(
        "a backward that the engine does not run ends at another place on each rank",
        BACKWARD_ORDER,
        (("            engine.queue_callback(lambda: self._end_task(task))\n", ""),),
        UNEVEN,
        "other_ways",
    ),
    Fault(
        "gradients of all units leave at the end of backward",
        "deepspeed/runtime/zero/stage3.py",
        (("            if self.readiness.release(index):", "            if False:"),),
        UNEVEN,
        "leave_during",
    ),
    Fault(
        "experts of stage 3 are cut for all ranks",
        "deepspeed/runtime/zero/model_sharding.py",
        (
            (
                "families.setdefault(sharers(param)",
                "families.setdefault(instances",
            ),
        ),
        "tests/unit/v1/moe/test_moe_contract.py",
        "stage_3",
    ),
    Fault(
        "gradients of experts of stage 3 are cut for all ranks",
        "deepspeed/runtime/zero/unit_buckets.py",
        (("cut(numels, unit.num_shards)", "cut(numels, groups[0].num_shards)"),),
        "tests/unit/v1/moe/test_moe_contract.py",
        "stage_3",
    ),
    Fault(
        "zero.Init hands out shards of another shape on each rank",
        "deepspeed/runtime/zero/init_context.py",
        (("agree_on_parameters(named, everyone", "print(named, everyone"),),
        "tests/unit/v1/zero/stage3/test_divergence.py",
        "under_init",
    ),
    Fault(
        "a unit that several modules share stays when others are used",
        "deepspeed/runtime/zero/gathering/coordinator.py",
        (("or any(last.name != unit.name for last in self._last_fused):", "and False:"),),
        "tests/unit/v1/zero/stage3/test_fusion.py",
        "one_at_a_time",
    ),
    Fault(
        "a module whose unit others share does not wait on its own stream",
        "deepspeed/runtime/zero/gathering/coordinator.py",
        (
            (
                "                unit.fetch()  # it may be another stream that reads now\n"
                "            else:",
                "                pass\n            else:",
            ),
        ),
        "tests/unit/v1/zero/stage3/test_fusion.py",
        "own_stream",
    ),
    Fault(
        "what a recomputation has used goes when another unit is used",
        "deepspeed/runtime/zero/gathering/coordinator.py",
        (("[unit for unit in units if unit not in self._recomputed]", "units"),),
        "tests/unit/v1/zero/stage3/test_fusion.py",
        "equals_one_process",
    ),
    Fault(
        "what a recomputation has used goes after the first of its uses",
        BACKWARD_ORDER,
        (
            (
                "self.coordinator.is_recomputed(unit) and self._is_used_before(forward, unit)",
                "False",
            ),
        ),
        "tests/unit/v1/zero/stage3/test_fusion.py",
        "equals_one_process",
    ),
    Fault(
        "a unit that several modules share goes when one of them is done",
        "deepspeed/runtime/zero/gathering/coordinator.py",
        (("        if unit in self._last_fused:\n            return\n", ""),),
        "tests/unit/v1/zero/stage3/test_fusion.py",
        "between_steps",
    ),
    Fault(
        "a bucket is filled anew while the part of it that goes to the host is on its way",
        "deepspeed/runtime/zero/stage3.py",
        (("read = event if event is not None else read", "read = event"),),
        "tests/unit/v1/offload/test_stage3_partial_offload.py",
        "silent",
    ),
    Fault(
        "shards that have come back are gathered before they are there",
        "deepspeed/runtime/zero/movable_weights.py",
        (("are_away = False\n    offload.resources.mark_updated()\n", "are_away = False\n"),),
        "tests/unit/v1/offload/test_offload_states.py",
        "streams",
    ),
    Fault(
        "a unit's own copy of shards that left is not the one that came back",
        "deepspeed/runtime/zero/stage3.py",
        (("            yield from pair\n", "            yield pair[0]\n"),),
        "tests/unit/v1/offload/test_offload_states.py",
        "streams",
    ),
    Fault(
        "the part of an optimizer that stays on the device is scaled and decayed as at first",
        "deepspeed/runtime/zero/partial_offload.py",
        (("for key in self._host.defaults if key in mine", "for key in ()"),),
        "tests/unit/v1/offload/test_stage3_partial_offload.py",
        "half_precision",
    ),
    Fault(
        "a copy of a sharded parameter has the same shard",
        "deepspeed/runtime/zero/parameters/zero_parameter.py",
        (("of.shard.clone()", "of.shard"),),
        "tests/unit/v1/zero/stage3/test_modules.py",
        "copies_of_shards",
    ),
)
