"""Faults to put into the package, each with the test that has to notice.

`UNDO_FIXES` takes the fixes of docs/fixes/ out again; `FAULTS` breaks single lines of them and of
other guards. Texts are exact and must occur once, so that a fault that no longer fits the code is
an error and not a test of nothing.

    python -m unit.mutation.table fix1

in `tests/` prints the fault as a patch; it needs no torch.
"""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]

ZERO = "deepspeed/runtime/zero/stage_1_and_2.py"
DIST_IMPORT = "from deepspeed import comm as dist\n"
ACCELERATOR_IMPORT = "from deepspeed.accelerator import get_accelerator\n"
BF16 = "deepspeed/runtime/bf16_optimizer.py"
ENGINE = "deepspeed/runtime/engine.py"
SEQUENCE = "deepspeed/runtime/optimizers/step_sequence.py"
OUTCOME = "deepspeed/runtime/optimizers/step_outcome.py"
STREAMS = "deepspeed/runtime/streams.py"
SINK = "deepspeed/runtime/gradients/sink.py"
READINESS = "deepspeed/runtime/gradients/readiness.py"
BACKWARD_ORDER = "deepspeed/runtime/zero/backward_order.py"
REDUCE_RULE = "deepspeed/runtime/gradients/reduce_rule.py"
STATE = "deepspeed/runtime/sharding/state.py"
TENSOR_PARALLEL = "deepspeed/runtime/tensor_parallel/"

FIX1 = "tests/unit/v1/zero/test_fix1_ipg_bucket_streams.py"
FIX2 = "tests/unit/v1/zero/test_fix2_hook_stream.py"
FIX3 = "tests/unit/v1/zero/test_fix3_grad_norm_one_collective.py"
FIX4 = "tests/unit/v1/bf16/test_fix4_boundary_microbatch.py"
LARGE_SUMS = "tests/unit/v1/fp16/test_large_sums.py"
SCALING = "tests/unit/v1/fp16/test_dynamic_scaling.py"
WAITS = "tests/unit/v1/device/test_host_waits.py"
WHOLE_PARAMETERS = "tests/unit/v1/zero/test_whole_parameters.py"
LAYOUT = "tests/unit/v1/zero/test_layout.py"
HYBRID = "tests/unit/v1/zero/test_stage3_hybrid.py"
UNEVEN = "tests/unit/v1/zero/test_stage3_uneven.py"
AUTOTP = "tests/unit/v1/tensor/test_autotp.py"
AUTOTP_STRUCTURE = "tests/unit/v1/tensor/test_autotp_structure.py"
AUTOTP_RANKS = "tests/unit/v1/tensor/test_autotp_ranks.py"


@dataclass(frozen=True)
class Fault:
    """A change of the package's text that one test must notice.

    Attributes:
        name: What goes wrong.
        file: Which file is changed, relative to the repository.
        changes: Pairs of the exact text, which occurs once in the file, and its replacement.
        test: Test file that must fail.
        select: pytest's `-k` expression; empty is the whole file.
    """

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    test: str
    select: str = ""

    def apply(self, root: Path) -> tuple[str, str]:
        """The text of `file` below `root` before and after.

        Raises:
            ValueError: If a text doesn't occur exactly once.
        """
        before = (root / self.file).read_text(encoding="utf-8")
        after = before
        for old, new in self.changes:
            if after.count(old) != 1:
                raise ValueError(
                    f"{self.name}: {self.file} has this text {after.count(old)} times, not "
                    f"once:\n{old}"
                )
            after = after.replace(old, new)
        return before, after

    def patch(self, root: Path) -> str:
        """The change as a unified diff."""
        before, after = (text.splitlines(keepends=True) for text in self.apply(root))
        return "".join(difflib.unified_diff(before, after, f"a/{self.file}", f"b/{self.file}"))


