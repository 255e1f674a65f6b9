"""What each process alone has in a checkpoint: random states, its position in the data, and inside
an accumulation window what it has summed since the last step.

Random states are restored where as many processes hold the same parts of the model. The position is
counted in samples over all ranks, so any number of them can go on. Sums lie as the ranks' buffers
do, so only an equal run goes on with them (`checkpoint.open_window`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
from collections.abc import Mapping
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.files import CheckpointError, read_file
from deepspeed.checkpoint.resharding.cuts import ParallelDegrees
from deepspeed.comm.parallel_map import ParallelMap
from deepspeed.runtime.checkpointing.model_files import LayeredModule
from deepspeed.runtime.checkpointing.training_state import TrainingState
from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
from deepspeed.runtime.dataloader import ResumableDistributedSampler
from deepspeed.runtime.optimizers.step_sequence import StepSequence
from deepspeed.utils.logging import log_dist, logger
from deepspeed.utils.tensor_fragment import logical_shape

# Samplers whose position is counted in samples over all ranks.
POSITIONED = (ResumableDistributedSampler, DeepSpeedDataSampler)


def host_state(state: TrainingState, has_window: bool) -> dict[str, Any]:
    """This process's state; `has_window`: some rank has a file of its window."""
    import numpy  # startup: only needed here

    accelerator, loader, module = get_accelerator(), state.training_dataloader, state.module
    name, key, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    return {
        # Tensors: a thousand numbers cost a save in the background milliseconds, in which training
        # waits for the interpreter.
        "python": (version, torch.tensor(words), gauss),
        "numpy": (
            name,
            torch.from_numpy(numpy.array(key, dtype=numpy.int64)),
            position,
            has_gauss,
            cached,
        ),
        "torch": torch.get_rng_state(),
        "device": accelerator.get_rng_state() if accelerator.device_name() != "cpu" else None,
        "dataloader": loader.state_dict() if hasattr(loader, "state_dict") else None,
        "micro_steps": state.tracker.micro_steps,
        "cut": host_degrees(state.parallel_map),
        "num_forwards": list(module.num_forwards if isinstance(module, LayeredModule) else ()),
        "window": has_window,
        "step_samples": state._config.train_batch_size,
    }


def host_degrees(parallel_map: ParallelMap) -> dict[str, int]:
    """Where a process must be in an equal run for its random states to be its own again."""
    return {
        "world": dist.get_world_size(),
        "replicas": parallel_map.replicas.size,
        **ParallelDegrees.of_this_run(parallel_map)._asdict(),
    }


def restore_host_state(host: dict[str, Any], loader: object) -> None:
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


DISCARD, REPEAT = "discard", "repeat"
_DIGEST = "sha256 "


def window_is_open(state: TrainingState) -> bool:
    """Whether some rank has gradients that no step has used. All ranks call it."""
    if torch._C._current_graph_task_id() != -1:
        raise CheckpointError(
            "save_checkpoint inside a backward: its gradients are not complete; call it afterwards"
        )
    sequence = state._sequence
    if sequence is None or isinstance(state.module, LayeredModule):
        return False
    found = torch.tensor([int(sequence.has_gradients)], dtype=torch.int32, device=state.device)
    if dist.get_world_size() > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())


def window_content(state: TrainingState) -> dict[str, Any]:
    """Content of this rank's file."""
    sequence = state._sequence
    assert sequence is not None, "a window without an optimizer"
    return {
        "layout": _layout(state, sequence),
        "tracker": state.tracker.window_state(),
        "gradients": sequence.window_state(),
    }


def _layout(state: TrainingState, sequence: StepSequence) -> dict[str, Any]:
    """What must be equal for a run to go on, by the name of what the user sees of it."""
    config, names = state._config, {p: name for name, p in state.module.named_parameters()}
    frozen = set(sequence.context.frozen)  # what is frozen now may be trained again
    trained = [
        [(names.get(p), tuple(logical_shape(p)), p.dtype) for p in params if p not in frozen]
        for params in sequence.numbered_params()
    ]
    return {
        **host_degrees(state.parallel_map),
        "gradient_accumulation_steps": state.tracker.divisor,
        "zero_optimization.stage": int(config.zero_optimization_stage),
        "reproducibility.world_size_invariant": config.tree.reproducibility.world_size_invariant,
        "optimizer": type(sequence).__name__,
        "the trained parameters": _digest(trained),
        "the layout of their gradients (buckets, groups)": _digest(sequence.gradient_layout()),
    }


def _digest(value: object) -> str:
    return _DIGEST + hashlib.sha256(repr(value).encode()).hexdigest()


def read_window(
    state: TrainingState, folder: str, host: Mapping[str, Any]
) -> dict[str, Any] | None:
    """This rank's file; None if the checkpoint was saved at a step, or its window begins anew."""
    sequence, checkpoint = state._sequence, state._config.tree.checkpoint
    if not host.get("window") or sequence is None:
        return None
    if checkpoint.open_window in (DISCARD, REPEAT) or checkpoint.load_universal:
        again = ", with its samples once more" if checkpoint.open_window == REPEAT else ""
        log_dist(
            f"{folder} was saved inside an accumulation window: its gradients are not loaded, and "
            f"the window begins anew{again}",
            ranks=[0],
            level=logging.WARNING,
        )
        return None
    now = _layout(state, sequence)
    _check_equal(folder, host["cut"], now)
    path = os.path.join(folder, file_names.window_file(dist.get_rank()))
    content: dict[str, Any] = read_file(path)
    _check_equal(folder, content["layout"], now)
    return content


def _check_equal(folder: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    other = [
        key if str(value).startswith(_DIGEST) else f"{key} was {value}, now {now[key]}"
        for key, value in saved.items()
        if value != now[key]
    ]
    if other:
        raise CheckpointError(
            f"{folder} was saved inside an accumulation window, and only an equal run can go on "
            f"with its gradients. Different are: {', '.join(other)}. Resume as it was saved, save "
            f'after a step instead, or set checkpoint.open_window to "{DISCARD}" to begin the '
            f'window anew without them, or with reproducibility to "{REPEAT}" to train its '
            "samples once more"
        )


def where_step_began(host: dict[str, Any]) -> dict[str, Any]:
    """`host` with its position in the data before the window. An epoch is a multiple of a step's
    samples, as the canonical sum has it.
    """
    position = host["dataloader"]
    if not host.get("window") or "consumed_samples" not in (position or {}):
        return host
    if "step_samples" not in host:
        raise CheckpointError(
            "the checkpoint was saved inside an accumulation window by a release that did not say "
            f'how many samples a step has, so that checkpoint.open_window "{REPEAT}" cannot find '
            f'where it began: use "{DISCARD}", or resume a checkpoint that was saved after a step'
        )
    done = position["consumed_samples"]
    begun = done - done % host["step_samples"]
    again = {"consumed_samples": begun, "batches": position["batches"] * begun // max(done, 1)}
    return {**host, "dataloader": {**position, **again}}


def restore_window(state: TrainingState, content: Mapping[str, Any] | None) -> None:
    """Forget this engine's own gradients, and go on where the window of `read_window` was."""
    sequence = state._sequence
    if sequence is None:
        return
    sequence.zero_grad()
    state.tracker.backwards = 0
    if content is None:
        return
    # Before and after: gradients are added and read on streams that wait for no other here.
    get_accelerator().synchronize()
    sequence.load_window_state(content["gradients"])
    get_accelerator().synchronize()
    state.tracker.load_window_state(content["tracker"])
    if not state.tracker.window.is_reduced:
        state._sequence_parts.opened()
    sequence.observer.skip_window()
