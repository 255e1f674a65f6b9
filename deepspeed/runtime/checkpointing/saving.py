"""One save: what goes into which file, in the foreground or the background."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from deepspeed import comm as dist
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import file_names
from deepspeed.checkpoint.files import CheckpointError, CheckpointTagError, load_data, reason_of
from deepspeed.checkpoint.utils import HostCopy, separate
from deepspeed.comm.watch import lone_waits
from deepspeed.moe.auto_ep import own_rows_only
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)
from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import (
    DecoupledCheckpointEngine,
)
from deepspeed.runtime.checkpointing.background_save import BackgroundSave, finish_saves
from deepspeed.runtime.checkpointing.description import describe, describe_whole, model_state
from deepspeed.runtime.checkpointing.folders import Put, StorageNode, storage_node, together
from deepspeed.runtime.checkpointing.model_files import ModelFiles
from deepspeed.runtime.checkpointing.optimizer_files import OptimizerFiles
from deepspeed.runtime.checkpointing.process_files import (
    host_state,
    window_content,
    window_is_open,
)
from deepspeed.runtime.checkpointing.save_job import SaveJob
from deepspeed.runtime.checkpointing.training_state import TrainingState
from deepspeed.utils.logging import logger


class SaveOptions(NamedTuple):
    """What is saved, and where; see `DeepSpeedEngine.save_checkpoint`."""

    save_dir: str
    tag: str | None = None
    client_state: dict[str, Any] | None = None
    save_latest: bool = True
    exclude_frozen_parameters: bool = False


def save(
    state: TrainingState, engine: CheckpointEngine, options: SaveOptions
) -> BackgroundSave | None:
    """Save, on all ranks; returns what goes on in the background, if anything does."""
    tag = _agreed_tag(state, options)
    client_state = dict(options.client_state or {})
    taken = sorted(set(client_state) & (keys.MODEL_STATE_KEYS - {keys.DS_VERSION}))
    if taken:
        raise ValueError(f"client_state: {', '.join(taken)} are the engine's own keys; rename them")
    check_loadable(client_state, "client_state")
    # Other engines of this process may be writing what this save replaces.
    finish_saves(state.device)
    decoupled = engine if isinstance(engine, DecoupledCheckpointEngine) else None
    checkpoint = state._config.tree.checkpoint
    job = SaveJob(
        engine if decoupled is None else decoupled.inner,
        CheckpointCommitInfo(tag, os.path.abspath(options.save_dir), options.save_latest),
        storage_node(checkpoint.use_node_local_storage),
        checkpoint.keep_last,
        describe_whole(state, tag, client_state, options.save_latest),
        state._copy_recovery_script,
    )
    model = ModelFiles(state.module)
    optimizer = OptimizerFiles(state, model)
    optimizer.collect()
    # See `OptimizerFiles`, [Note: collected first].
    model.collect(_writes_model_file(state, optimizer, job.node))
    has_window = window_is_open(state)
    without_frozen = options.exclude_frozen_parameters

    def fill(put: Put) -> None:
        with own_rows_only():
            weights = state.module_state_dict(exclude_frozen_parameters=without_frozen)
        model.put(put, job.node, weights, without_frozen)
        if _writes_model_file(state, optimizer, job.node):
            content = model_state(state, model, optimizer, weights, without_frozen)
            put(optimizer.model_file, {**content, **client_state})
        for name, content in optimizer.own_files(job.node).items():
            put(name, content)
        put(file_names.host_file(dist.get_rank()), host_state(state, has_window))
        if has_window:
            put(file_names.window_file(dist.get_rank()), window_content(state))

    def begin() -> tuple[dict[str, Any], Callable[[Put], None]]:
        job.prepare()
        description = describe(state, model, optimizer, without_frozen)
        return description, _copied(fill, decoupled.copy) if decoupled else _separated(fill)

    try:
        # One agreement, that the folder is there and the copy is taken: training waits for it.
        description, content = together(begin, state.device, f"saving {tag}")
        if decoupled is None:
            together(lambda: job.write(description, content), state.device, f"saving {tag}")
    except CheckpointError:
        job.abandon()
        raise
    if decoupled is not None:
        return BackgroundSave(job, description, content)
    together(job.publish, state.device, f"saving {tag}")
    return None


def _agreed_tag(state: TrainingState, options: SaveOptions) -> str:
    """The tag under which all ranks save: files under several tags could never be loaded."""
    config, tag = state._config, options.tag
    tag = str(tag) if tag is not None else file_names.default_tag(state.global_steps)
    if not _is_tag_of_all(options.save_dir, tag, state.device):
        tags: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(tags, tag)
        message = f"tag: ranks save under different tags {sorted(set(tags))}"
        if config.checkpoint_tag_validation_fail:
            raise CheckpointTagError(
                f'{message}; every rank must give the same (checkpoint.tag_validation is "Fail")'
            )
        if config.checkpoint_tag_validation_enabled:
            logger.warning(f"{message}; this one uses rank 0's, {tags[0]!r}")
        tag = str(tags[0])
    if not tag or os.path.basename(tag) != tag or tag in (".", ".."):
        raise ValueError(f"tag: {tag!r} is no name of a folder; it must not contain a path")
    return tag


def _is_tag_of_all(save_dir: str, tag: str, device: torch.device) -> bool:
    """Whether all ranks have the same tag, by one collective; raises if one has no folder."""
    is_path = isinstance(save_dir, (str, os.PathLike)) and bool(os.fspath(save_dir))
    number = int.from_bytes(hashlib.sha256(tag.encode()).digest()[:7], "big")
    facts = torch.tensor([number, -number, int(not is_path)], dtype=torch.int64, device=device)
    if dist.get_world_size() > 1:
        meeting = lone_waits.watch.coming()
        with lone_waits.watch.waiting(lambda: f"saving {tag}", meeting):
            dist.all_reduce(facts, op=dist.ReduceOp.MAX)
    highest, negative_of_lowest, has_no_path = facts.tolist()
    if has_no_path:
        raise ValueError(
            "save_checkpoint(save_dir=...): every rank must give the folder to save in; this "
            f"one gave {save_dir!r}"
        )
    return bool(highest == -negative_of_lowest)


def _writes_model_file(state: TrainingState, optimizer: OptimizerFiles, node: StorageNode) -> bool:
    """Whether this rank does, of those that hold the same part of the model."""
    layout = optimizer.layout
    if layout.has_weights and layout.shard is not None:
        return optimizer.writes(layout.shard, node)
    return node.is_first(state.parallel_map.replicas.ranks)


def _separated(fill: Callable[[Put], None]) -> Callable[[Put], None]:
    """What gives the content that `fill` gives, each tensor with storage of its own."""
    return lambda put: fill(lambda name, content: put(name, separate(content)))


def _copied(fill: Callable[[Put], None], copy: HostCopy) -> Callable[[Put], None]:
    """What gives a copy of what `fill` gives now, each tensor with storage of its own."""
    copies: list[tuple[str, Any]] = []
    copy.reset()
    fill(lambda name, content: copies.append((name, copy(content))))

    def replay(put: Put) -> None:
        for name, content in copies:
            put(name, content)

    return replay


def check_loadable(content: object, what: str) -> None:
    """Raise now what `read_file` would raise when the file is needed; tensors are left out."""
    buffer = io.BytesIO()
    try:
        if _is_data(content):
            return
        torch.save(tree_map_only(torch.Tensor, lambda tensor: torch.empty(0), content), buffer)
        buffer.seek(0)
        load_data(buffer)
    except Exception as error:  # pickle and torch raise many kinds
        raise ValueError(
            f"{what} cannot be loaded back: {reason_of(error)}. Use tensors, numbers, strings "
            "and containers of them, or allow the class by "
            "torch.serialization.add_safe_globals([...]), before saving and before loading"
        ) from error


def _is_data(content: Any) -> bool:
    """Whether it can be loaded, by a look that costs less than trying; False: not known."""
    if type(content) is dict:
        return all(map(_is_data, content)) and all(map(_is_data, content.values()))
    if type(content) in (list, tuple):
        return all(map(_is_data, content))
    return content is None or type(content) in (int, float, bool, str, torch.Tensor)
