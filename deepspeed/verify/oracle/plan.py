"""The engine runs of a check, as plain data that travels to the ranks as JSON, and how the user's
configuration is changed for each.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.runtime.config import DeepSpeedConfig, read_tree
from deepspeed.runtime.config_utils import parse_dtype
from deepspeed.runtime.engine_parts.model_setup import buffer_dtype, model_dtype
from deepspeed.verify.oracle import UsageError
from deepspeed.verify.oracle.batches import Shape
from deepspeed.verify.oracle.parts import Parts
from deepspeed.verify.sizes import piece_numel

LEFT_OUT = frozenset(
    "verify wandb tensorboard csv_monitor comet watch curriculum_learning flops_profiler "
    "memory_breakdown steps_per_print wall_clock_breakdown dump_state".split()
)
SPLIT_STEPS = 2  # behind weights that start as zero, the first step has no gradient
GUARD_STEPS = 2
FROZEN_STEPS = 4  # two of them with parameters that are frozen
WRITTEN_STEPS = 2
EXACT_STEPS = 3
SIM_STEPS = 2
SIM_BUCKETS = 4
# Keys of `zero_optimization`: how many ranks share copies of shards, or the shards themselves.
GROUPS_OF_RANKS = ("zero_hpz_partition_size", "mics_shard_size")
# Timers and other periodic work of the defaults begin after a few batches.
AS_CONFIGURED = "as configured"
AS_CONFIGURED_STEPS = 4
ONE_CUT = "a global batch of one sample per rank has one cut only"
SCALE_POWER = 8
# Of torch.compile: traces forward and backward as every backend gets them, and compiles nothing.
TRACED_BACKEND = "aot_eager"
NO_BACKEND = "none"


class RunKind(str, Enum):
    """What a run is compared for."""

    SGD = "sgd"  # every step: gradient, norm, parameters, divisor
    USER = "user"  # the same with the configuration's optimizer
    SPLIT = "split"  # gradients with the global batch cut differently
    COMPILED = "compiled"  # gradients of the compiled model
    BATCHED = "batched"  # every step by one call of `engine.train_batch`: gradient, parameters
    LEDGER = "ledger"  # nothing: the gradient ledger watches
    COLLECTIVES = "collectives"  # nothing: the collective intent check watches
    FROZEN = "frozen"  # nothing: parameters that are frozen later stand still
    WRITTEN = "written"  # nothing: what is written into the model stays
    RESUMED = "resumed"  # the same as USER, whose second half it makes from a checkpoint
    SIM = "sim"  # the same as SGD or USER, on the simulated device under the stream checker
    EXACT = "exact"  # digests and losses, with those of ALONE
    ALONE = "alone"  # one process with the same canonical sum

    @property
    def is_judged(self) -> bool:
        """Whether ranks compare steps with the reference, one by one."""
        return not self.is_watched and self is not RunKind.SIM

    @property
    def is_watched(self) -> bool:
        """Whether a check of the package's own looks on, and ranks compare nothing."""
        looks_on = (RunKind.LEDGER, RunKind.COLLECTIVES, RunKind.FROZEN, RunKind.WRITTEN)
        return self in looks_on or self.is_digested

    @property
    def is_digested(self) -> bool:
        """Whether the run is known by its digests."""
        return self in (RunKind.EXACT, RunKind.ALONE)


@dataclass(frozen=True)
class Settings:
    """What the command is asked for; see `cli.parser`."""

    config: str | dict[str, Any]
    model: str
    data: str | None = None
    world_size: int | None = None  # processes; None: two ranks for each part of the model
    steps: int = 4
    schedules: int = 8
    compile: str = TRACED_BACKEND
    checkpoint: str | None = None  # folder, to go on from on other ranks
    exact: bool = False  # nothing but the comparison by equality
    seed: int = 0
    timeout: float = 300.0


@dataclass(frozen=True)
class Run:
    """One engine's life."""

    name: str  # shown in progress and report
    kind: RunKind
    config: dict[str, Any]
    shape: Shape  # how the global batch is cut
    steps: int  # optimizer steps
    schedule: int = 0  # which simulated schedule, for SIM
    backend: str = ""  # torch.compile backend, for COMPILED
    # Most elements of a piece, for SIM; see `deepspeed.verify.sizes`. 0: sizes and streams are the
    # configuration's and autograd's own.
    piece_numel: int = 0
    # Where it saves after half of its steps or, for RESUMED, goes on from. Empty: nowhere.
    checkpoint: str = ""
    beside: str = ""  # name of a run before, without which this one is needless; empty: none

    @property
    def half(self) -> int:
        """Steps before the checkpoint."""
        return self.steps // 2

    @property
    def has_user_optimizer(self) -> bool:
        """Whether the configuration's optimizer steps; otherwise SGD."""
        return self.config.get("optimizer") is not None


