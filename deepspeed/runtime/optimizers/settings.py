"""What the parts of an optimizer are made from: `StepSettings` and `ShardSettings`, which
`optimizer_factory` reads off the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.comm.parallel_map import OptimizerInstances
from deepspeed.runtime.fp16.loss_scaler import LossScaler, LossScalerBase
from deepspeed.runtime.gradients.accumulation import AccumulationTracker
from deepspeed.runtime.gradients.reduce_rule import ReduceRule
from deepspeed.runtime.gradients.reduction import GradientContext, nobody
from deepspeed.runtime.optimizers.step_outcome import Outcomes

if TYPE_CHECKING:
    from deepspeed.ops.state_files import StateFiles
    from deepspeed.runtime.config_models.zero import DeepSpeedZeroOffloadOptimizerConfig
    from deepspeed.runtime.sharding.low_precision import LowPrecision


@dataclass(frozen=True)
class StepSettings:
    """What a step needs, whatever is sharded."""

    clip_grad: float = 0.0  # maximum global gradient norm; 0 disables clipping
    # who knows what is the boundary; None: every micro-batch is
    tracker: AccumulationTracker | None = None
    # who knows by what gradients are scaled; None: the mean over the world
    reduce_rule: ReduceRule | None = None
    loss_scaler: LossScalerBase | None = None  # state machine of the loss scale; None: no scaling
    check_grad_overflow: bool = True  # skip steps whose gradient is not finite
    # ranks that hold the same dense parameters and average their gradients; None is the world
    dp_process_group: dist.Group = None
    # by `param.group_name`, the ranks that hold the same experts
    expert_data_parallel_group: Mapping[str, dist.Group] | None = None
    # ranks over which squared sums are added for the norm; None: this rank counts everything itself
    norm_group: dist.Group = None
    # whether this rank counts a parameter in the norm (False for a replica that another rank
    # counts); None: all
    counts_in_norm: Callable[[nn.Parameter], bool] | None = None
    exact_norm: bool = False  # sum squares so that no order of elements shows (`ops.squares`)
    # length of the norm's tensor, the same on all ranks; None: the number of parameter groups here
    num_norm_groups: int | None = None
    # device of the model, for a rank that has no trainable parameter to ask
    device: torch.device | None = None
    # other ranks hold other parts of the model, so this one may have no trainable parameter
    allow_empty: bool = False
    # leave parameters as they are that no rank has had a gradient for; otherwise zeros step them
    skips_unused: bool = False
    # called by the first hook of a backward that nobody announced
    backward_started: Callable[[], None] = nobody

    def context(
        self, init_optimizer: torch.optim.Optimizer, param_names: Mapping[nn.Parameter, str]
    ) -> GradientContext:
        """Make what the parts of the optimizer share, which still has the model's parameters;
        without a trainable one it must be `allow_empty`.
        """
        params = [p for group in init_optimizer.param_groups for p in group["params"]]
        trainable = next((param for param in params if param.requires_grad), None)
        if trainable is None and not self.allow_empty:
            raise ValueError(
                "the optimizer has no trainable parameter: check requires_grad and model_parameters"
            )
        group = self.dp_process_group
        return GradientContext(
            self.tracker or AccumulationTracker(steps=1),
            self.reduce_rule or ReduceRule(world=dist.get_world_size()),
            trainable.device if trainable is not None else self.device or torch.device("cpu"),
            group if group is not None else dist.get_world_group(),
            dict(self.expert_data_parallel_group or {}),
            dict(param_names),
            [param for param in params if not param.requires_grad],
            self.backward_started,
            skips_unused=self.skips_unused,
        )

    def outcomes(self) -> Outcomes:
        scaler = self.loss_scaler or LossScaler(scale=1.0)
        return Outcomes(scaler, self.check_grad_overflow, self.clip_grad)


@dataclass(frozen=True)
class ShardSettings:
    """How masters are kept, and how parameters that were updated come to everybody."""

    # how the data-parallel ranks are split into replicas of the sharded state; None: one instance
    # of all of them
    instances: OptimizerInstances | None = None
    master_dtype: torch.dtype = torch.float32
    low_precision: LowPrecision | None = None  # of state, if masters are not in fp32
    grad_dtype: torch.dtype = torch.float32  # dtype in which owned gradients are accumulated
    # offload settings of the optimizer state, if on
    offload: DeepSpeedZeroOffloadOptimizerConfig | None = None
    files: StateFiles | None = None  # where masters and state are that are not in memory
    round_robin: bool = False  # deal parameters to shards in turn
    # most elements that one gather by pieces fills on a rank
    allgather_bucket_size: int = 500_000_000
    allgather_partitions: bool = True  # gather; otherwise one broadcast per owner
    # Gather updated parameters while the next forward of this model runs, whose modules then wait
    # for their own; None: before anything else. Where the device has no streams, there is nothing
    # to run beside.
    gather_beside: nn.Module | None = None
    # save moments without padding, so that another world size can cut them anew
    elastic_checkpoint: bool = False
