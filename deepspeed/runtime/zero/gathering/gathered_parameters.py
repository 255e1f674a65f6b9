"""Whole parameters for scripts: `GatheredParameters`, and `all_gather()` / `partition()` of a
parameter.

They have memory of their own, so that what a script holds is not given to another unit. What a
running forward has gathered is used as it is.

[Note: edits]
With `modifier_rank` the values of that rank are everybody's: broadcast, and only when the broadcast
is over written to the shards and from there to the masters. Without it nothing is written, so a
change that a script made would be lost; it raises. A change is noticed by the parameter's version
counter, and in what this rank owns by its elements, because writes through `.data` are not counted.
One that the script has undone, up to rounding (`undone_edits`), is none: adapters are merged,
pushed to who generates, and taken out again. What this rank owns it compares with its shard. Where
the counter alone shows a change, and where the parameter stays whole after the block, the original
is gathered again, one parameter at a time; and what stays whole gets its values back. What an outer
block has whole already is that block's to judge.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sharding.flattening import lies_on_host
from deepspeed.runtime.sharding.group import expert_group_of
from deepspeed.runtime.streams import SideStream
from deepspeed.runtime.zero.gathering.gather_unit import GatherUnit, note_written
from deepspeed.runtime.zero.gathering.memory_pool import GatherResources, poison
from deepspeed.runtime.zero.gathering.undone_edits import is_undone
from deepspeed.runtime.zero.gathering.units import GatherSettings
from deepspeed.runtime.zero.parameters.agreement import agree, said_by_all
from deepspeed.runtime.zero.parameters.zero_parameter import (
    ReadsByHand,
    ShardedParameter,
    ZeroParameter,
    ZeroParamStatus,
    hide,
    install_reads,
    is_zero_param,
    only_group,
    record_of,
    refusal,
    show,
    whole_value,
)


def _kinds(params: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Sort by what one collective can carry, in the same order on all ranks."""
    kinds: dict[Any, list[nn.Parameter]] = {}
    for param in params:
        shard = record_of(param).shard
        kind = (shard.dtype, shard.device, record_of(param).device, record_of(param).group)
        kinds.setdefault(kind, []).append(param)
    return list(kinds.values())


def _zero_params(params: Iterable[Any]) -> list[nn.Parameter]:
    return [param for param in dict.fromkeys(params) if is_zero_param(param)]


_gather_streams: dict[tuple[object, object], SideStream] = {}


def _gather_stream() -> SideStream:
    """Return the stream of gathers by hand; another accelerator (a simulated one) has its own."""
    accelerator = get_accelerator()
    of = (accelerator, accelerator.current_device())
    if of not in _gather_streams:
        _gather_streams.clear()
        _gather_streams[of] = SideStream(True, "gather stream")
    return _gather_streams[of]


@torch.no_grad()
def hold_whole(params: Iterable[nn.Parameter]) -> None:
    """Have parameters whole until as many `let_go`, or none if a gather fails. Collective."""
    chosen = _zero_params(params)
    absent = {
        param: None
        for param in chosen
        if not record_of(param).readers and record_of(param).status is not ZeroParamStatus.AVAILABLE
    }
    try:
        gathered = [(same, _gather(same)) for same in _kinds(list(absent))]
    except BaseException:
        for param in absent:
            hide(param)
        raise
    for param in chosen:
        record = record_of(param)
        if record.readers or param in absent:
            record.readers += 1
        elif record.unit is not None:
            if record.unit.coordinator is not None:
                record.unit.coordinator.enter([record.unit])
            record.num_lent += 1
    for same, whole in gathered:
        for param, value in zip(same, whole, strict=True):
            show(param, value)
            if record_of(param).unit is not None:
                record_of(param).unit.num_read_apart += 1


