"""Whole parameters of layers that are cut, for scripts that read them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from deepspeed.runtime.sharding.model_ranks import is_model_parallel_parameter
from deepspeed.runtime.sharding.model_slices import slices_of
from deepspeed.runtime.zero.gathering.gathered_parameters import hold_whole, let_go


class GatherReplacedLayerParams:
    """A `with` block in which `param.data` is the whole parameter, for reading, put together from
    the slices of all ranks that share the layer; they enter it with the same parameters, of the
    whole `module`. ValueError for a cut parameter that is not of `module`, or was changed inside.
    """

    def __init__(
        self, params: Iterable[torch.Tensor] | torch.Tensor, module: nn.Module, enabled: bool = True
    ) -> None:
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        self._slices = slices_of(module)
        self._params: dict[str, nn.Parameter] = {}
        self._own: dict[str, torch.Tensor] = {}
        wanted = {param for param in given if enabled and is_model_parallel_parameter(param)}
        if self._slices is not None:
            self._params = {name: one for name, one in module.named_parameters() if one in wanted}
        if len(self._params) != len(wanted):
            raise ValueError(
                f"GatherReplacedLayerParams: {len(wanted) - len(self._params)} of the parameters "
                "are cut and not among those of the module; give the whole model, such as "
                "engine.module"
            )

    @torch.no_grad()
    def __enter__(self) -> None:
        if self._slices is None:
            return
        hold_whole(self._params.values())
        self._own = {name: param.data for name, param in self._params.items()}
        for name, param in self._params.items():
            param.data = self._slices.put_together(name, param.data)

    @torch.no_grad()
    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._slices is None:
            return
        changed = []
        for name, param in self._params.items():
            own = self._own[name]
            seen = self._slices.own_slice(name, param.data, own.shape)
            if not torch.equal(*(part.contiguous().view(torch.uint8) for part in (own, seen))):
                changed.append(name)
            param.data = own
        self._own = {}
        let_go(self._params.values())
        if changed and kind is None:
            raise ValueError(
                f"GatherReplacedLayerParams: {', '.join(changed)} changed inside the block, which "
                "is for reading; load weights before the model is cut, or by "
                "engine.load_checkpoint"
            )
