"""The weights of stage 3 that leave the device between passes and come back (`offload_states`,
`reload_states`): those of an engine without an optimizer, and of one that has an optimizer beside
its state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from deepspeed.runtime.zero.movable_states import HostPieces, Movable
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload


def let_leave(offload: DeepSpeedZeRoOffload) -> None:
    """Shards are about to leave: nothing stays gathered, and nothing is until `have_back`.

    Raises:
        RuntimeError: Parameters are whole in a running forward or by `GatheredParameters`.
    """
    offload.refuse_holders("offload_states()")
    offload.before_update()
    for unit in (*offload.units, *offload.persistent_units):
        unit.put_away()
    offload.resources.let_go()
    offload.resources.are_away = True


def have_back(offload: DeepSpeedZeRoOffload) -> None:
    """Shards were written by what has been issued on the current stream. All ranks call it."""
    offload.resources.are_away = False
    offload.resources.mark_updated()
    offload.gather_persistent()


def weights_of(offload: DeepSpeedZeRoOffload) -> Iterator[torch.Tensor]:
    """All tensors that lie in the memory of units' shards."""
    for unit in (*offload.units, *offload.persistent_units):
        yield unit.shard
        yield from (record.shard for record in unit.records)


class MovableWeights(Movable):
    """The weights of an engine without an optimizer, which are all that it has.

    Args:
        offload: Gathers them.
    """

    kinds = (OffloadStateTypeEnum.lp_params,)

    def __init__(self, offload: DeepSpeedZeRoOffload) -> None:
        self._away = HostPieces()
        self._offload = offload

    def _leave(self, kinds: Iterable[OffloadStateTypeEnum]) -> None:
        if OffloadStateTypeEnum.lp_params in kinds:
            let_leave(self._offload)

    def _come_back(self, kinds: Iterable[OffloadStateTypeEnum]) -> None:
        have_back(self._offload)

    def state_tensors(self, kind: OffloadStateTypeEnum) -> list[torch.Tensor]:
        return list(weights_of(self._offload)) if kind in self.kinds else []