@dataclass(frozen=True)
class Plan:
    """Everything that a rank needs to know."""

    model: str
    data: str | None
    seed: int
    steps: int
    shape: Shape  # the configuration's cut of the global batch
    ranks: int  # processes: data-parallel ranks times those that share layers
    runs: list[Run] = field(default_factory=list)
    # Why the batch is not cut in other ways, its micro-batches not joined, the model not compiled.
    no_split: str = ""
    no_whole: str = ""
    no_compile: str = ""
    only_exact: bool = False

    def ranks_of(self, run: Run) -> int:
        """Count the processes of a run."""
        if run.kind is RunKind.ALONE:
            return 1
        return self.ranks * run.shape.world // self.shape.world


@dataclass(frozen=True)
class Precision:
    """How the configuration rounds."""

    model: torch.dtype  # dtype of the weights
    sums: torch.dtype  # narrowest dtype that a sum over micro-batches or ranks passes through
    autocast: torch.dtype | None  # dtype of torch.autocast, or None
    buffers: torch.dtype | None = None  # dtype that buffers are cast to; None: they keep their own

    @property
    def is_single(self) -> bool:
        """Whether forward and backward are in fp32 throughout."""
        return self.model == torch.float32 and self.autocast is None


def read_config(config: dict[str, Any], world: int) -> DeepSpeedConfig:
    """Read the configuration for that many ranks."""
    ranks = SimpleNamespace(
        get_data_parallel_world_size=lambda: world,
        get_sequence_parallel_world_size=lambda: config.get("sequence_parallel_size") or 1,
    )
    return DeepSpeedConfig(copy.deepcopy(config), ranks)


def precision_of(config: DeepSpeedConfig, module: nn.Module) -> Precision:
    """Tell how training `module` under `config` rounds."""
    model = model_dtype(config)
    if not (config.tree.bf16.enabled or config.tree.fp16.enabled):
        # Nothing casts it.
        own = {param.dtype for param in module.parameters() if param.requires_grad}
        halves = own & {torch.bfloat16, torch.float16}
        model = halves.pop() if len(own) == len(halves) == 1 else model
    accumulation = parse_dtype(config.tree.data_types.grad_accum_dtype) or model
    stage = int(config.tree.zero_optimization.stage)
    # Stages 0 and 1 send the accumulator, stage 2 sends every micro-batch in the model's dtype.
    sums = [accumulation if stage < 2 else model]
    if config.communication_data_type is not None:
        sums.append(config.communication_data_type)
    autocast = config.torch_autocast_dtype if config.torch_autocast_enabled else None
    if autocast is not None and config.communication_data_type is None:
        sums.append(autocast)
    coarsest = max(sums, key=lambda dtype: torch.finfo(dtype).eps)
    return Precision(model, coarsest, autocast, buffer_dtype(config))


