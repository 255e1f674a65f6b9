"""What each process alone knows: random states and its position in the data. Saved in a file per
process.

Random states belong to a process, so they are restored where as many processes hold the same parts
of the model. The position in the data is counted in samples over all ranks, so any number of ranks
can go on from it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.parallel_degrees import ParallelDegrees
from deepspeed.comm.parallel_map import ParallelMap
from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
from deepspeed.runtime.dataloader import ResumableDistributedSampler
from deepspeed.utils.logging import logger

# Samplers whose position is counted in samples over all ranks.
POSITIONED = (ResumableDistributedSampler, DeepSpeedDataSampler)


def host_state(
    loader: Any,
    micro_steps: int,
    cut: dict[str, int],
    num_forwards: Sequence[int],
    window: bool,
) -> dict[str, Any]:
    """This process's state.

    Args:
        loader: The engine's training dataloader, or None.
        micro_steps: Micro-batches so far.
        cut: `host_degrees` of this run.
        num_forwards: Of each chunk of a pipeline's layers, which may be seeded by it; empty
            without.
        window: An accumulation window is open (`window_files`).
    """
    import numpy  # startup: only needed here

    accelerator = get_accelerator()
    name, state, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    return {
        # Tensors: a thousand numbers cost a save in the background milliseconds, in which training
        # waits for the interpreter.
        "python": (version, torch.tensor(words), gauss),
        "numpy": (
            name,
            torch.from_numpy(numpy.array(state, dtype=numpy.int64)),
            position,
            has_gauss,
            cached,
        ),
        "torch": torch.get_rng_state(),
        "device": accelerator.get_rng_state() if accelerator.device_name() != "cpu" else None,
        "dataloader": loader.state_dict() if hasattr(loader, "state_dict") else None,
        "micro_steps": micro_steps,
        "cut": dict(cut),
        "num_forwards": list(num_forwards),
        "window": window,
    }


def host_degrees(parallel_map: ParallelMap) -> dict[str, int]:
    """Where a process must be in an equal run for its random states to be its own again."""
    return {
        "world": dist.get_world_size(),
        "replicas": parallel_map.replicas.size,
        **ParallelDegrees.of_this_run(parallel_map)._asdict(),
    }


def restore_host_state(host: dict[str, Any], loader: Any) -> None:
    """Go on where this process, or one in its place, was."""
    import numpy  # startup: only needed here

    version, words, gauss = host["python"]
    # The words are plain numbers in older files.
    random.setstate((version, tuple(torch.as_tensor(words).tolist()), gauss))
    name, words, *rest = host["numpy"]
    numpy.random.set_state((name, torch.as_tensor(words).numpy().astype(numpy.uint32), *rest))
    torch.set_rng_state(host["torch"])
    if host["device"] is not None:
        get_accelerator().set_rng_state(host["device"])
    if hasattr(loader, "load_state_dict") and host["dataloader"] is not None:
        loader.load_state_dict(host["dataloader"])


def restore_position(host: dict[str, Any], loader: Any) -> None:
    """Go on in the data where a run of other ranks was; `host` is of any of them."""
    if loader is None or host["dataloader"] is None:
        return
    if isinstance(getattr(loader, "data_sampler", None), POSITIONED):
        loader.load_state_dict(host["dataloader"])
    else:
        logger.warning(
            "the checkpoint was saved by other ranks, and a sampler of the client orders the "
            "training data: its position is not restored, the epoch begins anew"
        )
