"""Upstream's names of keys, derived from the models by one rule.

A key of a block has the constants ``BLOCK_KEY``, its name, and ``BLOCK_KEY_DEFAULT``:
``FP16_LOSS_SCALE == "loss_scale"`` and ``FP16_LOSS_SCALE_DEFAULT == 0``. The rule stands in
``keys``; the tables at the end are the blocks whose constants have a module of their own. Those of
``deepspeed.runtime.constants`` are in ``getters``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deepspeed.runtime.config_models import features, observe
from deepspeed.runtime.config_models.base import nested_model


class Key(NamedTuple):
    """A key, and what its constant is called."""

    constant: str
    path: tuple[str, ...]
    field: FieldInfo

    def default(self) -> Any:
        """The value that the key has when it is not given; None for a required one."""
        if self.field.is_required():
            return None
        return self.field.get_default(call_default_factory=True)


def keys(
    model: type[BaseModel],
    path: tuple[str, ...] = (),
    prefix: str = "",
    irregular: Mapping[str, str] | None = None,
) -> Iterator[Key]:
    """Yield the keys of a block, whose constants start with `prefix` but for the `irregular`."""
    for name, field in model.model_fields.items():
        key = field.alias or name
        # "fp16_master_weights_and_grads" of "fp16" does not say it twice.
        stem = key.removeprefix(f"{path[-1]}_") if path else key
        constant = (irregular or {}).get(key, prefix + stem.upper())
        yield Key(constant, (*path, key), field)


def constants(keys: Iterable[Key]) -> dict[str, Any]:
    """Return the constants of keys: each one's name and default, of a block its name alone."""
    table: dict[str, Any] = {}
    for key in keys:
        table[key.constant] = key.path[-1]
        if nested_model(key.field) is None:
            table[f"{key.constant}_DEFAULT"] = key.default()
    return table


def _of_block(model: type[BaseModel], block: str, constant: str) -> dict[str, Any]:
    return {constant: block, **constants(keys(model, (block,), f"{constant}_"))}


FLOPS_PROFILER = _of_block(observe.DeepSpeedFlopsProfilerConfig, "flops_profiler", "FLOPS_PROFILER")
NEBULA = _of_block(features.DeepSpeedNebulaConfig, "nebula", "NEBULA")
ACTIVATION_CHECKPOINTING = _of_block(
    features.DeepSpeedActivationCheckpointingConfig, "activation_checkpointing", "ACT_CHKPT"
)
ACTIVATION_CHECKPOINTING["ACTIVATION_CHKPT_FORMAT"] = (
    "\nThe configuration's block, with its defaults:\n"
    f'"{ACTIVATION_CHECKPOINTING["ACT_CHKPT"]}": '
    f"{json.dumps(features.DeepSpeedActivationCheckpointingConfig().model_dump(), indent=2)}\n"
)
ELASTICITY = constants(
    keys(
        features.ElasticityConfig,
        irregular={
            "max_train_batch_size": "MAX_ACCEPTABLE_BATCH_SIZE",
            "micro_batch_sizes": "MICRO_BATCHES",
        },
    )
)
