"""What scripts do to a model's parameters behind the optimizer: `ModelWrites`.

The parameters of a flat group are views of one buffer, and masters, where they lie apart, are what
the next step rounds into it. A script may write to a parameter, or give it other memory
(`param.data = ...`, `module.to("cpu")` and back). Before a step, and before masters are read, each
group is compared with what was left there: addresses and version counters, a number a parameter,
and where the host need not wait for it, a few elements of each, for writes by way of `.data`, which
torch does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sharding.fragments import ParamIndex
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.utils.logging import warn_once

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Sample:
    """A few elements of each parameter of a flat group, and what they were."""

    def __init__(self, group: ShardedGroup) -> None:
        places: list[int] = []
        self._owners: list[ParamIndex] = []
        for index, (start, numel) in enumerate(
            zip(group.table.offsets, group.table.numels, strict=True)
        ):
            within = sorted({0, numel // 3, 2 * numel // 3, numel - 1}) if numel else []
            places += [start + at for at in within]
            self._owners += [index] * len(within)
        self._group = group
        self._places = torch.tensor(places, dtype=torch.int64, device=group.flat.device)
        self._kept = self._now()

    def _now(self) -> torch.Tensor:
        flat = self._group.flat.detach()
        # Bits: NaN is not equal to itself.
        return flat.view(_BITS[flat.element_size()]).index_select(0, self._places)

    def keep(self) -> None:
        self._kept = self._now()

    def changed(self) -> set[ParamIndex]:
        now = self._now()
        if torch.equal(now, self._kept):
            return set()
        return {self._owners[at] for at in (now != self._kept).nonzero().flatten().tolist()}


class _Watched:
    """One flat group, with what its parameters were when they were looked at last."""

    def __init__(self, group: ShardedGroup, names: Sequence[str]) -> None:
        self.group = group
        self.names = names
        self.params = group.params
        # Of no elements there is no address.
        self._filled = [index for index, numel in enumerate(group.table.numels) if numel]
        self._base: int | None = None
        self._expected: list[int] = []
        self._versions = [param._version for param in self.params]
        reads_freely = get_accelerator().is_synchronized_device() and not group.flat.is_meta
        self.sample = _Sample(group) if reads_freely and not group.aliased else None

    def moved(self) -> list[ParamIndex]:
        """Return the parameters that do not lie in the flat buffer."""
        flat = self.group.flat
        base = flat.data_ptr()
        if not base:
            return []  # without data (meta) there are no addresses
        if base != self._base:
            offsets, size = self.group.table.offsets, flat.element_size()
            self._expected = [base + offsets[index] * size for index in self._filled]
            self._base = base
        params = self.params
        found = [params[index].data_ptr() for index in self._filled]
        if found == self._expected:
            return []
        pairs = zip(self._filled, found, self._expected, strict=True)
        return [index for index, here, there in pairs if here != there]

    def written(self) -> set[ParamIndex]:
        """Return the parameters that were written to, as torch counts or a sample shows."""
        now = [param._version for param in self.params]
        found = self.sample.changed() if self.sample is not None else set()
        if now != self._versions:
            pairs = enumerate(zip(now, self._versions, strict=True))
            found |= {index for index, (new, old) in pairs if new != old}
            self._versions = now
        return found


class ModelWrites:
    """Brings flat groups and their masters to what scripts have made of the model's parameters.

    Args:
        groups: Flat groups. Those of stage 3 are left alone: a sharded parameter refuses to be
            written to by itself.
        names: The names of each group's parameters, for errors.
        on_written: Called when masters have followed a write.

    Attributes:
        compares_all: Compare every element with its master, and warn of writes that would not be
            noticed otherwise.
    """

    def __init__(
        self,
        groups: Sequence[ShardedGroup],
        names: Sequence[Sequence[str]],
        on_written: Callable[[], None],
    ) -> None:
        pairs = zip(groups, names, strict=True)
        self._watched = [
            _Watched(group, theirs) for group, theirs in pairs if group.params and not group.is_cut
        ]
        self._on_written = on_written
        self._moved: dict[_Watched, set[ParamIndex]] = {}
        self.compares_all = False

    def rejoin(self) -> None:
        """Let parameters that a script has given other memory lie in their flat buffer again, with
        the values that they have there.

        Raises:
            RuntimeError: Their dtype, device or shape is not what the engine trains.
        """
        for watched in self._watched:
            moved = watched.moved()
            for index in moved:
                _check(watched, index)
            for index in moved:
                _move_back(watched, index)
            if moved:
                self._moved.setdefault(watched, set()).update(moved)

    def take_in(self) -> None:
        """Let masters follow what scripts have written to parameters; called before masters are
        used.
        """
        self.rejoin()
        any_written = False
        for watched in self._watched:
            written = watched.written() | self._moved.pop(watched, set())
            if self.compares_all:
                written |= _unnoticed(watched, written)
            any_written |= bool(written)
            for index in sorted(written):
                watched.group.follow(index)
        if any_written:
            self.keep()
            self._on_written()

    def keep(self) -> None:
        """Remember the elements as they are now: the step itself has changed them."""
        for watched in self._watched:
            if watched.sample is not None:
                watched.sample.keep()


def _unnoticed(watched: _Watched, noticed: Collection[ParamIndex]) -> set[ParamIndex]:
    """Find, and warn of, parameters that differ from their masters without having been noticed."""
    group = watched.group
    every = range(len(watched.params))
    found = {at for at in every if at not in noticed and group.differs(at)}
    if found:
        names = ", ".join(watched.names[at] for at in sorted(found))
        warn_once(
            f"verify.masters: {names} changed by a write that torch does not count (param.data), "
            "and the masters follow it. Without this check it would be lost: write to the "
            "parameter itself under torch.no_grad()"
        )
    return found


def refused_memory(name: str, param: torch.Tensor, dtype: torch.dtype, device: torch.device) -> str:
    """Return the error text for a parameter whose dtype or device is not the engine's."""
    return (
        f"{name} is {param.dtype} on {param.device}, and the engine trains it in {dtype} on "
        f"{device}: the model was converted or moved after deepspeed.initialize (model.half(), "
        ".float(), .to(...), param.data = ...). Convert it back before it is trained again. To "
        "have the device's memory free between steps use engine.offload_states(); to train in "
        "another precision name it in the configuration (bf16, fp16)"
    )


def _check(watched: _Watched, index: ParamIndex) -> None:
    param, flat = watched.params[index], watched.group.flat
    if (param.dtype, param.device) != (flat.dtype, flat.device):
        raise RuntimeError(refused_memory(watched.names[index], param, flat.dtype, flat.device))
    if param.numel() != watched.group.table.numels[index]:
        raise RuntimeError(
            f"{watched.names[index]} has {param.numel()} elements, and the engine trains "
            f"{watched.group.table.numels[index]}: a parameter keeps its shape after "
            "deepspeed.initialize; make a new engine for another one"
        )


@torch.no_grad()
def _move_back(watched: _Watched, index: ParamIndex) -> None:
    param, table = watched.params[index], watched.group.table
    start = table.offsets[index]
    view = watched.group.flat[start : start + table.numels[index]].view(param.shape)
    view.copy_(param.data)
    param.data = view