def with_shape(config: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """Return the configuration with this cut of the global batch."""
    return {
        **copy.deepcopy(config),
        "train_batch_size": shape.micro_batches * shape.rows,
        "train_micro_batch_size_per_gpu": shape.rows,
        "gradient_accumulation_steps": shape.accumulation,
    }


def with_sgd(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration without optimizer and schedule; the run brings SGD along."""
    dropped = ("optimizer", "scheduler")
    changed = with_low_scale({key: config[key] for key in config if key not in dropped})
    zero = changed.get("zero_optimization")
    offload = zero.get("offload_optimizer") if isinstance(zero, dict) else None
    if isinstance(offload, dict):
        # SGD is none of the host optimizers, which alone update ahead of the step, and state in
        # files: the run with the configuration's own optimizer does.
        offload.pop("speculative_update", None)
        if offload.get("device") == "nvme":
            offload["device"] = "cpu"
    # What SGD does on the host is what the host optimizers that offloading insists on do.
    return {**changed, "zero_force_ds_cpu_optimizer": False}


def with_low_scale(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with a loss scale of fp16 at which a short run steps."""
    changed = copy.deepcopy(config)
    fp16 = changed.get("fp16") or {}
    if fp16.get("enabled") and not fp16.get("loss_scale"):
        # A dynamic scale begins where gradients overflow, and a short run would skip all its steps.
        # Searching for the scale is left to the run with the configuration's own optimizer.
        power = min(int(fp16.get("initial_scale_power", SCALE_POWER)), SCALE_POWER)
        changed["fp16"] = {**fp16, "initial_scale_power": power}
    return changed


def quiet(config: dict[str, Any]) -> dict[str, Any]:
    """Leave out what writes somewhere, and checks that have a run of their own here."""
    kept = {key: value for key, value in copy.deepcopy(config).items() if key not in LEFT_OUT}
    if isinstance(bits := kept.get("reproducibility"), dict):
        bits.pop("digest_every", None)
    return kept


def in_several_buckets(config: dict[str, Any], numel: int, gathers: bool) -> dict[str, Any]:
    """Cut buckets, for `gathers` those too, so that a small model fills several."""
    enough = max(1, numel // SIM_BUCKETS)
    keys = ("reduce_bucket_size", *(("allgather_bucket_size",) if gathers else ()))
    return _at_most(config, dict.fromkeys(keys, enough))


def in_shards(config: dict[str, Any], sizes: Sequence[int]) -> dict[str, Any]:
    """At stage 3, cut what a small model would keep whole: its largest parameters are gathered for
    each use, the others persist; some units are gathered ahead and some used again.
    """
    zero = config.get("zero_optimization") or {}
    if int(zero.get("stage", 0)) < 3:
        return config
    numel, middle, largest = sum(sizes), sorted(sizes)[len(sizes) // 2], max(sizes)
    share = max(1, numel // SIM_BUCKETS)
    limits = {
        "stage3_param_persistence_threshold": middle + 1 if middle < largest else 0,
        "stage3_prefetch_bucket_size": share,
        "stage3_max_reuse_distance": share,
        "stage3_max_live_parameters": max(1, numel // 2),
    }
    if zero.get("offload_optimizer"):
        limits["sub_group_size"] = share
    return _at_most(config, limits)


def in_small_groups(config: dict[str, Any]) -> dict[str, Any]:
    """Let no more than two ranks be a group of which there are several: a few processes make all of
    them.
    """
    zero = config.get("zero_optimization")
    given = zero if isinstance(zero, dict) else {}
    sizes = [key for key in GROUPS_OF_RANKS if isinstance(given.get(key), int)]
    return _at_most(config, dict.fromkeys(sizes, 2)) if sizes else config


def _at_most(config: dict[str, Any], limits: Mapping[str, int]) -> dict[str, Any]:
    """Return the configuration with sizes of `zero_optimization` that are not above `limits`."""
    changed = copy.deepcopy(config)
    zero = dict(changed.get("zero_optimization") or {})
    for key, limit in limits.items():
        size = zero.pop(key.removeprefix("stage3_"), zero.get(key))
        zero[key] = min(int(size), limit) if isinstance(size, (int, float)) else limit
    return {**changed, "zero_optimization": zero}


def shape_of(
    config: dict[str, Any], ranks: int | None, parts: Parts | None = None
) -> tuple[int, Shape]:
    """Tell how many processes there are, for None as few as average gradients of every parameter,
    and how they cut the global batch; UsageError if the model cannot be shared so.
    """
    tree, _ = read_tree(copy.deepcopy(config))
    parts = parts or Parts()
    sizes = {
        "tensor_parallel.autotp_size": max(1, tree.tensor_parallel.autotp_size),
        "sequence_parallel_size": tree.sequence_parallel_size or 1,
        "num_stages of the PipelineModule": parts.stages,
        "expert_parallel.autoep_size": max(
            1, tree.expert_parallel.enabled * tree.expert_parallel.autoep_size
        ),
        "ep_size of MoE, times stages,": parts.experts * parts.stages,
    }
    tensor, sequence, stages, spread, _ = sizes.values()
    if ranks is None:
        zero = tree.zero_optimization
        near = max(zero.num_optimizer_instances, *(getattr(zero, key) for key in GROUPS_OF_RANKS))
        ranks = 2 * max(max(tensor, spread, parts.experts) * sequence, near * tensor) * stages
    world = ranks // (tensor * sequence * stages)
    for key, size in sizes.items():
        if ranks % size or not world:
            raise UsageError(f"--world-size {ranks}: {key} is {size}; give a multiple of it")
    read = read_config(config, world)
    shape = Shape(world, read.gradient_accumulation_steps, read.train_micro_batch_size_per_gpu)
    return ranks, shape


def resumed(run: Run, ranks: int, sizes: Sequence[int], parts: Parts) -> Run:
    """The second half of a run: at another stage, on half or twice the ranks if they can."""
    zero, shape = dict(run.config.get("zero_optimization") or {}), run.shape
    stage, on_host = int(zero.get("stage", 0)), bool(zero.get("offload_optimizer"))
    zero["stage"] = stage % 3 + 1 if parts.stages == 1 else int(stage == 0 or on_host)
    zero.pop("offload_param", None)
    config = in_shards({**run.config, "zero_optimization": zero}, sizes)
    worlds = (shape.world * 2, shape.world // 2)
    for world in (one for one in worlds if one and shape.micro_batches % one == 0):
        other = Shape(world, run.shape.micro_batches // world, run.shape.rows)
        with suppress(UsageError):
            shape_of(with_shape(config, other), ranks * world // run.shape.world, parts)
            shape = other
    name = f"{run.name}, second half: stage {zero['stage']}, {shape.world} data-parallel"
    config = with_shape(config, shape)
    return replace(run, name=name, kind=RunKind.RESUMED, config=config, shape=shape)


def exact_runs(config: dict[str, Any], shape: Shape, steps: int) -> list[Run]:
    """A run with the canonical sum, and the plainest one of the same micro-batches, on one rank."""
    bits = {**(config.get("reproducibility") or {}), "world_size_invariant": True}
    config = {**config, "reproducibility": bits}
    whole = Shape(1, shape.micro_batches, shape.rows)
    given = ("elasticity", "pipeline")  # of ranks and stages
    plain = {key: value for key, value in config.items() if key not in given}
    plain = with_shape({**plain, "zero_optimization": {"stage": 0}}, whole)
    run = Run("exact", RunKind.EXACT, config, shape, steps)
    alone = Run("exact, one process", RunKind.ALONE, plain, whole, steps, beside=run.name)
    return [run, alone]


def make_plan(
    settings: Settings,
    config: dict[str, Any],
    ranks: int,
    shape: Shape,
    sizes: Sequence[int],
    no_split: str = "",
    no_whole: str = "",
    parts: Parts | None = None,
) -> Plan:
    """List the runs for these settings and trained parameters of these sizes."""
    given = with_shape(quiet(config), shape)
    base, numel = in_shards(given, sizes), sum(sizes)
    sgd, steps, backend = with_sgd(base), settings.steps, settings.compile
    runs = [Run("SGD", RunKind.SGD, sgd, shape, steps)]
    configs = [sgd]
    if (optimizer := config.get("optimizer")) is not None:
        runs.append(Run(f"optimizer {optimizer.get('type')}", RunKind.USER, base, shape, steps))
        configs.append(with_low_scale(base))
        if settings.checkpoint is not None:
            runs[-1] = replace(runs[-1], checkpoint=settings.checkpoint)
            runs.append(resumed(runs[-1], ranks, sizes, parts or Parts()))
    splits, few = [] if no_split else shape.splits(), min(steps, SPLIT_STEPS)
    for split in splits:
        name = f"{split.accumulation} x {split.rows} per rank"
        runs.append(Run(name, RunKind.SPLIT, with_shape(sgd, split), split, few))
    no_compile = why_not_compiled(backend)
    if not no_compile:
        name = f"compiled ({backend})"
        runs.append(Run(name, RunKind.COMPILED, sgd, shape, few, backend=backend))
    stage = int((base.get("zero_optimization") or {}).get("stage", 0))
    if stage == 3 and shape.accumulation > 1 and (parts or Parts()).stages == 1:
        # Elsewhere `train_batch` is the loop.
        runs.append(Run("train_batch", RunKind.BATCHED, sgd, shape, few))
    for kind in (RunKind.LEDGER, RunKind.COLLECTIVES):
        watched = {**base, "verify": {kind.value: True}}
        runs.append(Run(kind.value, kind, watched, shape, min(steps, GUARD_STEPS)))
    for kind, count in ((RunKind.FROZEN, FROZEN_STEPS), (RunKind.WRITTEN, WRITTEN_STEPS)):
        runs.append(Run(kind.value, kind, with_low_scale(base), shape, count))
    few, piece = min(steps, SIM_STEPS), piece_numel(numel, shape.world)
    for number in range(settings.schedules):  # configurations and gathers take turns
        cut = in_several_buckets(configs[number % len(configs)], numel, number // 2 % 2 == 0)
        run = Run(f"schedule {number}", RunKind.SIM, cut, shape, few, number, piece_numel=piece)
        runs.append(run)
    if settings.schedules:
        some = min(steps, AS_CONFIGURED_STEPS)
        own = with_sgd(given) if len(configs) == 1 else with_low_scale(given)
        runs.append(Run(AS_CONFIGURED, RunKind.SIM, own, shape, some))
    # Last: where the canonical sum is refused, the ranks end.
    runs += exact_runs(configs[-1], shape, min(steps, EXACT_STEPS))
    if settings.exact:
        runs = exact_runs(configs[-1], shape, steps)
    return Plan(
        settings.model,
        settings.data,
        settings.seed,
        steps,
        shape,
        ranks,
        runs,
        no_split or ("" if splits else ONE_CUT),
        no_whole,
        no_compile,
        settings.exact,
    )


def why_not_compiled(backend: str) -> str:
    """Why the model cannot be compiled here by this backend, or is not to be; empty if it is."""
    if backend == NO_BACKEND:
        return f"not asked for (--compile {NO_BACKEND})"
    if backend == "inductor" and CPUAdamBuilder().compiler() is None:
        return (
            "inductor needs a C++ compiler, and none was found; install g++ or clang++, set CXX, "
            f"or take --compile {TRACED_BACKEND}"
        )
    return ""
