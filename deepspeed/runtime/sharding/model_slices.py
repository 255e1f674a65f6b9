"""What is known of a model that was cut over tensor-parallel ranks: who has which slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.resharding.tensor_parallel import SlicePatterns, slice_of_rank
from deepspeed.comm.shard_ops import gather_shapes
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.sharding.model_ranks import is_model_parallel_parameter

_ATTRIBUTE = "_ds_model_slices"


class ModelSlices:
    """The slices of a model: ranks that share layers (`mpu`), how parameters are sliced, as
    checkpoints say it (`universal_checkpoint_info`), and what it was cut by (`settings`).
    """

    def __init__(
        self, mpu: object, group: dist.Group, info: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        self.mpu, self.info = mpu, info
        self.group, self._settings = group, settings
        self.patterns = SlicePatterns(info)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelSlices:
        """Return itself: the copy of a model is cut in the same way."""
        return self

    def put_on(self, module: nn.Module) -> None:
        setattr(module, _ATTRIBUTE, self)

    def check_same(self, settings: Mapping[str, Any]) -> None:
        """Raise DeepSpeedConfigError, naming the key, if a model is to be cut in another way."""
        for name, value in settings.items():
            if value != self._settings[name]:
                raise DeepSpeedConfigError(
                    f"tensor_parallel.{name}: {value!r}, but the model was cut before with "
                    f"{self._settings[name]!r}; give the same, or a new model"
                )

    @torch.no_grad()
    def whole(
        self, module: nn.Module, state: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Put slices in a state dict together one by one, on all ranks that share layers."""
        for name, param in module.named_parameters(remove_duplicate=False):
            if name in state and is_model_parallel_parameter(param):
                yield name, self.put_together(name, state[name])

    @torch.no_grad()
    def put_together(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """Gather one sliced parameter. All ranks that share layers call it."""
        slices = gather_shapes(own.detach(), self._shapes(name, own.shape), self.group)
        whole: torch.Tensor = self.patterns.merged(name, slices)[keys.PARAM]
        return whole

    def whole_shape(self, name: str, shape: torch.Size) -> torch.Size:
        whole: torch.Tensor = self._outline(name, shape)[keys.PARAM]
        return whole.shape

    def own_slice(self, name: str, whole: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Cut this rank's slice, of this shape, out of a whole parameter; a view where possible."""
        entry = {**self._outline(name, shape), keys.PARAM: whole}
        rank, size = dist.get_rank(group=self.group), dist.get_world_size(group=self.group)
        return slice_of_rank(name, entry, shape, rank, size)

    def _outline(self, name: str, shape: torch.Size) -> dict[str, Any]:
        """Describe a parameter and its slices, without elements."""
        slices = [torch.empty(each, device="meta") for each in self._shapes(name, shape)]
        return self.patterns.merged(name, slices)

    def _shapes(self, name: str, own: torch.Size) -> list[torch.Size]:
        rank, size = dist.get_rank(group=self.group), dist.get_world_size(group=self.group)
        return self.patterns.shapes(name, own, rank, size)


def slices_of(module: nn.Module) -> ModelSlices | None:
    """Return what is known of a model that was cut; None of others."""
    found: ModelSlices | None = getattr(module, _ATTRIBUTE, None)
    return found