def _gather(params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    resources = GatherResources(GatherSettings(), gather=_gather_stream())
    unit = GatherUnit("read by hand", params, resources, takes_shards=False)
    unit.fetch()
    resources.let_go()
    return unit.hand_out()


@torch.no_grad()
def let_go(params: Iterable[nn.Parameter], has_been_updated: bool = False) -> None:
    """End `hold_whole`; with `has_been_updated` each rank writes what it owns back."""
    chosen = _zero_params(params)
    if has_been_updated:
        for param in chosen:
            record_of(param).write(whole_value(param))
        _tell_units(chosen)
    for param in chosen:
        record = record_of(param)
        if record.status is ZeroParamStatus.AVAILABLE:
            note_written(param)
        if record.num_lent and record.unit is not None:
            record.num_lent -= 1
            if record.unit.coordinator is not None:
                record.unit.coordinator.leave([record.unit])
        elif record.readers:
            record.readers -= 1
            if record.readers == 0:
                if record.unit is None:
                    hide(param)
                    continue
                if record.unit.resources.is_poisoned:
                    poison(whole_value(param))
                hide(param)
                record.unit.num_read_apart -= 1
                record.unit.show_again(param)


def _tell_units(params: Sequence[nn.Parameter]) -> None:
    for param in params:
        record = record_of(param)
        if record.on_edit is not None:
            record.on_edit(param)


@torch.no_grad()
def publish(
    params: Sequence[nn.Parameter],
    source: int | None = None,
    keep: Callable[[Iterable[nn.Parameter]], None] | None = None,
) -> None:
    """Give everybody the values of one rank (`source`; None: the first of those that have them),
    and write them to shards. `keep` gets each parameter of which this rank has other values.
    """
    for same in _kinds(params):
        group = record_of(same[0]).instances.everyone
        flat = torch.cat([param.data.reshape(-1) for param in same])
        if dist.get_world_size(group=group) > 1 and flat.numel():
            # Over before anything is written or let go: `flat` is complete on every rank here.
            root = dist.get_global_rank(group, 0) if source is None else source
            dist.broadcast(flat, src=root, group=group)
        pieces = flat.split([record_of(param).numel for param in same])
        for param, piece in zip(same, pieces, strict=True):
            if keep is not None and not torch.equal(_as_bytes(param.data), _as_bytes(piece)):
                keep([param])
            param.data.copy_(piece.view(param.shape))
            record_of(param).write(param.data)
    _tell_units(params)


def _few(names: Iterable[str]) -> str:
    return ", ".join(list(dict.fromkeys(names))[:4])


def _lost(names: Iterable[str]) -> str:
    return (
        f"GatheredParameters: {_few(names)} changed inside the block, and the change would be "
        "lost: give modifier_rank=0 (or the rank whose values count; of experts one that holds "
        "them), or discard=True if it is to be thrown away"
    )


def _lost_before(names: Iterable[str]) -> str:
    return (
        f"GatheredParameters: {_few(names)} changed before the block, while whole outside of any "
        "(ZeRO stage 3), and the change is lost: where it is made, make it inside `with "
        "deepspeed.zero.GatheredParameters(param, modifier_rank=0)`"
    )


install_reads(ReadsByHand(hold_whole, let_go))


class _OrdinaryCopies:
    """Lets `nn.Parameter(parameter)` make an ordinary parameter of one of stage 3 that is whole;
    torch itself refuses subclasses (`weight_norm` and others make such copies). May be nested.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._original: Any = None

    def begin(self) -> None:
        if self._depth == 0:
            self._original = nn.Parameter.__dict__["__new__"]
            nn.Parameter.__new__ = staticmethod(self._new)  # type: ignore[method-assign]  # until `end`
        self._depth += 1

    def end(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            nn.Parameter.__new__ = self._original  # type: ignore[method-assign]  # what it was

    def _new(self, cls: object, data: object = None, requires_grad: bool = True) -> Any:
        if type(data) is ShardedParameter:
            raise RuntimeError(refusal(data._zero3, "nn.Parameter"))
        plain = whole_value(data) if type(data) is ZeroParameter else data
        return self._original.__func__(cls, plain, requires_grad)


ordinary_copies = _OrdinaryCopies()


class GatheredParameters:
    """Whole parameters inside a `with` block. All ranks enter it with the same parameters, and none
    of them if one has none.

    Args:
        params: A parameter, several, or anything that can be iterated; what is no parameter of
            stage 3 is left alone, and duplicates count once. One rank may enter a block of other
            tensors alone.
        modifier_rank: Global rank whose changes become everybody's, of experts that of those that
            hold them; None, or a rank that does not hold one: nobody may change it.
        fwd_module: Module whose forward the block belongs to. It needs no registration here.
        enabled: False: the block does nothing.
        discard: What is changed inside is thrown away; all ranks say so, and without
            `modifier_rank`.

    Raises:
        RuntimeError: On entry, if ranks have other parameters, `modifier_rank` has none of them, or
            `discard` is inside a block that has them already; on exit, if a change would be lost:
            one that is not undone by then, up to rounding.
    """

    def __init__(
        self,
        params: Iterable[object],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
        discard: bool = False,
    ) -> None:
        if discard and modifier_rank is not None:
            raise ValueError(
                f"GatheredParameters(modifier_rank={modifier_rank}, discard=True): changes are "
                "either kept or thrown away; leave one of the two out"
            )
        given = [params] if isinstance(params, torch.Tensor) else list(params) if enabled else []
        self.params = _zero_params(given) if enabled else []
        self._is_empty = enabled and not given
        self.src_rank = modifier_rank
        self._discards = discard
        self._seen: dict[nn.Parameter, tuple[int, int]] = {}  # version and place of what is ours
        self._kept: dict[nn.Parameter, torch.Tensor] = {}  # values of what shows its shard
        self._changed_before: set[nn.Parameter] = set()

    def __enter__(self) -> GatheredParameters:
        if self.params:
            self._agree(self._sharers()[0])
            self._refuse_foreign_modifier()
            own = [param for param in self.params if not record_of(param).is_held]
            self._refuse_outer_block(set(self.params) - set(own))
            self._note_earlier_edits(own)
            hold_whole(self.params)
            self._seen = {param: (param._version, param.data_ptr()) for param in own}
            shown = (param for param in own if _shows_shard(param))
            self._kept = {param: param.data.clone() for param in shown}
            ordinary_copies.begin()
        elif self._is_empty:
            group = only_group()
            if group is not None:  # otherwise nobody knows whom this rank would keep waiting
                self._agree(group)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if not self.params:
            return
        ordinary_copies.end()
        try:
            modified = self._modified()
            publish(modified, self.src_rank)
            if self._discards:
                for param in filter(_stays_whole, self.params):
                    record_of(param).unit.restore(param, self._original(param))
            elif kind is None:
                self._refuse_lost_edits(set(modified))
        finally:
            let_go(self.params)

    def _agree(self, group: dist.Group) -> None:
        def names(params: Sequence[tuple[int, str]]) -> str:
            more = f" and {len(params) - 4} more" if len(params) > 4 else ""
            return (", ".join(label for _, label in params[:4]) or "none") + more

        own = [(record_of(param).id, record_of(param).label) for param in self.params]
        own += [(-1, "discard=True")] if self._discards else []
        agree(
            own,
            group,
            lambda: f"GatheredParameters with {names(own)}",
            lambda told: (
                "GatheredParameters: ranks entered with different parameters; "
                + "; ".join(
                    f"rank {dist.get_global_rank(group, rank)}: {names(params)}"
                    for rank, params in enumerate(told)
                )
            ),
        )

    def _modified(self) -> list[nn.Parameter]:
        if self.src_rank is None:
            return []
        sharers = {param: record_of(param).instances.everyone for param in self.params}
        has = {
            group: self.src_rank in dist.get_all_ranks_from_group(group)
            for group in set(sharers.values())
        }
        return [param for param, group in sharers.items() if has[group]]

    def _refuse_foreign_modifier(self) -> None:
        """Refuse a rank with other slices of a layer: copies of what is alike would part."""
        if self.src_rank is None:
            return
        shared = [param for param in self.params if expert_group_of(param) is None]
        for group in {record_of(param).instances.everyone for param in shared}:
            ranks = dist.get_all_ranks_from_group(group)
            if self.src_rank not in ranks:
                theirs = (p for p in shared if record_of(p).instances.everyone == group)
                raise RuntimeError(
                    f"GatheredParameters(modifier_rank={self.src_rank}): ranks {ranks} have "
                    f"{record_of(next(theirs)).label} and slices of it or of other layers: let one "
                    f"of them modify it (modifier_rank={ranks[0]}), or modify the model before its "
                    "layers are cut"
                )

    def _refuse_outer_block(self, held: Container[nn.Parameter]) -> None:
        """Refuse `discard` there: nobody knows whether it shows what was before it."""
        theirs = [record_of(param).label for param in self.params if param in held]
        if self._discards and theirs:
            raise RuntimeError(
                f"GatheredParameters(discard=True): {', '.join(theirs[:4])} are whole in an outer "
                "block already: give discard=True to that one, or leave it first"
            )

    @torch.no_grad()
    def _note_earlier_edits(self, params: Iterable[nn.Parameter]) -> None:
        """Find what has other values already than its shards, before the block shows it."""
        self._kept = {}
        self._changed_before = set()
        if not self._may_lose(set(self._modified())):
            return
        for param in params:
            record = record_of(param)
            if record.status is ZeroParamStatus.AVAILABLE and self._differs(param):
                self._changed_before.add(param)

    def _differs(self, param: nn.Parameter) -> bool:
        """Whether this rank's part of a whole parameter is another than its shard."""
        if param.shape != record_of(param).shape:
            return True
        before, after = self._own_part(param)
        is_same = torch.equal(_as_bytes(before), _as_bytes(after))
        return not (is_same or is_undone(before, after))

    @torch.no_grad()
    def _refuse_lost_edits(self, modified: Container[nn.Parameter]) -> None:
        """Raise on all ranks if one of them has changed what nobody writes."""
        if not self._may_lose(modified):
            return
        lost, doubtful = [], []
        for index, param in enumerate(self.params):
            if param in modified or param not in self._seen:
                continue
            version, place = self._seen[param]
            before, after = self._own_part(param)
            has_shape = param.shape == record_of(param).shape
            differs = not has_shape or not torch.equal(_as_bytes(before), _as_bytes(after))
            if differs and not (has_shape and is_undone(before, after)):
                lost.append(index)
            if param._version != version or (
                _stays_whole(param) and (differs or param.data_ptr() != place)
            ):
                doubtful.append(index)
        # A rank that raised alone would leave the others waiting for it.
        earlier = [at for at, param in enumerate(self.params) if param in self._changed_before]
        told = self._said_by_all((lost, doubtful, earlier))
        if any(found for _, found, _ in told):
            for index in sorted({index for _, found, _ in told for index in found}):
                param = self.params[index]
                after = param.data  # a gather shows what it has gathered
                original = self._original(param)
                if not is_undone(original, after):
                    lost.append(index)
                if _stays_whole(param):
                    record_of(param).unit.restore(param, original)
            told = self._said_by_all((lost, doubtful, earlier))
        indexes = sorted({index for found, _, _ in told for index in found})
        names = {index: record_of(self.params[index]).label for index in indexes}
        changed_before = {index for _, _, found in told for index in found}
        if not changed_before.isdisjoint(names):
            raise RuntimeError(_lost_before(names[at] for at in indexes if at in changed_before))
        if names:
            raise RuntimeError(_lost(names.values()))

    def _said_by_all(self, found: object) -> list[Any]:
        return said_by_all(found, self._sharers()[0], lambda: "the end of GatheredParameters")

    def _may_lose(self, modified: Container[nn.Parameter]) -> bool:
        """Whether some rank has parameters here that the modifier rank has not."""
        return len(self._sharers()) > 1 or any(param not in modified for param in self.params)

    def _sharers(self) -> list[dist.Group]:
        """The groups that have the parameters, the largest first: experts are on fewer ranks."""
        groups = dict.fromkeys(record_of(param).instances.everyone for param in self.params)
        return sorted(groups, key=lambda group: -dist.get_world_size(group=group))

    def _original(self, param: nn.Parameter) -> torch.Tensor:
        return self._kept[param] if param in self._kept else _gather([param])[0]

    def _own_part(self, param: nn.Parameter) -> tuple[torch.Tensor, torch.Tensor]:
        """Slice what this rank owns of it, as its shard had it and as it is now."""
        record = record_of(param)
        own = record.own_part(param.data)
        kept = self._kept.get(param)
        shard = record.shard[: own.numel()] if kept is None else kept.view(-1)
        return shard, get_accelerator().to_host(own) if lies_on_host(shard) else own


def _shows_shard(param: nn.Parameter) -> bool:
    record = record_of(param)
    return bool(record.num_lent and record.unit.shows_shard)


def _stays_whole(param: nn.Parameter) -> bool:
    """Whether it is whole after the block too: what persists, and what a running forward uses."""
    return not record_of(param).readers


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    # NaN is not equal to itself.
    return values.contiguous().reshape(-1).view(torch.uint8)
