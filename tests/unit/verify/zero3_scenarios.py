"""Short trainings at stage 3 with one guard switched on, by name; see `scenarios`, which lists them
with its own.

The model has many units, so that memory goes from one to another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

STEPS = 4


def _trained(zero: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Parameters after training; at stage 3 what is gathered is checked on the way too."""
    import deepspeed
    from unit.v1.zero.stage3_models import trained

    deepspeed.init_distributed(dist_backend="gloo")
    return trained(3, steps=STEPS, **zero)


def checker(zero: dict[str, Any]) -> list[str]:
    """What the stream checker finds on the simulated device."""
    from deepspeed.accelerator.sim_accelerator import simulate
    from deepspeed.verify import check_streams

    with simulate(seed=0, backward_streams=2), check_streams(raises=False) as found:
        _trained(zero)
    return [str(finding) for finding in found.findings]


def oracle(zero: dict[str, Any]) -> list[str]:
    """How parameters differ from those of one process, or what was raised."""
    import deepspeed
    from unit.v1.zero.stage3_models import distance, reference

    deepspeed.init_distributed(dist_backend="gloo")
    wanted = reference()
    try:
        off = distance(_trained(zero), wanted)
    except (RuntimeError, AssertionError) as error:
        return [f"stage 3: {error}"]
    return [] if off < 1e-5 else [f"stage 3: parameters are off by {off:.2e}"]


_SHARDED: dict[str, Any] = {"stage3_param_persistence_threshold": 0}
_BOUNDED = {**_SHARDED, "stage3_max_reuse_distance": 0}

SCENARIOS: dict[str, Callable[[], list[str]]] = {
    "streams: stage 3": partial(checker, _BOUNDED),
    "streams: stage 3, some persist": partial(
        checker, {"stage3_param_persistence_threshold": 20, "overlap_comm": False}
    ),
    "oracle: stage 3": partial(oracle, _BOUNDED),
    "oracle: stage 3, kept": partial(oracle, _SHARDED),
    "oracle: stage 3, all persist": partial(oracle, {}),
}
