"""Faults that the command `ds_verify` must find as a user runs it, with nothing but a configuration
and a model, and the place that its table must name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from deepspeed.verify.oracle.plan import RunKind, in_small_groups
from unit.common import python_path
from unit.verify.faults import Mutation, mutations_of
from unit.verify.oracle_runs import MODELS, failures, plan_of, report_of

_SMALL = (
    "num_hidden_layers=1&hidden_size=32&intermediate_size=48&num_attention_heads=4&"
    "num_key_value_heads=2&vocab_size=64&sequence=8"
)
_DENSE = f"hf:qwen2?{_SMALL}"  # with biases, and fewer key heads than query heads
_EXPERTS = f"hf:mixtral?{_SMALL}&num_local_experts=4"
_HOST = {"device": "cpu", "pin_memory": True}
_PART = {**_HOST, "ratio": 0.5}
_BF16 = {"bf16": {"enabled": True}}
_TENSOR = {"tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True}}
_SPREAD = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
_RATE = {"lr": 0.01}
_WARM = {"warmup_num_steps": 3, "warmup_min_lr": 0.005, "warmup_max_lr": 0.01}
_MUON = {
    "optimizer": {"type": "Muon", "params": {**_RATE, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": _WARM},
}


def _zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


# Model, and what its configuration has besides the rest of `config_of`.
SETUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "stage 3": ("right", _zero(3)),
    "stage 3, all-reduced": ("right", _zero(3, reduce_scatter=False)),
    "stage 3, bf16": ("right", {**_zero(3), **_BF16}),
    "host": ("right", {**_zero(3, offload_param=_HOST, offload_optimizer=_HOST), **_BF16}),
    "host, stage 2": ("right", {**_zero(2, offload_optimizer=_HOST), **_BF16}),
    "host and device": ("right", {**_zero(3, offload_optimizer=_PART), **_BF16}),
    "hpZ": ("alike", _zero(3, zero_hpz_partition_size=8)),
    "AutoTP": (_DENSE, {**_zero(1), **_TENSOR}),
    "AutoTP, norms of heads": (_DENSE.replace("qwen2", "qwen3"), {**_zero(1), **_TENSOR}),
    "AutoTP, stage 3": (_DENSE, {**_zero(3), **_TENSOR}),
    "AutoEP": (_EXPERTS, {**_zero(1), **_SPREAD}),
    "AutoEP, stage 3": (_EXPERTS, {**_zero(3), **_SPREAD}),
    "Ulysses": (
        _DENSE.replace("value_heads=2", "value_heads=1"),
        {**_zero(2), "sequence_parallel_size": 2},
    ),
    "Ulysses, stage 3": (_DENSE, {**_zero(3), "sequence_parallel_size": 2}),
    "Muon": ("right", {**_zero(3), **_MUON}),
    "Muon, stage 1": ("right", {**_zero(1), **_MUON}),
    "Adafactor": ("right", {**_zero(3), "optimizer": {"type": "Adafactor", "params": _RATE}}),
    "pipeline": ("pipeline", _zero(1)),
    "pipeline, stage 0": ("pipeline", _zero(0)),
    "pipeline, zero bubble": ("pipeline", {**_zero(0), "pipeline": {"schedule": "zero_bubble"}}),
}


def config_of(setup: str) -> dict[str, Any]:
    """The configuration of a setup."""
    batch = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    return {
        **batch,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": _RATE},
        **SETUPS[setup][1],
    }


def run_command(root: Path, setup: str, limit_s: float) -> tuple[int, str]:
    """Run `ds_verify` of the package below `root`; returns exit code and what it printed."""
    config, model = root / "ds_config.json", SETUPS[setup][0]
    config.write_text(json.dumps(config_of(setup)), encoding="utf-8")
    command = [sys.executable, "-m", "deepspeed.verify.oracle.cli", "--config", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(root)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile the package
    run = subprocess.run(
        [*command, "--model", model if model.startswith("hf:") else f"{MODELS}:{model}"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    return run.returncode, f"{run.stdout}\n{run.stderr if run.returncode > 1 else ''}"


def on_ranks(setup: str) -> list[str]:
    """The failing rows of some of the command's runs, on ranks that are there."""
    kinds = (RunKind.SGD, RunKind.USER, RunKind.LEDGER, RunKind.SIM)
    config = in_small_groups(config_of(setup))
    return failures(report_of(plan_of(config, SETUPS[setup][0], kinds, schedules=2)))


