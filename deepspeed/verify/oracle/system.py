"""One engine run on this rank: trains as a user would and keeps what is compared. Collective."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.auto_ep import named_spread_experts
from deepspeed.runtime.config_models.base import read_boolean
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.sequence_parallel.attention_hf import SequenceGroups, UlyssesSPAttentionHF
from deepspeed.runtime.sequence_parallel.loader_adapter import UlyssesSPDataLoaderAdapter
from deepspeed.runtime.sharding.group import expert_group_of
from deepspeed.runtime.sharding.model_ranks import is_model_parallel_parameter
from deepspeed.runtime.sharding.model_slices import slices_of
from deepspeed.runtime.step_observers.step_observer import StepObserver
from deepspeed.runtime.zero.parameters.zero_parameter import (
    ZeroParamStatus,
    is_zero_param,
    record_of,
)
from deepspeed.sequence.cross_entropy import IGNORE_INDEX
from deepspeed.utils.tensor_fragment import (
    own_shard,
    safe_get_full_fp32_params,
    safe_get_full_grad,
    safe_get_full_grads,
)
from deepspeed.verify.oracle.batches import GlobalBatches
from deepspeed.verify.oracle.changes import Changes
from deepspeed.verify.oracle.parts import Parts
from deepspeed.verify.oracle.plan import Run, RunKind
from deepspeed.verify.oracle.reference import Tensors, trainable
from deepspeed.verify.oracle.workload import Batch, Workload

# Small enough that a step does not throw the model about; each starts where the last one led.
SGD_LEARNING_RATE = 0.1


@dataclass
class StepRecord:
    """What one step of the system did."""

    step: int
    before: Tensors  # fp32 weights before it
    # The averaged gradient that the optimizer saw, before clipping; without those that have none.
    grads: Tensors
    norm: float | None  # reported norm; None if there is none
    after: Tensors  # fp32 weights after it
    loss: float  # mean loss over this rank's micro-batches
    loss_scale: float  # by what losses were multiplied
    applied: bool  # whether the step changed the weights
    # Hyper-parameters of the optimizer's groups at the step, without the parameters.
    groups: list[dict[str, Any]]


@dataclass
class RunRecord:
    """What one run did on this rank."""

    steps: list[StepRecord] = field(default_factory=list)  # every step that this rank keeps
    losses: list[float] = field(default_factory=list)  # of all steps
    # Of all steps, of each of this rank's micro-batches.
    micro_losses: list[list[float]] = field(default_factory=list)
    # Where they are asked for, by parameters: `engine.state_digest`, before the first step and
    # after each, and what gradients each step used.
    digests: list[dict[str, str]] = field(default_factory=list)
    gradients: list[dict[str, str]] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)  # of all steps
    # Digests of this rank's model parameters after each step, by name and who must have equal ones.
    checksums: list[dict[str, str]] = field(default_factory=list)
    # What was wrong without any reference: frozen parameters that changed, parameters that are not
    # their master's.
    faults: list[str] = field(default_factory=list)


class _GradientReader(StepObserver):
    """Reads what a step is about to use; on all ranks alike, as reading is collective."""

    def __init__(self, read: Callable[[], Tensors] | None) -> None:
        self._read = read
        self.found: Tensors = {}

    def step_starts(self) -> None:
        if self._read is not None:
            self.found = self._read()


class SystemRun:
    """An engine over a copy of the model."""

    def __init__(self, run: Run, workload: Workload, batches: GlobalBatches) -> None:
        self.run = run
        self.workload = workload
        self.batches = batches
        # The canonical sum has random numbers by micro-batch.
        seeds = (run.config.get("reproducibility") or {}).get("seed_forwards", True)
        self.model, names = workload.own_part(
            bool(run.config.get("use_data_before_expert_parallelism")),
            is_whole=run.kind is RunKind.ALONE,
            draws=run.kind.is_digested and seeds,
        )
        # By their names in the whole model.
        self.params = {names[name]: param for name, param in trainable(self.model).items()}
        sgd = None if run.has_user_optimizer else partial(torch.optim.SGD, lr=SGD_LEARNING_RATE)
        sharing, self.mpu = run.config.get("sequence_parallel_size") or 1, None
        if sharing > 1:
            register = UlyssesSPAttentionHF.register_with_transformers
            self.mpu = register(self.model, None, sharing, run.shape.rows)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=self.model, optimizer=sgd, config=run.config, mpu=self.mpu
        )
        reads = run.kind.is_digested or not run.kind.is_watched
        self._reader = _GradientReader(self.gradients if reads else None)
        self.engine.timers.observers = [*self.engine.timers.observers, self._reader]
        model = self.model
        tied = model.get_tied_weights_and_groups() if isinstance(model, PipelineModule) else []
        self.tied = {weight for weight, _ in tied}
        self.frozen = {
            n: _held(p).clone() for n, p in self.model.named_parameters() if not p.requires_grad
        }
        free = {name: param for name, param in self.params.items() if param not in self.tied}
        self._changes = Changes.of(run.kind, free)
        found = (experts for _, experts in named_spread_experts(self.model))
        self.spread = {param: one for one in found for param in one.spread_params.values()}
        if run.kind is RunKind.COMPILED:
            self.engine.compile(backend=run.backend)

    def values(self) -> Sequence[torch.Tensor]:
        """This rank's values of the parameters that it trains, in the dtype that masters have."""
        params = list(self.params.values())
        if not self._has_masters():
            return [param.detach() for param in params]
        kept_in = self.engine.optimizer.groups[0].master.dtype
        return [value.to(kept_in) for value in safe_get_full_fp32_params(params)]

    def _changed(self) -> Tensors:
        """Copies of this rank's values of the parameters that the run changes."""
        named = zip(self.params, self.values(), strict=True)
        return {name: value.clone() for name, value in named if name in self._changes.params}

    def _has_masters(self) -> bool:
        return any(hasattr(param, "_hp_mapping") for param in self.params.values())

    def _copied(self, values: Sequence[torch.Tensor | None] | None) -> Tensors:
        """Copies of all parameters, put together of what ranks hold."""
        named = zip(self.params, values or [None] * len(self.params), strict=True)
        found = {
            name: self._whole(name, value).clone() for name, value in named if value is not None
        }
        if self.workload.parts == Parts():
            return found
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            everywhere, {n: get_accelerator().to_host(v) for n, v in found.items()}
        )
        return {name: value for part in everywhere for name, value in part.items()}

    def _whole(self, name: str, own: torch.Tensor) -> torch.Tensor:
        param, slices = self.params[name], slices_of(self.model)
        if param in self.spread:
            return self.spread[param].with_all_rows(own)
        if slices is not None and is_model_parallel_parameter(param):
            return slices.put_together(name, own)
        return own

    def gradients(self) -> Tensors:
        """What the coming step will use."""
        params = list(self.params.values())
        if not self._has_masters():
            return self._copied([safe_get_full_grad(param) for param in params])
        return self._copied(safe_get_full_grads(params))

    def train(
        self,
        keep: Callable[[int], bool],
        progress: Callable[[int], None],
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> RunRecord:
        """Train all steps; `keep` says of which the record is kept."""
        record, first = RunRecord(), 0
        if self.run.kind is RunKind.RESUMED:
            self.engine.load_checkpoint(self.run.checkpoint)
            first = self.run.half
        wants_tensors = not self.run.kind.is_watched
        masters = self._copied(self.values()) if wants_tensors else {}
        if self.run.kind.is_digested:
            record.digests.append(self.engine.state_digest(per_parameter=True))
        for step in range(first, self.run.steps):
            before = masters
            of_groups = self.optimizer.param_groups
            groups = [{k: v for k, v in group.items() if k != "params"} for group in of_groups]
            loss_scale = float(getattr(self.optimizer, "loss_scale", 1.0))
            if self._changes.looks_before:
                self._changes.before_step(step, self._changed())
            losses = self._train_batch(step)
            if self._changes.looks_before:
                self._changes.after_step(step, self._changed())
            loss = sum(losses) / len(losses)
            values = self.values() if wants_tensors else []
            masters = self._copied(values)
            norm = self.engine.get_global_grad_norm()
            found = StepRecord(
                step,
                before,
                self._reader.found,
                None if norm is None else float(norm),
                masters,
                loss,
                loss_scale,
                self.engine.was_step_applied(),
                groups,
            )
            record.losses.append(loss)
            # A pipeline tells one mean, alike on all ranks.
            is_told = not isinstance(self.engine, PipelineEngine) or dist.get_rank() == 0
            record.micro_losses.append(losses if is_told else [])
            record.norms.append(found.norm)
            record.checksums.append(self._checksums())
            if self.run.kind.is_digested:
                record.digests.append(self.engine.state_digest(per_parameter=True))
                # A zero has no sign: putting pieces together is a sum with zeros.
                bits = {n: _bits_of(grad + 0.0) for n, grad in self._reader.found.items()}
                record.gradients.append(bits)
            if wants_tensors:
                record.faults += self._faults(step, values)
            if on_step is not None:
                on_step(found)
            if keep(step):
                record.steps.append(found)
            progress(step)
            if self.run.checkpoint and step + 1 == self.run.half:
                self.engine.save_checkpoint(self.run.checkpoint)
        return record

    def _train_batch(self, step: int) -> list[float]:
        """Take one step as a user would; returns the losses that this rank knows."""
        shape, dtype, engine = self.run.shape, self.engine.model_dtype, self.engine
        # A run with a number of steps of its own takes the batches of --steps again.
        pieces = self.batches.micro_batches(step % self.batches.num_steps, shape)
        place = engine.parallel_map.data.rank
        own = [pieces[shape.place(place, micro)] for micro in range(shape.accumulation)]
        if isinstance(engine, PipelineEngine):
            return [float(engine.train_batch(self.workload.fed(batch, dtype) for batch in own))]
        if self.run.kind is RunKind.BATCHED:
            loss_of = lambda model, batch: self.workload.loss_of(model, batch, dtype)  # noqa: E731
            return [float(engine.train_batch(iter(own), loss_of))]
        losses = []
        for batch in own:
            own_piece = batch if self.mpu is None else _piece_of(batch, self.mpu)
            loss = self.workload.loss_of(engine, own_piece, dtype)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses

    def _checksums(self) -> dict[str, str]:
        found = {}
        for name, param in self.params.items():
            if not _is_sharded(param):
                found[f"{name} of {self._who_has(name)}"] = _bits_of(param.detach())
        return found

    def _who_has(self, name: str) -> str:
        """Name the ranks that hold the same of a parameter as this one."""
        param, ranks = self.params[name], self.engine.parallel_map
        if param in self.tied:
            return name
        experts = expert_group_of(param)
        other = ranks.tensor if experts is None else ranks.experts(experts).expert
        is_part = experts is not None or is_model_parallel_parameter(param)
        return f"{ranks.pipe}, {other}" if is_part else str(ranks.pipe)

    def _faults(self, step: int, values: Sequence[torch.Tensor]) -> list[str]:
        faults = [
            f"step {step}: frozen {name} changed"
            for name, before in self.frozen.items()
            if not _is_equal(_held(self.model.get_parameter(name)), before)
        ]
        for (name, param), master in zip(self.params.items(), values, strict=True):
            if not _is_rounded(param, master.to(param.dtype)):
                faults.append(f"step {step}: {name} is not its master rounded to {param.dtype}")
        return faults


def _piece_of(batch: Batch, mpu: SequenceGroups) -> Batch:
    """This rank's piece of sequences; the mean of the ranks' losses is that of the whole batch."""
    tokens, ranks = batch["input_ids"], mpu.get_sequence_parallel_world_size()
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    where = (mpu.get_sequence_parallel_rank(), mpu.get_sequence_parallel_group(), ranks)
    # Every rank hands in the batch, and the first one's is taken.
    whole = [{"position_ids": positions, **batch}]
    piece = next(iter(UlyssesSPDataLoaderAdapter(whole, *where, tokens.device)))
    count = (batch["labels"][:, 1:] != IGNORE_INDEX).sum() / ranks
    return {**piece, "labels": piece["shift_labels"], "num_items_in_batch": count}


def _is_rounded(param: nn.Parameter, value: torch.Tensor) -> bool:
    """Whether what this rank has of a parameter is `value`."""
    if is_zero_param(param):
        part = record_of(param).own_part(value)
        if not _is_equal(own_shard(param)[: part.numel()], part):
            return False
        if _is_sharded(param):
            return True
    return _is_equal(param.detach(), value)


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare where both can be: one may be page-locked host memory."""
    to_host = get_accelerator().to_host
    return torch.equal(to_host(one), to_host(other))


def _is_sharded(param: nn.Parameter) -> bool:
    return is_zero_param(param) and record_of(param).status is not ZeroParamStatus.AVAILABLE


def _bits_of(value: torch.Tensor) -> str:
    content = value.reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content.tobytes()).hexdigest()[:16]


def _held(param: nn.Parameter) -> torch.Tensor:
    """What this rank has of a parameter between steps: all, or at stage 3 its shard."""
    return own_shard(param) if is_zero_param(param) else param.detach()


def plain_optimizer(
    config_block: dict[str, Any], params: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Build the configuration's optimizer over whole parameters. LookupError where it is none of
    torch's.
    """
    settings = dict(config_block.get("params") or {})
    name = str(config_block["type"]).lower()
    if name in ("adam", "adamw", "fusedadam"):
        if not read_boolean(settings.pop("bias_correction", True)):
            raise LookupError(f"{name} without bias correction")
        decoupled = bool(settings.pop("adam_w_mode", True)) or name == "adamw"
        # Settings of an implementation, which torch's has not.
        own = "torch_adam set_grad_none fp32_optimizer_states freeze_step".split()
        settings = {key: value for key, value in settings.items() if key not in own}
        if "betas" in settings:
            settings["betas"] = tuple(settings["betas"])
        return (torch.optim.AdamW if decoupled else torch.optim.Adam)(params, **settings)
    for candidate, cls in vars(torch.optim).items():
        if (
            candidate.lower() == name != "muon"  # torch's takes matrices alone
            and isinstance(cls, type)
            and issubclass(cls, torch.optim.Optimizer)
        ):
            return cls(params, **settings)
    raise LookupError(name)
