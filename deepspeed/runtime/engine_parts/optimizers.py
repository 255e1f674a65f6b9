"""How the optimizer of an engine is made: what wraps it, what shards the model for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.runtime.engine_parts.sequence import EngineSequence
from deepspeed.runtime.engine_parts.settings import EngineSettings
from deepspeed.runtime.model_setup import (
    buffer_dtype,
    comm_dtype_lookup,
    model_dtype,
)
from deepspeed.runtime.optimizer_factory import (
    WrapContext,
    check_needs_no_optimizer,
    make_basic_optimizer,
    parameters_to_train,
    separate_experts,
    wrap_optimizer,
)
from deepspeed.runtime.optimizers.untrainable import why_untrainable
from deepspeed.runtime.sharding.model_ranks import ModelRanks

if TYPE_CHECKING:
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload


class EngineOptimizers(EngineSettings, EngineSequence):
    """Mixin of `DeepSpeedEngine`: the way from the client's optimizer, or the configuration's, to
    the step sequence.

    Attributes:
        module: The model.
        model_ranks: Which ranks share its parameters.
        device: Where it trains.
        optimizer: What `initialize` returns.
    """

    module: nn.Module
    model_ranks: ModelRanks
    device: torch.device
    optimizer: Any
    _on_parameter_gradient: Callable[[], None]

    def _shard(self, model: nn.Module, dont_change_device: bool) -> DeepSpeedZeRoOffload:
        # startup: only stage 3 needs it
        from deepspeed.runtime.zero.model_sharding import shard_model

        return shard_model(
            model,
            self._config.tree.zero_optimization,
            self.model_ranks,
            model_dtype(self._config),
            buffer_dtype(self._config),
            None if dont_change_device else self.device,
        )

    def _configure_optimizer(self, client: Any, model_parameters: Iterable[Any] | None) -> None:
        if client is None and self._config.tree.optimizer is None:
            self.model_ranks.agree_on_num_groups(None, self.device)
            check_needs_no_optimizer(self._config)
            self.optimizer = self.parameter_offload
            return
        parameters = parameters_to_train(self.module, model_parameters, self.model_ranks)
        basic = make_basic_optimizer(self._config, client, parameters, self.module)
        if self.model_ranks.experts:
            separate_experts(basic, self._config)
        self.basic_optimizer = basic
        self._sequence = wrap_optimizer(basic, self._wrap_context(basic))
        self.optimizer = self._sequence.public_optimizer

    def _wrap_context(self, basic: torch.optim.Optimizer) -> WrapContext:
        return WrapContext(
            config=self._config,
            param_names={param: name for name, param in self.module.named_parameters()},
            tracker=self.tracker,
            ranks=self.model_ranks,
            num_norm_groups=self.model_ranks.agree_on_num_groups(
                basic, self.device, why_untrainable(basic, self.module)
            ),
            model_dtype=self.model_dtype,
            device=self.device,
            model=self.module,
            backward_started=self._on_parameter_gradient,
            comm_dtype_of=comm_dtype_lookup(self.module, self._config),
            parameter_offload=self.parameter_offload,
        )
