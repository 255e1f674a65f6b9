"""How the optimizer of an engine is made: what wraps it, what shards the model for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine_parts.engine_state import EngineState
from deepspeed.runtime.engine_parts.model_setup import buffer_dtype, comm_dtype_lookup, model_dtype
from deepspeed.runtime.optimizer_factory import (
    WrapContext,
    check_needs_no_optimizer,
    make_basic_optimizer,
    parameters_to_train,
    separate_experts,
    wrap_optimizer,
)
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.runtime.optimizers.untrainable import why_untrainable
from deepspeed.runtime.sharding.model_ranks import ModelRanks

if TYPE_CHECKING:
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

Client = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


def shard(
    model: nn.Module, config: DeepSpeedConfig, ranks: ModelRanks, device: torch.device | None
) -> DeepSpeedZeRoOffload:
    """Shard a model for stage 3; `device` is where its shards go, None leaves them."""
    # startup: only stage 3 needs it
    from deepspeed.runtime.zero.model_sharding import shard_model

    block, dtypes = config.tree.zero_optimization, (model_dtype(config), buffer_dtype(config))
    return shard_model(model, block, config.tree.aio, ranks, *dtypes, device)


def make_optimizer(
    engine: EngineState,
    client: Client | None,
    model_parameters: Iterable[Any] | None,
    backward_started: Callable[[], None],
) -> tuple[torch.optim.Optimizer, StepSequence] | None:
    """Make the client's optimizer, or the configuration's, if any, and its step sequence."""
    config, module, ranks = engine._config, engine.module, engine.model_ranks
    if client is None and config.tree.optimizer is None:
        ranks.agree_on_num_groups(None, engine.device)
        check_needs_no_optimizer(config)
        return None
    parameters = parameters_to_train(module, model_parameters, ranks)
    basic = make_basic_optimizer(config, client, parameters, module)
    if ranks.experts:
        separate_experts(basic, config)
    problem = why_untrainable(basic, module)
    num_norm_groups = ranks.agree_on_num_groups(basic, engine.device, problem)
    context = WrapContext(
        config=config,
        param_names={param: name for name, param in module.named_parameters()},
        tracker=engine.tracker,
        ranks=ranks,
        num_norm_groups=num_norm_groups,
        model_dtype=engine.model_dtype,
        device=engine.device,
        model=module,
        backward_started=backward_started,
        comm_dtype_of=comm_dtype_lookup(module, config),
        parameter_offload=engine.parameter_offload,
    )
    return basic, wrap_optimizer(basic, context)
