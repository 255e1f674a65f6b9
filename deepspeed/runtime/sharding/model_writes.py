"""What scripts do to a model's parameters behind the optimizer: `ModelWrites`.

The parameters of a flat group are views of one buffer, and masters, where they lie apart, are what
the next step rounds into it. A script may write to a parameter, or give it other memory
(`param.data = ...`, `module.to("cpu")` and back). Before a step, and before masters are read, each
group is compared with what was left there: addresses and version counters, a number a parameter,
and on the host a few elements of each, for writes by way of `.data`, which torch does not count. A
host that runs ahead of a device would wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from deepspeed.runtime.sharding.fragments import ParamIndex
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.runtime.sharding.value_samples import ValueSample
from deepspeed.utils.logging import warn_once


class _Watched:
    """One flat group, with what its parameters were when they were looked at last."""

    def __init__(self, group: ShardedGroup, names: Sequence[str], samples: bool) -> None:
        self.group = group
        self.names = names
        self.params = group.params
        self.shapes = [param.shape for param in group.params]
        # Of no elements there is no address.
        self._filled = [index for index, numel in enumerate(group.table.numels) if numel]
        self._filled_params = [group.params[index] for index in self._filled]
        self._base: int | None = None
        self._expected: list[int] = []
        # Masters that are a part of the flat buffer have what is written to it: there is nothing to
        # follow, and a pass over all parameters costs as much as it costs to touch their memory.
        self._counted = [] if group.aliased else self.params
        self._versions = [param._version for param in self._counted]
        self.sample: ValueSample | None = None
        if samples and not group.aliased and not group.flat.is_meta:
            parts = zip(group.table.offsets, group.table.numels, strict=True)
            self.sample = ValueSample(lambda: group.flat, parts)

    def first_is_converted(self) -> bool:
        """Whether the first parameter has another dtype or device than the group."""
        first, flat = self.params[0], self.group.flat
        return first.dtype != flat.dtype or first.device != flat.device

    def moved(self) -> list[ParamIndex]:
        """Return the parameters that do not lie in the flat buffer.

        Raises:
            RuntimeError: Two parameters lie at one address.
        """
        flat = self.group.flat
        base = flat.data_ptr()
        if not base:
            return []  # without data (meta) there are no addresses
        if base != self._base:
            offsets, size = self.group.table.offsets, flat.element_size()
            self._expected = [base + offsets[index] * size for index in self._filled]
            self._base = base
        found = [param.data_ptr() for param in self._filled_params]
        if found == self._expected:
            return []
        _refuse_shared(zip(found, (self.names[index] for index in self._filled), strict=True))
        pairs = zip(self._filled, found, self._expected, strict=True)
        return [index for index, here, there in pairs if here != there]

    def written(self) -> set[ParamIndex]:
        """Return the parameters whose masters a write does not reach, as torch counts writes."""
        now = [param._version for param in self._counted]
        if now == self._versions:
            return set()
        pairs = enumerate(zip(now, self._versions, strict=True))
        found = {index for index, (new, old) in pairs if new != old}
        self._versions = now
        return found

    def sampled(self, written: Collection[ParamIndex]) -> set[ParamIndex]:
        """Return the parameters that a sample shows to have been written to, beside `written`."""
        if self.sample is None:
            return set()
        if written:
            self.sample.note(written)
        return set(self.sample.changed_now())


class ModelWrites:
    """Brings flat groups and their masters to what scripts have made of the model's parameters.

    Args:
        groups: Flat groups. Those of stage 3 are left alone: a sharded parameter refuses to be
            written to by itself.
        names: The names of each group's parameters, for errors.
        on_written: Called when masters have followed a write.
        samples: Look at elements: not where the host would wait for a device.

    Attributes:
        compares_all: Compare every element with its master, and warn of writes that would not be
            noticed otherwise.
    """

    def __init__(
        self,
        groups: Sequence[ShardedGroup],
        names: Sequence[Sequence[str]],
        on_written: Callable[[], None],
        samples: bool = True,
    ) -> None:
        pairs = zip(groups, names, strict=True)
        self._watched = [
            _Watched(group, theirs, samples)
            for group, theirs in pairs
            if group.params and not group.is_cut
        ]
        self._on_written = on_written
        self._moved: dict[_Watched, set[ParamIndex]] = {}
        self.compares_all = False

    def refuse_converted(self) -> None:
        """Refuse a converted model, as the first parameter of each group shows."""
        if any(watched.first_is_converted() for watched in self._watched):
            self.rejoin()

    def rejoin(self) -> None:
        """Let parameters that a script has given other memory lie in their flat buffer again, with
        the values that they have there.

        Raises:
            RuntimeError: Their dtype, device or shape is not what the engine trains, or two have
                the same memory.
        """
        for watched in self._watched:
            moved = watched.moved()
            if not moved:
                continue
            for index in moved:
                _check(watched, index)
            _move_back(watched, moved)
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
            written |= watched.sampled(written)
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
                watched.sample.note_all()


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


def _refuse_shared(named: Iterable[tuple[int, str]]) -> None:
    """Refuse parameters that have come to lie at one address."""
    seen: dict[int, str] = {}
    for address, name in named:
        if address in seen:
            raise RuntimeError(
                f"{seen[address]} and {name} have the same memory: a script has written "
                "param.data = ... after deepspeed.initialize, and each would be trained by itself. "
                "Tie them before it, by making them one parameter, or copy the values: "
                "param.copy_(other) under torch.no_grad()"
            )
        seen[address] = name


def _check(watched: _Watched, index: ParamIndex) -> None:
    param, flat = watched.params[index], watched.group.flat
    if (param.dtype, param.device) != (flat.dtype, flat.device):
        raise RuntimeError(refused_memory(watched.names[index], param, flat.dtype, flat.device))
    if param.shape != watched.shapes[index]:
        raise RuntimeError(
            f"{watched.names[index]} has the shape {tuple(param.shape)}, and the engine trains "
            f"{tuple(watched.shapes[index])}: a parameter keeps its shape after "
            "deepspeed.initialize; make a new engine for another one"
        )


@torch.no_grad()
def _move_back(watched: _Watched, moved: Sequence[ParamIndex]) -> None:
    flat, table = watched.group.flat, watched.group.table
    # Some may lie in the places of others.
    memory = flat.untyped_storage().data_ptr()
    for index in moved:
        param = watched.params[index]
        if param.untyped_storage().data_ptr() == memory:
            param.data = param.data.clone()
    for index in moved:
        start = table.offsets[index]
        view = flat[start : start + table.numels[index]].view(watched.shapes[index])
        view.copy_(watched.params[index].data)
        watched.params[index].data = view
