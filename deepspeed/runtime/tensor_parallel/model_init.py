"""`deepspeed.tp_model_init`: cut a model before there is an engine."""

from __future__ import annotations

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.initialization import ensure_distributed
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.engine_parts.model_setup import cast_module
from deepspeed.runtime.tensor_parallel.cutting import cut_by, mpu_of


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype | None,
    config: object = None,
    **kwargs: object,
) -> nn.Module:
    """Cut a model over `tp_size` neighbouring ranks, in place; collective. All ranks of one group
    take the weights of the first. An engine of it knows, with or without `tensor_parallel` in its
    configuration.

    Parameters stay the same objects, so optimizers may be made before or after; `dtype` is what
    they are cast to. `config`'s `tensor_parallel` block, or `kwargs` as its keys, say how; None:
    found from the model. DeepSpeedConfigError if it cannot be cut so, or keys conflict.
    """
    # startup: the models need pydantic, whose import alone is longer than deepspeed's may be.
    from deepspeed.runtime.config_models.reader import read_block
    from deepspeed.runtime.config_models.refusals import refuse_unsupported
    from deepspeed.runtime.config_models.source import load_config
    from deepspeed.runtime.config_models.training import TrainingConfig

    ensure_distributed(None)
    given = dict(load_config(config).get("tensor_parallel") or {}) if config is not None else {}
    twice = sorted(given.keys() & kwargs.keys())
    if twice:
        raise DeepSpeedConfigError(
            f"tp_model_init({twice[0]}={kwargs[twice[0]]!r}): the configuration's tensor_parallel "
            "block has it too; give it once"
        )
    if given.get("autotp_size", tp_size) not in (tp_size, 0, "auto"):
        raise DeepSpeedConfigError(
            f"tp_model_init(tp_size={tp_size}): tensor_parallel.autotp_size is "
            f"{given['autotp_size']!r}; make them equal"
        )
    told = {"tensor_parallel": {**given, **kwargs, "autotp_size": tp_size}}
    tree = read_block(TrainingConfig, told)
    refuse_unsupported(tree, told)
    block = tree.tensor_parallel
    device = torch.device(get_accelerator().current_device_name())
    mpu = mpu_of(model, block, None)
    if mpu is not None:
        cut_by(model, block, mpu, device, dtype)
    if dtype is not None:
        cast_module(model, dtype)
    return model
