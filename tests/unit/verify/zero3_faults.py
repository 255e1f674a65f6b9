"""Faults of stage 3, and the guard that must find each; see `faults`, which lists them with its
own.
"""

from __future__ import annotations

from unit.mutation.table.places import ZERO
from unit.verify.mutation_form import Mutation

UNIT = "deepspeed/runtime/zero/gathering/gather_unit.py"
POOL = "deepspeed/runtime/zero/gathering/memory_pool.py"
OFFLOAD = "deepspeed/runtime/zero/parameter_offload.py"
SAVED = "deepspeed/runtime/zero/gathering/saved_tensors.py"
ROWS = "deepspeed/runtime/sharding/cut_rows.py"
COORDINATOR = "deepspeed/runtime/zero/gathering/coordinator.py"
STAGE3 = "deepspeed/runtime/zero/stage3.py"
BY_HAND = "deepspeed/runtime/zero/gathering/gathered_parameters.py"

RACE = r"never waits for"
OFF = r"stage 3: "

ZERO3 = (
    Mutation(
        "a shard is gathered before it is updated",
        UNIT,
        (("stream.wait_event(self.shards_updated)", "pass"),),
        "streams: stage 3",
        RACE,
    ),
    Mutation(
        "a unit is gathered before its shard has come from the host",
        UNIT,
        (
            (
                "            self.gather.stream.wait_event(self._last_load)",
                "            pass",
            ),
        ),
        "streams: stage 3, on the host, 1 rank",
        RACE + r"(.|\n)*<parameter load stream>|parameter load stream(.|\n)*" + RACE,
    ),
    Mutation(
        "the host updates a shard that is still being loaded",
        UNIT,
        (("            self._last_load.synchronize()\n", ""),),
        "streams: stage 3, on the host, 1 rank",
        r"the host never waits for <parameter load stream>",
    ),
    Mutation(
        "the device updates a shard that is still being loaded",
        UNIT,
        (
            (
                "            get_accelerator().current_stream().wait_event(self.last_gather)\n",
                "            pass\n",
            ),
        ),
        "streams: stage 3, on the host, masters on the device, 1 rank",
        RACE + r" <parameter load stream>",
    ),
    Mutation(
        "a row is loaded that a copy-out still reads",
        POOL,
        (
            (
                "                buffer.wait_for_reads(get_accelerator().current_stream())",
                "                pass",
            ),
        ),
        "streams: stage 3, on the host, 1 rank",
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
        SAVED,
        (
            (
                "        if buffer is None:\n            # Without",
                "        if True:\n            # Without",
            ),
        ),
        "oracle: stage 3 on the device",
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
    Mutation(
        "a second stream does not wait for the copy-out",
        UNIT,
        (("                stream.wait_event(self._copied)\n", ""),),
        "streams: stage 3",
        RACE + r"(.|\n)*_finish(.|\n)*forward",
    ),
    Mutation(
        "whole memory goes back without its readers",
        UNIT,
        (("give_back(self._memory, self._readers)", "give_back(self._memory)"),),
        "streams: stage 3",
        RACE + r"(.|\n)*forward(.|\n)*copy_out",
    ),
    Mutation(
        "rows go back without their readers",
        UNIT,
        (("(rows, () if current is None else (current,))", "(rows)"),),
        "streams: stage 3",
        RACE + r"(.|\n)*copy_out(.|\n)*in start",
    ),
    Mutation(
        "what is gathered stays over a step",
        OFFLOAD,
        (
            (
                'are about to change."""\n        self.param_coordinator.release_all()\n',
                'are about to change."""\n',
            ),
        ),
        "oracle: stage 3, kept",
        OFF + r"unit \S+ was gathered before update 1",
    ),
    Mutation(
        "copied shards do not follow an update",
        STAGE3,
        (
            (
                "        if self._copied:\n            torch._foreach_copy_",
                "        if False:\n            torch._foreach_copy_",
            ),
        ),
        "oracle: stage 3",
        OFF + r"after step 0 are off: .*blocks\.0\.up\.weight",
    ),
    Mutation(
        "a hold is dropped early",
        COORDINATOR,
        (("if unit.holds or unit.is_kept_for_backward", "if unit.is_kept_for_backward"),),
        "oracle: stage 3",
        OFF + r".*gate\.weight is sharded",
    ),
    Mutation(
        "what was gathered ahead has an edited parameter's old value",
        COORDINATOR,
        (("        if unit in self._ahead:\n            self._release(unit)\n", "        pass\n"),),
        "oracle: stage 3",
        OFF + r"after step \d are off: evaluation",
    ),
    Mutation(
        "an edit is shown and not kept",
        BY_HAND,
        (
            (
                "            param.data.copy_(piece.view(param.shape))\n            _keep(param)\n",
                "            param.data.copy_(piece.view(param.shape))\n",
            ),
        ),
        "oracle: stage 3",
        OFF + r"after step \d are off: blocks\.0\.up\.weight",
    ),
    Mutation(
        "an edit does not reach the masters",
        BY_HAND,
        (("            record.on_edit(param)\n", "            pass\n"),),
        "oracle: stage 3",
        OFF + r"after step \d are off: blocks\.",
    ),
    Mutation(
        "shards are put together in another order of ranks",
        ROWS,
        (
            (
                "matrix = rows.view(self._num_shards, -1)",
                "matrix = rows.view(self._num_shards, -1).flip(0)",
            ),
        ),
        "oracle: stage 3",
        OFF + r".*(inlet|blocks)",
    ),
    Mutation(
        "padding is not zero",
        ROWS,
        (("zeros = list(self._padding)", "zeros: list[torch.Tensor] = []"),),
        "oracle: stage 3 on the device",
        OFF + r"after step 0 are off: .*padding of ",
    ),
    Mutation(
        "the norm is that of one shard",
        ZERO,
        (
            (
                "reduce_squared_norm(squares, self.norm_group)",
                "squares",
            ),
        ),
        "oracle: stage 3",
        OFF + r"after step 0 are off: norm by [^,]*$",
    ),
    Mutation(
        "gradients of a unit are not sent when backward is done with it",
        STAGE3,
        (("                self._send_incomplete(index)\n", "                pass\n"),),
        "ledger: stage 3",
        r"lost: micro-batch 1 of 1 of every rank never arrived",
    ),
    Mutation(
        "an edited shard is gathered while it is written",
        STAGE3,
        (
            (
                "        # After the master, which in fp32 is the memory that gathers read.\n"
                "        self.parameter_offload.shard_changed(param)\n",
                "",
            ),
        ),
        "streams: stage 3, some persist",
        RACE + r"(.|\n)*_on_edit(.|\n)*in start",
    ),
)
