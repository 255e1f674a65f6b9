"""State of sharded masters and moments in upstream's layout: the keys that ZeRO-1/2 and
BF16_Optimizer files share. Here it is this rank's own shard; what was sharded otherwise is made
into that by `runtime.checkpointing.optimizer_resharding`.

Masters are saved without padding; moments as the wrapped optimizer holds them (padded), or per
group without padding with `elastic_checkpoint`. `param_slice_mappings` says where each parameter's
fragment lies in this rank's shard.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.resharding.saved_optimizer import is_per_element
from deepspeed.git_version_info import version as __version__
from deepspeed.runtime.optimizers.master_weights import MasterWeights
from deepspeed.runtime.optimizers.state_layout import OwnShard, StateFiles, StateLayout
from deepspeed.runtime.optimizers.step_outcome import Outcomes
from deepspeed.runtime.sharding.exchange import LayoutExchange
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.runtime.sharding.loading_in_place import load_in_place
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

# For each group, state of its shard by key.
Moments = list[dict[str, torch.Tensor]]


class CheckpointMismatchError(RuntimeError):
    """The saved state does not fit this model, optimizer or world."""


def sharded_state_dict(masters: MasterWeights, elastic: bool) -> dict[str, Any]:
    """This rank's part of the state; see `Refiling` for who has to call it."""
    refiling = Refiling(masters, to_files=True)
    base = masters.optimizer.state_dict()
    host = torch.device("cpu")  # state may fill the device: what is made here must not
    if refiling.is_needed:
        moments = refiling.moments(_states_of_groups(base))
        refiling.agree(moments)
        base = _with_moments(base, refiling.move_all(moments, host))
    lean = [
        without_padding(group, refiling.move(index, group.master.detach(), host))
        for index, group in enumerate(masters.groups)
    ]
    state = as_sharded_state(masters, _lean_state(masters, base) if elastic else base, lean)
    if elastic:
        state[keys.BASE_OPTIMIZER_PARAM_GROUPS] = base["param_groups"]
        steps = [state.get("step") for state in masters.state.values()]
        state[keys.BASE_OPTIMIZER_STATE_STEP] = next(
            (step for step in steps if step is not None), None
        )
    return state


def as_sharded_state(
    masters: MasterWeights,
    base: dict[str, Any] | list[dict[str, Any]],
    lean: Sequence[torch.Tensor],
) -> dict[str, Any]:
    """Make moments (a state dict, or per group unpadded) and unpadded masters this rank's part."""
    return {
        keys.BASE_OPTIMIZER_STATE: base,
        keys.SINGLE_PARTITION_OF_FP32_GROUPS: list(lean),
        keys.GROUP_PADDINGS: masters.group_paddings,
        keys.PARTITION_COUNT: masters.partition_count,
        keys.DS_VERSION: __version__,
        keys.PARAM_SLICE_MAPPINGS: [_slice_mapping(masters, group) for group in masters.groups],
    }


def _lean_numel(group: ShardedGroup) -> int:
    """Elements of this rank's shard without padding, as files have it."""
    return group.file_table.shard_numel - group.file_table.shard_padding(group.shard_rank)


def without_padding(group: ShardedGroup, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this rank's shard, as files have it, without the padding at its end."""
    return tensor.detach()[: _lean_numel(group)]


def _slice_mapping(
    masters: MasterWeights, group: ShardedGroup
) -> OrderedDict[str, fragment_address]:
    return OrderedDict(
        (
            masters.context.param_names.get(group.params[f.param], str(f.param)),
            fragment_address(numel=f.numel, start=f.shard_start),
        )
        for f in group.file_table.of_shard(group.shard_rank)
    )


def _lean_state(masters: MasterWeights, base: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            key: without_padding(group, value)
            if is_per_element(key, value, (group.file_table.shard_numel,), is_scalar=False)
            else value
            for key, value in state.items()
        }
        for group, state in zip(masters.groups, _states_of_groups(base), strict=True)
    ]


