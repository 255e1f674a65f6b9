"""How masters that were updated become the model's parameters on every rank: `Publishing`."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.module_hooks.parameter_arrivals import ParameterArrivals
from deepspeed.runtime.optimizers.settings import ShardSettings
from deepspeed.runtime.sharding.group import ShardedGroup
from deepspeed.runtime.sharding.publisher import Publisher


class Publishing:
    """Rounds the masters of all groups and gathers them.

    Args:
        groups: Whose.
        settings: How.
    """

    def __init__(self, groups: Sequence[ShardedGroup], settings: ShardSettings) -> None:
        self._groups = groups
        self._settings = settings
        self._made: list[Publisher] = []
        self._arrivals: ParameterArrivals | None = None
        model = settings.gather_beside
        if model is not None and not get_accelerator().resolves_data_dependency():
            self._arrivals = ParameterArrivals(model)

    def publishers(self) -> list[Publisher]:
        """Of each group; made late, when the groups have their final buffers."""
        if not self._made:
            self._made = [self._publisher(group) for group in self._groups]
        return self._made

    def _publisher(self, group: ShardedGroup) -> Publisher:
        by_broadcast = not self._settings.allgather_partitions
        return Publisher(group, self._settings.allgather_bucket_size, by_broadcast, self._arrivals)

    def publish(self, delivered: bool = False) -> None:
        """Give every rank all shards; `delivered`: all pieces have been sent already."""
        publishers = self.publishers()
        for publisher in publishers if not delivered else ():
            publisher.publish()
        for publisher in publishers:
            publisher.finish()
        if self._arrivals is not None:
            self._arrivals.hand_over()

    def await_parameters(self) -> None:
        """Let the current stream wait for all parameters, which are about to be written, or read
        without their hearing of it.
        """
        if self._arrivals is not None:
            self._arrivals.settle()

    def destroy(self) -> None:
        """Let go of everything."""
        if self._arrivals is not None:
            self._arrivals.destroy()
        self._made = []
