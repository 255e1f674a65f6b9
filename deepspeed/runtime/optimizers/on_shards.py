"""Which optimizers may step shards, which get whole parameters, and which ZeRO cannot take."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from deepspeed.moe.expert_rows import rows_of
from deepspeed.ops.muon.muon import MuonWithAuxAdam
from deepspeed.ops.whole_parameters import WholeParameterOptimizer
from deepspeed.runtime.config_models.training import TrainingConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.optimizers.muon_groups import MARK, check_has_wholes
from deepspeed.runtime.optimizers.owner_steps import OwnerSteps
from deepspeed.runtime.optimizers.update_probe import Update, update_of
from deepspeed.runtime.sharding.model_ranks import ModelRanks
from deepspeed.utils.logging import warn_once

# Optimizers whose update of an element depends on that element alone: right on any shard of a flat
# buffer.
ELEMENTWISE = (
    "Adam",
    "AdamW",
    "FusedAdam",
    "DeepSpeedCPUAdam",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adadelta",
    "SGD",
    "ASGD",
    "RMSprop",
    "Rprop",
    "Adagrad",
    "DeepSpeedCPUAdagrad",
    "Lion",
    "FusedLion",
    "DeepSpeedCPULion",
)
# Whose classes of these names are what the names say; those of others are tried.
KNOWN_PACKAGES = ("torch.", "deepspeed.")
# torch's and transformers', which update each parameter from the whole of it and do not ask for it
# (`deepspeed.ops.whole_parameters`): owners step them (`runtime.optimizers.owner_steps`).
BY_OWNERS = ("Adafactor", "Muon")


def check_spread_experts(basic: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> None:
    """Refuse experts of which a rank has some rows, updated from one whole parameter."""
    if is_elementwise(basic):
        return
    # Muon takes a stack of matrices one by one.
    by_matrix = isinstance(basic, MuonWithAuxAdam)
    found = [
        param
        for group in basic.param_groups
        for param in group["params"]
        if rows_of(param) is not None
        and not (by_matrix and (param.dim() > 2 or not group.get(MARK, True)))
    ]
    is_known = isinstance(basic, WholeParameterOptimizer) or type(basic).__name__ in BY_OWNERS
    if found and (is_known or _needs_wholes(basic, type(basic).__name__)):
        raise DeepSpeedConfigError(
            f"{type(basic).__name__} updates {names.get(found[0], 'a parameter')} as a whole, and "
            "expert_parallel gives each rank the rows of some experts: use AdamW"
            + (", or param.use_muon = False" if by_matrix else "")
        )


def on_shards(
    basic: torch.optim.Optimizer,
    config: TrainingConfig,
    names: Mapping[nn.Parameter, str],
    ranks: ModelRanks,
) -> torch.optim.Optimizer:
    """Return `basic`, or what hands it whole parameters; refuse what is wrong on shards."""
    name = type(basic).__name__
    if isinstance(basic, WholeParameterOptimizer) or is_elementwise(basic):
        return basic
    if name not in BY_OWNERS:
        if not config.zero_allow_untested_optimizer:
            raise DeepSpeedConfigError(
                f"{name} is not known to work on shards. Set "
                '"zero_allow_untested_optimizer": true to have it tried on small tensors when '
                "training starts, or use zero_optimization.stage 0"
            )
        if not _needs_wholes(basic, name):
            return basic
    if config.zero_optimization.elastic_checkpoint:
        raise DeepSpeedConfigError(
            f"zero_optimization.elastic_checkpoint: true with {name}, whose state is that of whole "
            "parameters: remove the key; other checkpoints are loaded by any number of ranks too"
        )
    check_has_wholes(basic, names, ranks)
    return OwnerSteps(basic)


def is_elementwise(basic: torch.optim.Optimizer) -> bool:
    """Return whether it is known to update elements one by one, and behaves so."""
    if type(basic).__name__ not in ELEMENTWISE:
        return False
    if type(basic).__module__.startswith(KNOWN_PACKAGES):
        return True
    if not isinstance(basic, torch.optim.Optimizer):
        return True
    # Some need a device, or sizes, that the try has not.
    return update_of(basic) in (Update.ELEMENTWISE, Update.UNKNOWN)


def _needs_wholes(basic: torch.optim.Optimizer, name: str) -> bool:
    """Whether a client's optimizer that is not known has to be given whole parameters."""
    if not isinstance(basic, torch.optim.Optimizer):
        warn_once(
            f"{name} is no torch.optim.Optimizer and cannot be tried: it steps shards, which is "
            "right only if it updates every element from that element alone"
        )
        return False
    found = update_of(basic)
    if found is Update.COUPLED:
        raise DeepSpeedConfigError(
            f"{name} updates a parameter from others too (tried on small tensors), and ZeRO deals "
            "parameters to ranks: use zero_optimization.stage 0"
        )
    by = "shards" if found is Update.ELEMENTWISE else "whole parameters, each on one rank"
    warn_once(
        f"{name} is not known here. Tried on small tensors, it updates an element from "
        f"{found.value}, so it steps {by}"
    )
    return found is not Update.ELEMENTWISE