RECORD_AND_COMMENT = """\
        if self.comm_context.has_streams:
            # [fix 2] The stream current here, inside the hook, is the one that produced this
            # gradient: autograd runs the hook on the stream of the accumulation node, which need
            # not be the default stream nor the one the optimizer was built on.
            self.ipg_buckets[self._slots[i][0]].copy_streams.add(self.comm_context.current_stream())
"""
WAIT = """\
        self.comm_context.wait_for(bucket.copy_streams or {self.comm_context.current_stream()})
"""
WAIT_COMMENT = """\
        # [fix 1] The gradients of one bucket come from as many streams as their hooks ran on.
        # Reading them is safe only after the work of *all* of these streams; the one current now is
        # right only if no hook recorded any.
"""
CLEAR = '''\
        """Forget the contributions. The streams too [fix 1]: a stale one would order the next
        reduction after unrelated work.
        """
'''
REMAINING_STREAMS = """\
        streams = self.ipg_buckets[index].copy_streams
        if streams:
            streams.add(self.comm_context.current_stream())
"""
NORM_LOOP = """\
            squares[self._param_group_of(group_index)] += local(group_index).squeeze()
        # [fix 3] One reduction after all groups, of a tensor as long on every rank: ranks may own
        # different numbers of groups (pipeline stages do), and a collective per group would then
        # never match. fp32 whatever the model's dtype.
        if self.norm_group is not None:
            dist.all_reduce(squares, op=dist.ReduceOp.SUM, group=self.norm_group)
"""
NORM_LOOP_PER_GROUP = """\
            squared = local(group_index)
            if self.norm_group is not None:
                dist.all_reduce(squared, op=dist.ReduceOp.SUM, group=self.norm_group)
            squares[group_index] += squared.squeeze()
"""
EPILOGUE = """\
        sequence.backward_epilogue()
        if self.enable_backward_allreduce and not self.inside_no_sync_ctxt:
            self.allreduce_gradients()
        self._exit_backward(sequence)
"""
EPILOGUE_REDUCES_FIRST = """\
        if self.enable_backward_allreduce and not self.inside_no_sync_ctxt:
            self.allreduce_gradients()
        sequence.backward_epilogue()
        self._exit_backward(sequence)
"""
ABSORB = """\
            self.accumulator.absorb_one(group_index, index, 1.0 / self.accumulation_divisor)
"""
ABSORB_ELSEWHERE = """\
            from deepspeed.accelerator import get_accelerator

            with get_accelerator().stream(get_accelerator().default_stream()):
                self.accumulator.absorb_one(group_index, index, 1.0 / self.accumulation_divisor)
"""