def _states_of_groups(base: dict[str, Any] | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the state of each group's shard, of a state dict or as `elastic_checkpoint` has it."""
    if not isinstance(base, dict):
        return base
    numbers = [options["params"][0] for options in base["param_groups"]]
    return [base["state"].get(number, {}) for number in numbers]


def _with_moments(base: dict[str, Any], moments: Moments) -> dict[str, Any]:
    states = dict(base["state"])
    for options, own in zip(base["param_groups"], moments, strict=True):
        if own:
            number = options["params"][0]
            states[number] = {**states[number], **own}
    return {**base, "state": states}


class Refiling:
    """This rank's shards between the layout in memory and that of files.

    Where the two are the same for every group, nothing is copied and nobody is asked. Otherwise all
    ranks that train the same parameters have to take part: they agree (`agree`), then exchange
    shards in one order. A rank whose state does not fit says so when they agree, and all raise.
    """

    def __init__(self, masters: MasterWeights, to_files: bool) -> None:
        self._masters = masters
        self._to_files = to_files
        self._exchanges = [self._exchange(group) for group in masters.groups]
        self._longest = [0] * len(masters.groups)
        self.is_needed = any(exchange is not None for exchange in self._exchanges)

    def _exchange(self, group: ShardedGroup) -> LayoutExchange | None:
        if group.table.is_laid_out_as(group.file_table):
            return None
        ways = (group.table, group.file_table)
        return LayoutExchange(group, *(ways if self._to_files else reversed(ways)))

    def moments(self, states: Sequence[Mapping[str, Any]]) -> Moments:
        """Return, of each group to be moved, what of its shard's state is per element."""
        return [
            {} if exchange is None else self._moments(group, state)
            for group, state, exchange in zip(
                self._masters.groups, states, self._exchanges, strict=True
            )
        ]

    def _moments(self, group: ShardedGroup, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        here = (group.table.shard_numel,)
        sizes = here if self._to_files else (group.file_table.shard_numel, _lean_numel(group))
        return {
            key: state[key]
            for key in sorted(state)
            if is_per_element(key, state[key], sizes, is_scalar=False)
        }

    def agree(self, moments: Moments, problem: Exception | None = None) -> None:
        """Make sure that all ranks are about to exchange the same; called before `move`. All raise
        if one has a `problem`, or they would do different things.
        """
        if not self.is_needed:
            if problem is not None:
                raise problem
            return
        described = [sorted((key, str(one.dtype)) for key, one in own.items()) for own in moments]
        digest = hashlib.sha256(repr(described).encode()).digest()
        number = int.from_bytes(digest[:7], "big")
        longest = [0 if one is None else one.longest for one in self._exchanges]
        facts = [int(problem is not None), number, -number, *longest]
        told = torch.tensor(facts, dtype=torch.int64, device=self._masters.device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._masters.context.dp_process_group)
        failed, highest, negative_of_lowest, *self._longest = told.tolist()
        if failed:
            raise problem or CheckpointMismatchError("the state of another rank does not fit")
        if highest != -negative_of_lowest:
            raise CheckpointMismatchError(
                f"ranks have different optimizer state; this one's, by parameter group: {described}"
            )

    def move_all(self, moments: Moments, device: torch.device | None = None) -> Moments:
        return [
            {key: self.move(index, one, device or group.master.device) for key, one in own.items()}
            for index, (group, own) in enumerate(zip(self._masters.groups, moments, strict=True))
        ]

    def move(self, index: int, shard: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a shard of group `index` in the other layout, on `device`; if same, itself."""
        exchange = self._exchanges[index]
        return shard if exchange is None else exchange.move(shard, self._longest[index], device)


def check_fits(masters: MasterWeights, saved: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatchError, naming what differs, unless this rank could save `saved`."""
    if keys.SINGLE_PARTITION_OF_FP32_GROUPS not in saved:
        raise CheckpointMismatchError("the checkpoint's state is of another ZeRO stage")
    counts = list(saved[keys.PARTITION_COUNT])
    if counts != masters.partition_count:
        raise CheckpointMismatchError(
            f"the checkpoint's parameter groups are divided into {counts} shards, this run's into "
            f"{masters.partition_count}"
        )
    for index, (group, master) in enumerate(
        zip(masters.groups, saved[keys.SINGLE_PARTITION_OF_FP32_GROUPS], strict=True)
    ):
        expected = _lean_numel(group)
        if master.numel() != expected:
            raise CheckpointMismatchError(
                f"parameter group {index}: the checkpoint's shard holds {master.numel()} elements, "
                f"this model's {expected}"
            )
    if not is_dealt_alike(masters, saved[keys.BASE_OPTIMIZER_STATE]):
        raise CheckpointMismatchError("other ranks had the state of this one's whole parameters")
    for index, group in enumerate(
        masters.groups if saved.get(keys.PARAM_SLICE_MAPPINGS) is not None else []
    ):
        here = {name: (a.numel, a.start) for name, a in _slice_mapping(masters, group).items()}
        there = {
            name: (a.numel, a.start) for name, a in saved[keys.PARAM_SLICE_MAPPINGS][index].items()
        }
        if here != there:
            differing = sorted(set(here.items()) ^ set(there.items()))
            raise CheckpointMismatchError(
                f"parameter group {index}: other parameters or another order, e.g. "
                f"{differing[0][0]}"
            )


def is_dealt_alike(masters: MasterWeights, base: object) -> bool:
    """Return whether saved state of whole parameters is of those that this rank has."""
    has_wholes = isinstance(base, dict) and any(
        keys.STATE_OF_PARAMETERS in own for own in base["state"].values()
    )
    if masters.owner_steps is None:
        return not has_wholes
    return isinstance(base, dict) and masters.owner_steps.has_state_of(base)


@torch.no_grad()
def load_sharded_state(
    masters: MasterWeights,
    saved: dict[str, Any],
    load_optimizer_states: bool,
    load_from_fp32_weights: bool,
) -> None:
    """Restore masters and moments of this rank; see `Refiling` for who has to call it. What does
    not fit raises CheckpointMismatchError before anything is changed.
    """
    refiling = Refiling(masters, to_files=False)
    moments: Moments = [{} for _ in masters.groups]
    problem: Exception | None = None
    try:
        check_fits(masters, saved)
        if load_optimizer_states and refiling.is_needed:
            moments = refiling.moments(_states_of_groups(saved[keys.BASE_OPTIMIZER_STATE]))
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = error
    refiling.agree(moments, problem)
    if load_optimizer_states:
        _load_moments(masters, saved, refiling.move_all(moments))
    if load_from_fp32_weights:
        for index, (group, master) in enumerate(
            zip(masters.groups, saved[keys.SINGLE_PARTITION_OF_FP32_GROUPS], strict=True)
        ):
            moved = refiling.move(index, master, group.master.device)
            group.master[: moved.numel()].copy_(moved)
    else:
        masters.refresh_fp32_params()


def _load_moments(masters: MasterWeights, saved: dict[str, Any], moved: Moments) -> None:
    """Restore the wrapped optimizer's state; `moved` is what of it lies otherwise in memory."""
    base = saved[keys.BASE_OPTIMIZER_STATE]
    if not isinstance(base, dict):
        base = _with_groups(masters, base, saved.get(keys.BASE_OPTIMIZER_PARAM_GROUPS))
    load_in_place(masters.optimizer, _with_moments(base, moved) if any(moved) else base)


def _with_groups(
    masters: MasterWeights,
    states: Sequence[Mapping[str, Any]],
    saved: Sequence[Mapping[str, Any]] | None,
) -> dict[str, Any]:
    """Make state per group without padding (`elastic_checkpoint`'s) a state dict of the wrapped
    optimizer; `saved` has the hyper-parameters of each group, if the file does.
    """
    own = masters.optimizer.state_dict()["param_groups"]
    pairs = zip(own, saved or [{}] * len(own), strict=True)
    groups = [{**mine, **kept, "params": mine["params"]} for mine, kept in pairs]
    padded = {
        options["params"][0]: {key: _padded_value(group, value) for key, value in lean.items()}
        for options, group, lean in zip(groups, masters.groups, states, strict=True)
        if lean
    }
    return {"state": padded, "param_groups": groups}


def _padded_value(group: ShardedGroup, value: object) -> Any:
    lean_numel = _lean_numel(group)
    if not (isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == lean_numel):
        return value
    shard_numel = group.file_table.shard_numel
    padded = torch.zeros(shard_numel, dtype=value.dtype, device=group.master.device)
    padded[:lean_numel].copy_(value)
    return padded


class ShardFiles(StateFiles):
    """Files of sharded masters: `BF16_Optimizer`'s. `holders`: ranks that have this same shard."""

    lists_frozen = False

    def __init__(self, masters: MasterWeights, holders: dist.Group, outcomes: Outcomes) -> None:
        super().__init__(masters.optimizer)
        self._masters = masters
        self._outcomes = outcomes
        self._shard = OwnShard(masters.shard_rank, masters.num_shards, holders)

    @property
    def state_layout(self) -> StateLayout:
        return StateLayout(self._shard, has_masters=True, lists_frozen=self.lists_frozen)

    def _head(self) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state, in upstream's layout and cuts. Collective."""
        elastic = self._masters.settings.elastic_checkpoint and self.lists_frozen
        head = {**self._head(), keys.CLIP_GRAD: self._outcomes.clip_grad}
        return {**head, **sharded_state_dict(self._masters, elastic)}

    def _load(self, saved: dict[str, Any], with_moments: bool, with_masters: bool) -> None:
        """Restore this rank's part. Collective, as `state_dict` is."""
        load_sharded_state(self._masters, saved, with_moments, with_masters)

    def fits(self, saved: Mapping[str, Any]) -> bool:
        try:
            check_fits(self._masters, saved)
        except CheckpointMismatchError:
            return False
        return True

    def rebuilt_state(
        self, base: dict[str, Any], masters: Sequence[torch.Tensor], scaler: Mapping[str, Any]
    ) -> dict[str, Any]:
        pairs = zip(self._masters.groups, masters, strict=True)
        lean = [without_padding(group, master) for group, master in pairs]
        clip = {keys.CLIP_GRAD: self._outcomes.clip_grad}
        return {**clip, **as_sharded_state(self._masters, base, lean)}


class ScaledShardFiles(ShardFiles):
    """Files with the loss scale and the stage: those of ZeRO-1 and 2."""

    lists_frozen = True

    def __init__(
        self, masters: MasterWeights, holders: dist.Group, outcomes: Outcomes, stage: ZeroStageEnum
    ) -> None:
        super().__init__(masters, holders, outcomes)
        self._stage = stage

    def _head(self) -> dict[str, Any]:
        return {**self._outcomes.scaler_state(), keys.ZERO_STAGE: self._stage}

    def _load(self, saved: dict[str, Any], with_moments: bool, with_masters: bool) -> None:
        super()._load(saved, with_moments, with_masters)
        self._outcomes.load_scaler_state(saved)

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """Refuse `BF16_Optimizer`'s files, which have no loss scaler."""
        return keys.LOSS_SCALER in saved and super().fits(saved)

    def rebuilt_state(
        self, base: dict[str, Any], masters: Sequence[torch.Tensor], scaler: Mapping[str, Any]
    ) -> dict[str, Any]:
        state = super().rebuilt_state(base, masters, scaler)
        return {**self._outcomes.rebuilt_scaler_state(scaler), **state}