def failing_rows(said: str) -> list[str]:
    """The rows of a table that failed, each with what stands below it."""
    rows: list[str] = []
    is_failing = False
    for line in said.splitlines():
        if not line.startswith("    "):
            is_failing = line.endswith(" FAIL")
            if is_failing:
                rows.append(" ".join(line.split()))
        elif is_failing:
            rows[-1] += f" {line.strip()}"
    return rows


COMMAND_FAULTS: tuple[Mutation, ...] = tuple(
    mutations_of(r"""
stage 3
  what is frozen later is stepped => parameters frozen later .*moved by
    IdleParameters.of_step: (frozen | self._dropped) - self._given -> set()
  a unit's shard is where the group's first one is => 2\.weight is not its master
    _place_shard: start = table.cut_starts[first.param_index] -> start = 0
  pieces of a row that do not lie together are joined => lost: .* 2\.bias, 4\.weight, 4\.bias
    _with: last.shard_start + last.numel == added.shard_start -> True
  a second segment gets the first one's gradient => gradient of .*2\.bias.* wrong
    DeviceSink._add: start += segment.numel -> pass
  whole steps are not divided by their micro-batches => train_batch = loop
    WholeSteps._forward: engine._losses.scaled(engine._sequence, loss, True) ->
        engine._losses.scaled(engine._sequence, loss, False)
  every forward of a whole step is given the first batch => train_batch = loop
    WholeSteps.train_batch: [partial(loss_of, engine, batch) for batch in batches] ->
        [partial(loss_of, engine, batches[0]) for batch in batches]
  a whole step sends the gradients of its first micro-batch alone => train_batch = loop
    Units.reduce_gradients: self.leaves.in_turn() if self.leaves is not None else (0,) -> (0,)
  gradients of the last step stay at stage 3 => gradient of 0\.weight, .* at step 1
    DeviceSink.clear: self.written.clear() -> pass
  what persists is taken for gathered anew => unit persistent was gathered before update 1
    GatherUnit.refresh: self._memory = None -> pass
  columns that no gradient reaches keep what was there => gradient norm .*reported norm is off
    RowFiller.__init__: self._padding.append(columns[full + bool(rest):]) -> pass
  all parameters of a unit have the first one's shard => fp32 weight of 2\.bias, 4\.weight, 4\.bias
    GatherUnit.use_shard: shard[start:start + cut] -> shard[:cut]
  parts of a bucket go where the first parameter's lies => lost: .* 2\.bias, 4\.weight, 4\.bias
    _parts: theirs.cut_starts[index] -> theirs.cut_starts[0]
  a module's hold of a unit is taken away and never given => unit \S+ was gathered before update 1
    PartitionedParameterCoordinator.enter: unit.holds += 1 -> pass
stage 3, all-reduced
  a bucket's row is that of the next rank => gradient of .*0\.weight
    Units._own_part: group.shard_rank -> (group.shard_rank + 1) % group.num_shards
stage 3, bf16
  a master is not rounded into its shard => 0\.weight is not its master rounded
    Publisher.updated: not self._rounded and (not group.aliased) -> False
  a bucket is scaled by what is left of the division =>
      not divided by the accumulation steps .* 0\.weight
    Units._take_in: reduction.factors.post -> 1.0
host
  masters on the host are not rounded into shards there =>
      simulated device = host .*gradient of 0\.weight, .* at step 1
    ShardWriter._send: own.copy_(source) -> pass
  gradients do not arrive on the host =>
      simulated device = host .*gradient of 0\.weight, .* at step 0
    HostSink._land: super()._add(target, buffers) -> super()
  every step of the host optimizer is its first =>
      optimizer AdamW .*value after the step of 0\.weight, .* at step 1
    HostOptimizer._prepare: int(state.get('step', 0)) + 1 -> 1
  torch's update stops after the first chunk => simulated device = host .*value after the step of
    update_torch: slice(start, start + TORCH_CHUNK) -> slice(start, TORCH_CHUNK)
host, stage 2
  masters do not follow writes => writes into the model .*was put back
    ModelWrites.take_in: watched.group.follow(index) -> pass
  a piece that is cut for its copy begins where the first does =>
      simulated device = host .*gradient of 0\.weight, 2\.weight
    sink._cut: skipped = first - position -> skipped = 0
  a gradient leaves for the host before it is reduced =>
      <gradient offload stream> never waits for <nccl stream
    HostSink._add: self._copies.wait_for([owner]) -> pass
  the host optimizer's new values are not delivered =>
      equal on all ranks FAIL after step 0 ranks 0 and 1 hold another 0\.weight
    HostOptimizer._deliver: delivery.updated(start, end) -> pass
  the host's norm is that of what has arrived => the host never waits|gradient norm|gradient of
    HostSink.settle: while self._in_flight: ... -> pass
host and device
  the part on the device is not scaled => value after the step of 0\.weight wrong
    DevicePart._step: scaling.step(self.optimizer, grads) -> self.optimizer.step()
hpZ
  copies of shards outlive an update => unit 0 was gathered before update 1
    SecondaryShards.forget: self._is_wanted = self._is_right = False -> pass
  copies of shards outlive an update in silence => gradient of 0\.weight, .* at step 1
    SecondaryShards.forget: self._is_wanted = self._is_right = False -> pass
    GatherUnit._source: (near.group, near.own, near.shard, near.update) -> (near.group, near.own,
      near.shard, num_updates)
  a copy of shards is not filled => gradient of \S*0\.weight.* wrong: at step 0
    SecondaryShards.keep: self._memory.copy_(rows[self.own]) -> pass
  a copy of shards is that of the next rank => gradient of \S*0\.weight.* wrong: at step 0
    SecondaryShards.__init__: dist.get_rank(group=group) * numel -> (dist.get_rank(group=group) + 1)
      % dist.get_world_size(group=group) * numel
AutoTP
  the weight's gradient of an overlapped layer is that of the first rows =>
      gradient of \S*q_proj\.weight wrong
    _OverlappedLinear.backward: rows.t() @ value.reshape(-1, value.shape[-1]) -> rows[:8].t() @
      value.reshape(-1, value.shape[-1])[:8]
  the input's gradient of an overlapped layer is a part =>
      gradient of \S*input_layernorm\.weight wrong
    _OverlappedLinear.backward: dist.all_reduce(grad_value, group=ctx.ranks.group, async_op=True) ->
      None
  a bias of an overlapped layer has the mean gradient =>
      gradient of \S*q_proj\.bias wrong.* divided by 128
    _OverlappedLinear.backward: rows.sum(0) -> rows.mean(0)
  the gradient of a sum over ranks is summed too => gradient of \S*q_proj\.weight wrong
    _SumValue.backward: return (grads[0], None) -> return (grads[0] * 2, None)
AutoTP, norms of heads
  parts of a gradient are summed and thrown away => self_attn\.q_norm\.weight
    SequenceParts.complete: torch._foreach_copy_(piece, views) -> pass
AutoTP, stage 3
  what all ranks have is averaged by those that share it => ranks \[0, 1\] share the model's layers
    tensor_ranks: group_store.shared_group(lists.columns) -> group_store.shared_group(lists.rows)
AutoEP
  rows go to the experts of the next ones => gradient of \S*experts\.gate_up_proj wrong
    owner_exchange._plan: torch.arange(received.shape[1], device=order.device).repeat(num_ranks) ->
      torch.arange(received.shape[1], device=order.device).repeat_interleave(num_ranks)
  the router has no gradient => gradient of \S*mlp\.gate\.weight wrong.* divided by inf
    run_on_owners: weights.t().unsqueeze(2) -> weights.detach().t().unsqueeze(2)
  every rank has the first experts => fp32 weight of \S*experts\.gate_up_proj
    spread: param.data.narrow(0, rows.first, num_local) -> param.data.narrow(0, 0, num_local)
  experts are reduced as what all ranks have => fp32 weight of \S*experts\.gate_up_proj
    spread: param.allreduce = False -> pass
  a token's gradient is that of its first expert =>
      gradient of \S*post_attention_layernorm\.weight wrong
    _Dispatch.backward: grad += _rows(grads[0], slots) -> pass
AutoEP, stage 3
  tokens have no gradient from experts => gradient of \S*post_attention_layernorm\.weight wrong
    run_on_owners: run(rows, plan.experts) -> run(rows.detach(), plan.experts)
Ulysses
  gradients of exchanged heads are means => gradient of \S*v_proj\.weight wrong
    Exchange.backward: exchange(grads, back, ctx.group, ctx.stream) -> exchange([grad /
      dist.get_world_size(ctx.group) for grad in grads], back, ctx.group, ctx.stream)
  a value head for several ranks has no gradient => gradient of \S*v_proj\.weight wrong
    DistributedAttention._to_heads: value.index_select(self.scatter_idx, order) ->
      value.detach().index_select(self.scatter_idx, order)
  pieces are joined in another order of ranks => gradient of \S*v_proj\.weight wrong
    Pending.wait: torch.cat(own, dim=cut.gather) -> torch.cat(own[::-1], dim=cut.gather)
Ulysses, stage 3
  labels are those of the tokens themselves => gradient of \S*embed_tokens\.weight wrong
    UlyssesSPDataLoaderAdapter._cut: F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:] -> labels
  on a device pieces of heads leave in another order => simulated device = host .*gradient of .*proj
    _pack_by_run: tensor.narrow(cut.scatter, start, run * size) -> ....flip(cut.scatter)
Muon
  the update of a cut matrix is that before it came back =>
      optimizer Muon .*value after the step of .*\.weight
    DealtParameters.through_owners: use(part, results[fragment.in_shard]) -> pass
  momentum stays as it began => optimizer Muon .*value after the step of 0\.weight, 2\.weight
    MuonWithAuxAdam._step_muon: grad[at].lerp(momentum[at].lerp_(grad[at], 1 - beta), beta) ->
      grad[at].lerp(momentum[at], beta)
Muon, stage 1
  a matrix is not orthogonalized on its owner => optimizer Muon .*value after the step of .*\.weight
    DealtParameters.through_owners: matrix.copy_(function(matrix)) -> pass
  AuxAdam keeps the rate that it began with => optimizer Muon .*value after the step of .*\.bias
    MuonWithAuxAdam._step_adamw: inner.param_groups[0].update(...) -> pass
Adafactor
  owners take masters for gradients => optimizer Adafactor .*value after the step of
    OwnerSteps.step: of.to_owners(own.grad, own.device) -> of.to_owners(own.data, own.device)
  owners' new values come back to other places => optimizer Adafactor .*value after the step of
    OwnerSteps.step: of.from_owners(master, shard.device)[:shard.numel()] ->
      of.from_owners(master, shard.device)[:shard.numel()].roll(1)
pipeline
  a stage sends zeros for gradients => gradient of \S*tied_modules\.in\.weight|gradient of
    PipeBuffer.input_grads: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) ->
      torch.zeros_like(leaf)
  the first labels are kept => gradient of
    PipelineEngine._exec_load_micro_batch: buffer.labels = move_to_device(labels, self.device) if
      labels is not None else None -> self._kept = getattr(self, '_kept', labels); buffer.labels =
      self._kept
pipeline, stage 0
  a tied weight is doubled, not summed => tied_modules\.in\.weight
    _exec_reduce_tied_grads: dist.all_reduce(sequence.local_gradient(param), group=group) ->
      sequence.local_gradient(param).mul_(2)
pipeline, zero bubble
  weights of a split backward have no gradient => gradient of
    SplitBackward.backward_weights: for node, grads in self._arrived.items(): ... -> pass
""")
)

# What the suite runs of them, on ranks that are there: 2.
SAMPLE = (
    "pieces of a row that do not lie together are joined",
    "torch's update stops after the first chunk",
    "momentum stays as it began",
)