UNDO_FIXES = (
    Fault(
        "fix1",
        ZERO,
        (
            ("        copy_streams: Streams that the gradients were produced on.\n", ""),
            ("    copy_streams: set[Stream] = field(default_factory=set)\n", ""),
            (CLEAR, '        """Forget the contributions."""\n'),
            ("        self.copy_streams.clear()\n", ""),
            (RECORD_AND_COMMENT, ""),
            (REMAINING_STREAMS, ""),
            (WAIT_COMMENT, ""),
            (WAIT, "        self.comm_context.wait_for({self.comm_context.current_stream()})\n"),
            (
                "        producers = bucket.copy_streams or {self.comm_context.current_stream()}\n",
                "        producers = {self.comm_context.current_stream()}\n",
            ),
        ),
        FIX1,
    ),
    Fault(
        "fix2",
        ZERO,
        (
            (
                "copy_streams.add(self.comm_context.current_stream())",
                "copy_streams.add(get_accelerator().default_stream())",
            ),
            (DIST_IMPORT, DIST_IMPORT + ACCELERATOR_IMPORT),
        ),
        FIX2,
        "TestZero",
    ),
    Fault("fix3", ZERO, ((NORM_LOOP, NORM_LOOP_PER_GROUP),), FIX3),
    Fault("fix4", ENGINE, ((EPILOGUE, EPILOGUE_REDUCES_FIRST),), FIX4),
)
FAULTS = (
    Fault("no stream is recorded", ZERO, ((RECORD_AND_COMMENT, ""),), FIX1, "TestProducerStreams"),
    Fault(
        "no fallback to the current stream",
        ZERO,
        (
            (
                "wait_for(bucket.copy_streams or {self.comm_context.current_stream()})",
                "wait_for(bucket.copy_streams)",
            ),
        ),
        FIX1,
        "TestFallback",
    ),
    Fault(
        "clear keeps the streams",
        ZERO,
        (("        self.copy_streams.clear()\n", ""),),
        FIX1,
        "clear",
    ),
    Fault(
        "a bf16 hook works on another stream",
        BF16,
        ((ABSORB, ABSORB_ELSEWHERE),),
        FIX2,
        "TestBF16Optimizer",
    ),
    Fault(
        "the offloaded norm is reduced per group",
        ZERO,
        (
            (
                'self._squared_norm(group_index, torch.device("cpu")).to(self.device)',
                'self._reduced(self._squared_norm(group_index, torch.device("cpu"))'
                ".to(self.device))\n\n"
                "    def _reduced(self, squared: torch.Tensor) -> torch.Tensor:\n"
                "        dist.all_reduce(squared, group=self.norm_group)\n"
                "        return squared",
            ),
        ),
        FIX3,
        "TestOneCollective and True",
    ),
    Fault(
        "squares are summed in bf16",
        ZERO,
        (
            (
                "torch.zeros(self.num_norm_groups, dtype=torch.float32,",
                "torch.zeros(self.num_norm_groups, dtype=torch.bfloat16,",
            ),
        ),
        FIX3,
        "TestPrecision",
    ),
    Fault(
        "the norm stays local",
        ZERO,
        (
            (
                "dist.all_reduce(squares, op=dist.ReduceOp.SUM, group=self.norm_group)",
                "pass",
            ),
        ),
        FIX3,
        "TestOneCollective",
    ),
    Fault(
        "the last micro-batch never joins", BF16, (("        self.update_hp_grads()\n", ""),), FIX4
    ),
    Fault(
        "the accumulator that is reduced is a copy",
        BF16,
        (
            (
                "            self.get_grads_for_reduction(),\n",
                "            [flat.clone() for flat in self.get_grads_for_reduction()],\n",
            ),
        ),
        FIX4,
    ),
    Fault(
        "unscaled with the next scale",
        SEQUENCE,
        (
            (
                "        return float(self._scaler.loss_scale)\n",
                "        after = type(self._scaler).__new__(type(self._scaler))\n"
                "        after.__dict__.update(self._scaler.__dict__)\n"
                "        after.update_scale(False)\n"
                "        return float(after.loss_scale)\n",
            ),
        ),
        SCALING,
        "growth",
    ),
    Fault(
        "steps with a gradient that is not finite",
        SEQUENCE,
        (
            (
                "        elif not self.overflow:\n",
                "        else:\n",
            ),
        ),
        SCALING,
        "test_overflow_on_one_rank_skips_on_both",
    ),
    Fault(
        "a matrix is made orthogonal by its parts",
        "deepspeed/runtime/sharding/dealt_parameters.py",
        (
            (
                "        dealt = self.to_owners(shard, self._device)\n",
                "        dealt = shard.new_zeros(self.table.shard_numel)\n"
                "        dealt[: shard.numel()] = shard[: dealt.numel()]\n",
            ),
        ),
        "tests/unit/v1/zero/test_whole_parameters.py",
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
        "tests/unit/v1/zero/test_whole_parameters.py",
        "TestAsOneProcess",
    ),
    Fault(
        "a mark that another optimizer does not read",
        "deepspeed/runtime/optimizers/muon_groups.py",
        (("    if is_elementwise:\n", "    if False:\n"),),
        "tests/unit/v1/zero/test_whole_parameters.py",
        "test_refused",
    ),
    Fault(
        "the first write adds to what was left",
        SINK,
        (("first = bucket not in self._written", "first = False"),),
        "tests/unit/runtime/gradients/test_sink.py",
    ),
    Fault(
        "fp16 is summed before it is divided",
        REDUCE_RULE,
        (("if travels_in == torch.float16 else 1.0", "if False else 1.0"),),
        LARGE_SUMS,
        "test_the_mean_is_used",
    ),
    Fault(
        "a given predivide factor is overruled",
        REDUCE_RULE,
        (("        if factor is None:\n", "        if True:\n"),),
        LARGE_SUMS,
        "test_the_users_factor_is_used",
    ),
    Fault(
        "two receives ahead on one hardware queue",
        "deepspeed/runtime/pipe/channel.py",
        (("int(given) < DEFAULT_QUEUES else", "int(given) < 1 else"),),
        "tests/unit/v1/device/test_pipelines.py",
        "one_queue",
    ),
    Fault(
        "a device whose blocked queues block no other stream",
        "deepspeed/verify/budgets.py",
        (("for _ in range(budget.queues)]", "for _ in range(99)]"),),
        "tests/unit/verify/test_budgets.py",
        "blocks_its_queue",
    ),
    Fault(
        "kernels that hold no processors while they wait for other ranks",
        "deepspeed/verify/budgets.py",
        (("            self.free -= self._budget.needs(entry)\n", ""),),
        "tests/unit/verify/test_budgets.py",
        "receives_ahead",
    ),
    Fault(
        "a receive is posted too early",
        "deepspeed/runtime/pipe/stage_channels.py",
        (("            and self._coming[0][1] <= self._issued\n", ""),),
        "tests/unit/v1/device/test_pipelines.py",
        "posts_what_depends_on_nothing_to_come",
    ),
    Fault(
        "buckets leave as they are ready",
        READINESS,
        (
            (
                "        return range(first, self._next)\n\n    def remaining",
                "        return range(bucket, bucket + (not self._missing[bucket]))\n\n"
                "    def remaining",
            ),
        ),
        "tests/unit/runtime/gradients/test_readiness.py",
    ),
    Fault(
        "a bucket's padding is what was there before",
        ZERO,
        (
            (
                "                buffer.tensor[plan.used : plan.numel].zero_()\n",
                "                pass\n",
            ),
        ),
        LAYOUT,
        "padding and True",
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
        "a late gradient is forgotten",
        READINESS,
        (
            (
                "            self.late.add(slot)\n            return range(0)\n",
                "            return range(0)\n",
            ),
        ),
        "tests/unit/runtime/gradients/test_readiness.py",
    ),
    Fault(
        "the host looks at the norm before the update",
        SEQUENCE,
        (
            (
                "            self._late_norms.rotate()\n",
                "            self._late_norms.rotate()\n            self.learn_outcome()\n",
            ),
        ),
        WAITS,
        "test_of_a_step",
    ),
    Fault(
        "the optimizer does not hear that the step is skipped",
        OUTCOME,
        (("optimizer.found_inf = self.found_inf", "optimizer.found_inf = None"),),
        WAITS,
        "test_training",
    ),
    Fault(
        "the host copy of one norm is used for two steps",
        SEQUENCE,
        (("            self._late_norms.rotate()\n", ""),),
        WAITS,
        "nobody_asked",
    ),
    Fault(
        "the host reads a norm that is still on its way",
        STREAMS,
        (("        self._copied.synchronize()\n", ""),),
        "tests/unit/runtime/optimizers/test_step_outcome.py",
        "late",
    ),
    Fault(
        "a skipped step of fused SGD makes its momentum",
        OUTCOME,
        (('        group["momentum"] and optimizer', "        False and optimizer"),),
        "tests/unit/runtime/optimizers/test_step_outcome.py",
        "momentum",
    ),
    Fault(
        "the norm of a skipped step is reported",
        SEQUENCE,
        (
            (
                "            else:\n                self._applied = outcome\n",
                "            self._applied = outcome\n",
            ),
        ),
        "tests/unit/v1/zero/test_clients_ways.py",
        "TestNorm",
    ),
    Fault(
        "zero.Init cuts a model for a stage that does not gather it",
        "deepspeed/runtime/zero/init_context.py",
        (('str(stage) in ("3", "3.0", "auto")', "True"),),
        "tests/unit/v1/zero/test_clients_ways.py",
        "TestZeroNames",
    ),
    Fault(
        "buffers are rounded with the parameters",
        "deepspeed/runtime/model_setup.py",
        (
            (
                "        wanted = buffers if id(tensor) in kept else dtype\n",
                "        wanted = dtype\n",
            ),
        ),
        "tests/unit/v1/zero/test_buffer_dtypes.py",
        "kept",
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
        (("first = place * cut\n", "first = (ranks - 1 - place) * cut\n"),),
        "tests/unit/v1/checkpoint/test_stage3.py",
        "TestResume and fp32",
    ),
    Fault(
        "a norm of heads is trained by the heads of its rank",
        TENSOR_PARALLEL + "structure.py",
        (("                plan.partial.append(name)\n", "                pass\n"),),
        AUTOTP,
    ),
    Fault(
        "the input of a column-parallel layer has the gradient of its rank's columns",
        TENSOR_PARALLEL + "layers.py",
        (("        dist.all_reduce(total, group=ctx.ranks.group)\n", ""),),
        AUTOTP,
    ),
    Fault(
        "queries, keys and values in one weight are cut as one",
        TENSOR_PARALLEL + "cutting.py",
        (("param.data.split(sizes, dim)", "param.data.split(param.shape[dim], dim)"),),
        AUTOTP,
    ),
    Fault(
        "every rank has the alibi of the first one's heads",
        TENSOR_PARALLEL + "families.py",
        (("self.ranks.rank * self.heads : (self.ranks.rank + 1) * self.heads", ": self.heads"),),
        AUTOTP,
    ),
    Fault(
        "ranks that share layers start from weights of their own",
        TENSOR_PARALLEL + "cutting.py",
        (
            (
                "broadcast_tensors((*model.parameters(), *model.buffers()), ranks",
                "broadcast_tensors((), ranks",
            ),
        ),
        AUTOTP,
    ),
    Fault(
        "slices are counted in the norm by the first rank",
        TENSOR_PARALLEL + "cutting.py",
        (("    param.tensor_model_parallel = True ", "    param.tensor_model_parallel = False "),),
        AUTOTP,
    ),
    Fault(
        "gates and ups in one layer of another's name are paired with each other",
        TENSOR_PARALLEL + "structure.py",
        (("    _check_widths(by_name, problems)\n", ""),),
        AUTOTP_STRUCTURE,
    ),
    Fault(
        "what is not known in a block is left whole between layers that are cut",
        TENSOR_PARALLEL + "structure.py",
        (("    _explain(plan, model, partition, problems)\n", ""),),
        AUTOTP_STRUCTURE,
    ),
    Fault(
        "whole parameters are sliced as if one tensor-parallel rank had saved slices",
        "deepspeed/checkpoint/resharding/rank_slices.py",
        (("        if self._patterns is not None:\n", "        if False:\n"),),
        AUTOTP,
    ),
    Fault(
        "ranks that share layers train on different batches",
        TENSOR_PARALLEL + "same_inputs.py",
        (("        if any(found):\n", "        if False:\n"),),
        AUTOTP_RANKS,
    ),
    Fault(
        "ranks that share layers drop out different activations",
        TENSOR_PARALLEL + "same_inputs.py",
        (("            self._share_random_states()\n", ""),),
        AUTOTP_RANKS,
    ),
    Fault(
        "an input's gradient is read before the ranks have summed it",
        TENSOR_PARALLEL + "layers.py",
        (("            work.wait()\n", "            pass\n"),),
        AUTOTP_RANKS,
    ),
    Fault(
        "a frozen base in bf16 becomes fp32 at stage 3",
        "deepspeed/runtime/zero/model_sharding.py",
        (("wanted = None if dtype == torch.float32 else dtype", "wanted = dtype"),),
        "tests/unit/v1/zero/test_stage3_adapters.py",
        "base_in_bf16",
    ),
    Fault(
        "an adapter that comes late is trained by nobody, in silence",
        "deepspeed/runtime/zero/parameter_offload.py",
        (("        if late and self.give_up is not None:", "        if False:"),),
        "tests/unit/v1/zero/test_stage3_adapters.py",
        "trained_ones",
    ),
    Fault(
        "a frozen layer that comes late keeps each rank's own values",
        "deepspeed/runtime/zero/parameter_offload.py",
        (("            if self._late.may_be_there:", "            if False:"),),
        "tests/unit/v1/zero/test_stage3_adapters.py",
        "frozen_ones",
    ),
    Fault(
        "a unit is let go that a failed gather kept from being taken",
        "deepspeed/runtime/zero/parameter_offload.py",
        (
            (
                "frame := Frame(module, self.backward_order.enter()))",
                "frame := Frame(module, self.backward_order.enter()))\n"
                "        frame.units += (*self._uses.get(module, ()), *self._external(module))",
            ),
            (
                "            frame.units.append(unit)\n            self.param_",
                "            self.param_",
            ),
        ),
        "tests/unit/v1/zero/test_stage3_modes.py",
        "leaves_what",
    ),
    Fault(
        "a failed gather counts as whole",
        "deepspeed/runtime/zero/partitioned_param_coordinator.py",
        (
            (
                "        unit.fetch()  # if it fails",
                "        self.live_numel += added\n        unit.fetch()  # if it fails",
            ),
            (
                "        self.live_numel += added\n        self._prefetch()",
                "        self._prefetch()",
            ),
        ),
        "tests/unit/v1/zero/test_stage3_modes.py",
        "leaves_what",
    ),
    Fault(
        "a block that was not entered still reads its parameters",
        "deepspeed/runtime/zero/gathered_parameters.py",
        (
            (
                "            hide(param)\n        raise",
                "            record_of(param).readers += 1\n        raise",
            ),
        ),
        "tests/unit/v1/zero/test_stage3_modes.py",
        "leaves_what",
    ),
    Fault(
        "forwards stay compiled when an engine of stage 3 has ended",
        ENGINE,
        (("            compiled.remove()\n", "            pass\n"),),
        "tests/unit/v1/zero/test_stage3_modes.py",
        "same_gradients",
    ),
    Fault(
        "a model of stage 3 is compiled with the gathers of its blocks",
        "deepspeed/runtime/compiler.py",
        (("in parts_between_hooks(roots, has_hooks)", "in [model]"),),
        "tests/unit/v1/zero/test_stage3_modes.py",
        "same_gradients",
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
        "tests/unit/v1/zero/test_stage3_rows.py",
        "pass_by",
    ),
    Fault(
        "a rank without tokens for its experts stays away from exchange and reduction",
        "deepspeed/moe/owner_exchange.py",
        (("outputs = rows + nothing.to(rows.dtype)", "outputs = rows"),),
        "tests/unit/v1/moe/test_auto_ep.py",
        "equals",
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
        "experts of stage 3 are numbered by each rank in its files",
        "deepspeed/checkpoint/resharding/cut_parameters.py",
        (("{prefix: held * share for", "{prefix: 0 * share for"),),
        "tests/unit/v1/checkpoint/test_experts.py",
        "stage_3 or SavedExperts",
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
        "each instance of stage 3 starts with the values of its own first rank",
        "deepspeed/runtime/zero/zero_parameter.py",
        (("    if across is not None and shard.numel():", "    if False:"),),
        HYBRID,
        "test_init",
    ),
    Fault(
        "an edit stays in the instance of the rank that made it",
        "deepspeed/runtime/zero/gathered_parameters.py",
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
        "deepspeed/runtime/zero/gathered_parameters.py",
        (
            (
                "self._agree(record_of(self.params[0]).instances.everyone)",
                "self._agree(record_of(self.params[0]).group)",
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
        "deepspeed/runtime/zero/partitioned_param_coordinator.py",
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
        "deepspeed/runtime/zero/gather_unit.py",
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
        "deepspeed/runtime/zero/secondary_shards.py",
        (("start = dist.get_rank(group=group) * numel", "start = 0 * numel"),),
        HYBRID,
        "one_process",
    ),
    Fault(
        "backward gathers over all ranks though there are copies",
        "deepspeed/runtime/zero/secondary_shards.py",
        (("self._is_wanted, self._is_right = False, True", "self._is_wanted = False"),),
        HYBRID,
        "collectives",
    ),
    Fault(
        "a shard is updated that a gather begun ahead still reads",
        "deepspeed/runtime/zero/gather_unit.py",
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
        "deepspeed/runtime/zero/gather_unit.py",
        (
            (
                "                self._pending.wait()\n                self._keep(filled)\n",
                "                self._keep(filled)\n                self._pending.wait()\n",
            ),
        ),
        HYBRID,
        "collectives",
    ),
    Fault(
        "zero.Init hands out shards of another shape on each rank",
        "deepspeed/runtime/zero/init_context.py",
        (("            agree_on_parameters(named", "            print(named"),),
        "tests/unit/v1/zero/test_stage3_divergence.py",
        "under_init",
    ),
    Fault(
        "a unit that several modules share stays when others are used",
        "deepspeed/runtime/zero/partitioned_param_coordinator.py",
        (("or any(last.name != unit.name for last in self._last_fused):", "and False:"),),
        "tests/unit/v1/zero/test_stage3_fusion.py",
        "one_at_a_time",
    ),
    Fault(
        "a module whose unit others share does not wait on its own stream",
        "deepspeed/runtime/zero/partitioned_param_coordinator.py",
        (
            (
                "                unit.fetch()  # it may be another stream that reads now\n"
                "            elif",
                "                pass\n            elif",
            ),
        ),
        "tests/unit/v1/zero/test_stage3_fusion.py",
        "own_stream",
    ),
    Fault(
        "a unit that several modules share goes when one of them is done",
        "deepspeed/runtime/zero/partitioned_param_coordinator.py",
        (("        if unit in self._last_fused:\n            return\n", ""),),
        "tests/unit/v1/zero/test_stage3_fusion.py",
        "between_steps",
    ),
    Fault(
        "an optimizer of whole parameters steps shards",
        "deepspeed/runtime/optimizers/on_shards.py",
        (("    return OwnerSteps(basic)\n", "    return basic\n"),),
        WHOLE_PARAMETERS,
        "TestAsOneProcess",
    ),
    Fault(
        "masters that an owner has updated stay with it",
        "deepspeed/runtime/sharding/owner_steps.py",
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
        "state of whole parameters is taken for a sign that no masters were saved",
        "deepspeed/runtime/checkpointing/optimizer_resharding.py",
        ((" and not fragment.is_state_alone", ""),),
        WHOLE_PARAMETERS,
        "TestCheckpoints",
    ),
    Fault(
        "a rank loads state of whole parameters that are another's",
        "deepspeed/runtime/sharding/owner_steps.py",
        (("there == here or not there for", "True for"),),
        WHOLE_PARAMETERS,
        "TestCheckpoints",
    ),
    Fault(
        "an optimizer is tried at a rate of zero",
        "deepspeed/runtime/optimizers/update_probe.py",
        (('        options["lr"] = _LR\n', "        pass\n"),),
        "tests/unit/runtime/optimizers/test_update_probe.py",
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
        "deepspeed/runtime/zero/stage3.py",
        (
            (
                "are_away = False\n            self.parameter_offload.resources.mark_updated()\n",
                "are_away = False\n",
            ),
        ),
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
)


def main(names: list[str]) -> int:
    """Print faults as patches."""
    known = {fault.name: fault for fault in (*UNDO_FIXES, *FAULTS)}
    for name in names:
        sys.stdout.write(known[name].patch(REPOSITORY))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
