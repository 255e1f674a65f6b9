"""Faults of layers that are cut over ranks."""

from __future__ import annotations

from unit.mutation.table.fault import Fault
from unit.mutation.table.places import (
    AUTOTP,
    AUTOTP_MODEL_PLAN,
    AUTOTP_RANKS,
    AUTOTP_STAGE3,
    AUTOTP_STRUCTURE,
    AUTOTP_UNEVEN,
    TENSOR_PARALLEL,
)

FAULTS = (
    Fault(
        "a norm of heads is trained by the heads of its rank",
        TENSOR_PARALLEL + "structure.py",
        (("                plan.partial.append(name)\n", "                pass\n"),),
        AUTOTP,
    ),
    Fault(
        "the width of queries' heads is that of keys with other heads",
        TENSOR_PARALLEL + "families.py",
        (("pairs or num_outputs(keys) // width", "num_outputs(keys) // width"),),
        AUTOTP_STRUCTURE,
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
        (('own_slice("", whole, sizes,', 'own_slice("", whole, whole.shape[dim : dim + 1],'),),
        AUTOTP,
    ),
    Fault(
        "every rank has the alibi of the first one's heads",
        TENSOR_PARALLEL + "families.py",
        (("self.share.first : self.share.first + self.share.own", ": self.share.own"),),
        AUTOTP,
    ),
    Fault(
        "ranks that share layers start from weights of their own",
        TENSOR_PARALLEL + "cutting.py",
        (
            (
                "broadcast_tensors((*whole, *model.buffers()), ranks",
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
        "gathered outputs have the gradient of the first rank's",
        TENSOR_PARALLEL + "layers.py",
        (("grads[0].split(ctx.widths, -1)[ctx.ranks.rank]", "grads[0].split(ctx.widths, -1)[0]"),),
        AUTOTP_MODEL_PLAN,
    ),
    Fault(
        "an embedding's weight is cut with the head that it is tied to",
        TENSOR_PARALLEL + "structure.py",
        (("    _leave_whole(plan, model)\n", ""),),
        AUTOTP_MODEL_PLAN,
    ),
    Fault(
        "a model's plan comes before the families that are known",
        TENSOR_PARALLEL + "structure.py",
        (("partition is None and family not in FAMILIES", "partition is None"),),
        AUTOTP_MODEL_PLAN,
    ),
    Fault(
        "a plan's parameter that acts on what is cut keeps its rank's gradient",
        TENSOR_PARALLEL + "structure.py",
        ((" or (is_inside and spec is not None and spec.is_partial)", ""),),
        AUTOTP_MODEL_PLAN,
    ),
    Fault(
        "queries are dealt out without their keys",
        TENSOR_PARALLEL + "structure.py",
        (("replace(cut, pieces=pieces) for cut in divided", "cut for cut in divided"),),
        AUTOTP_UNEVEN,
    ),
    Fault(
        "slices are gathered as if all were as large as the first",
        "deepspeed/checkpoint/resharding/tensor_parallel.py",
        (("share.own * of_piece", "shares[0].own * of_piece"),),
        AUTOTP_UNEVEN,
    ),
    Fault(
        "a checkpoint of uneven slices is cut evenly",
        "deepspeed/checkpoint/resharding/tensor_parallel.py",
        (("entry.get(keys.PIECES, size)", "size"),),
        AUTOTP_UNEVEN,
    ),
    Fault(
        "stage 3 puts slices together in the order of each rank's own units",
        "deepspeed/runtime/checkpointing/sharded_weights.py",
        (("    if slices is not None:\n        known", "    if False:\n        known"),),
        AUTOTP_UNEVEN,
    ),
    Fault(
        "stage 3 cuts slices over ranks that have others",
        "deepspeed/runtime/zero/model_sharding.py",
        (
            (
                "instances = ranks.parallel_map.optimizer_instances(zero.num_optimizer_instances)",
                "instances = OptimizerInstances(dist.get_world_group())",
            ),
        ),
        AUTOTP_STAGE3,
    ),
    Fault(
        "stage 3 leaves other ranks' slices out of the norm",
        "deepspeed/runtime/optimizer_factory.py",
        (
            (
                '"norm_group": context.ranks.norm_group,',
                '"norm_group": context.ranks.replicas,',
            ),
        ),
        AUTOTP_STAGE3,
    ),
    Fault(
        "stage 3 counts a parameter in the norm on every rank that shares layers",
        "deepspeed/runtime/optimizer_factory.py",
        (('"counts_in_norm": context.ranks.counts_shard,', '"counts_in_norm": None,'),),
        AUTOTP_STAGE3,
    ),
    Fault(
        "stage 3 exports the first rank's slices",
        "deepspeed/runtime/checkpointing/sharded_weights.py",
        (("slices.put_together(_name_of(param), param.data)", "param.data"),),
        AUTOTP_STAGE3,
    ),
    Fault(
        "frozen slices of stage 3 are read from the first rank's files",
        "deepspeed/runtime/checkpointing/loading.py",
        (("options.load_module_strict, tensor.rank", "options.load_module_strict, 0"),),
        AUTOTP_STAGE3,
    ),
    Fault(
        "a universal checkpoint of stage 3 has the model file of one part",
        "deepspeed/checkpoint/ds_to_universal.py",
        (("in state.weights_of_ranks():", "in list(state.weights_of_ranks())[:1]:"),),
        AUTOTP_STAGE3,
    ),
    Fault(
        "stage 3 lets a block's gradients wait for norms that are summed over ranks",
        "deepspeed/runtime/zero/unit_buckets.py",
        (("travels_in(param), has_parts(param)", "travels_in(param), False"),),
        "tests/unit/v1/tensor/test_sequence_parts.py",
        "do_not_wait",
    ),
)
