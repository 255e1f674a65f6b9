"""Faults of saving, loading and exporting."""

from __future__ import annotations

from unit.mutation.table.fault import Fault
from unit.mutation.table.places import AUTOTP, WHOLE_PARAMETERS

FAULTS = (
    Fault(
        "an engine's own window is added to that of the checkpoint",
        "deepspeed/runtime/checkpointing/window_files.py",
        (("    sequence.zero_grad()\n", ""),),
        "tests/unit/v1/checkpoint/test_window.py",
        "what_other",
    ),
    Fault(
        "what was reduced of a window is not resumed",
        "deepspeed/runtime/optimizers/master_weights.py",
        (("            group.grad.copy_(grad)\n", "            pass\n"),),
        "tests/unit/v1/checkpoint/test_window.py",
        "bit_equal and stage2",
    ),
    Fault(
        "parts of a resumed window's gradients are taken for summed",
        "deepspeed/runtime/checkpointing/window_files.py",
        (("        state._sequence_parts.opened()\n", "        pass\n"),),
        "tests/unit/v1/tensor/test_sequence_parts.py",
        "resumed",
    ),
    Fault(
        "a rank without a folder to save in leaves the others in a gather",
        "deepspeed/runtime/checkpointing/saving.py",
        (("        if has_no_path:\n", "        if not is_path:\n"),),
        "tests/unit/v1/checkpoint/test_options.py",
        "client_state",
    ),
    Fault(
        "every rank of stage 3 reads the first one's elements of a safetensors file",
        "deepspeed/runtime/checkpointing/safetensors_loading.py",
        (("self.files.read(source, own.param_start,", "self.files.read(source, 0,"),),
        "tests/unit/v1/checkpoint/test_safetensors.py",
        "owns",
    ),
    Fault(
        "a rank whose disk is full leaves the others in a gather",
        "deepspeed/runtime/checkpointing/sharded_weights.py",
        (("        for _ in values:\n            pass", "        if False:\n            pass"),),
        "tests/unit/v1/checkpoint/test_stage3.py",
        "cannot_be_written",
    ),
    Fault(
        "masters of stage 3 are those of another rank",
        "deepspeed/checkpoint/resharding/cut_parameters.py",
        (("+ place * cut\n", "+ (ranks - 1 - place) * cut\n"),),
        "tests/unit/v1/checkpoint/test_stage3.py",
        "TestResume and fp32",
    ),
    Fault(
        "whole parameters are sliced as if one tensor-parallel rank had saved slices",
        "deepspeed/checkpoint/resharding/rank_slices.py",
        (("        if self._patterns is not None:\n", "        if False:\n"),),
        AUTOTP,
    ),
    Fault(
        "rows of experts are taken for the first ones",
        "deepspeed/runtime/checkpointing/optimizer_resharding.py",
        (("start=first_element(run.param) + run.start", "start=run.start"),),
        "tests/unit/v1/moe/test_auto_ep.py",
        "files",
    ),
    Fault(
        "rows of experts are exported in the order of the ranks",
        "deepspeed/utils/zero_to_fp32.py",
        (("sorted(pieces, key=lambda found: found[0])", "pieces"),),
        "tests/unit/v1/moe/test_auto_ep.py",
        "files",
    ),
    Fault(
        "rows of experts are taken for the first ones in shards of stage 3",
        "deepspeed/checkpoint/resharding/cut_parameters.py",
        (("first = firsts.get(name, 0) + place * cut", "first = place * cut"),),
        "tests/unit/v1/moe/test_auto_ep.py",
        "files",
    ),
    Fault(
        "every rank of stage 3 reads the first rows of experts that are not trained",
        "deepspeed/runtime/checkpointing/sharded_loading.py",
        (("param_start=first_element(param) + own.param_start", "param_start=own.param_start"),),
        "tests/unit/v1/moe/test_auto_ep.py",
        "files",
    ),
    Fault(
        "the rows of experts that ranks of stage 3 share last are exported first",
        "deepspeed/utils/zero_to_fp32.py",
        (
            (
                "                rows += part.elements()",
                "                rows[:0] = part.elements()",
            ),
        ),
        "tests/unit/v1/moe/test_auto_ep.py",
        "files",
    ),
    Fault(
        "one rank's experts are saved in 16 bit as if they were all",
        "deepspeed/runtime/checkpointing/sharded_weights.py",
        (("spread.with_all_rows(param.data)", "param.data"),),
        "tests/unit/v1/moe/test_auto_ep.py",
        "files",
    ),
    Fault(
        "experts of stage 3 are numbered by each rank in its files",
        "deepspeed/checkpoint/resharding/cut_parameters.py",
        (("{prefix: held * share for", "{prefix: 0 * share for"),),
        "tests/unit/v1/checkpoint/test_experts.py",
        "same_by_name",
    ),
    Fault(
        "state of whole parameters is taken for a sign that no masters were saved",
        "deepspeed/runtime/checkpointing/optimizer_resharding.py",
        ((" and not fragment.is_state_alone", ""),),
        WHOLE_PARAMETERS,
        "TestCheckpoints",
    ),
    Fault(
        "a step count that a file has for all is counted on by each",
        "deepspeed/runtime/sharding/loading_in_place.py",
        (("        own[key] = own[key].clone()\n", "        pass\n"),),
        "tests/unit/v1/checkpoint/test_loaded_state.py",
        "one_count",
    ),
    Fault(
        "padding has the state of another group",
        "deepspeed/runtime/checkpointing/optimizer_resharding.py",
        (("target.resemble(fragment, likeness=2)", "target.resemble(fragment, likeness=1)"),),
        "tests/unit/v1/checkpoint/test_updates.py",
        "TestUpdates",
    ),
    Fault(
        "a schedule's rates stay with the number of a group",
        "deepspeed/runtime/checkpointing/loading.py",
        (("scheduler = loaded.optimizer.schedule(scheduler)", "pass"),),
        "tests/unit/v1/checkpoint/test_loaded_state.py",
        "TestRates",
    ),
)
