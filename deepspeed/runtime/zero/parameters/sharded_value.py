"""What a state dict has of a sharded parameter."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.utils.logging import warn_once


def tell_saved() -> None:
    """A sharded parameter is being saved."""
    warn_once(
        "saving parameters that are sharded (ZeRO stage 3): what is written has shape (0,) and no "
        "weights. Save whole ones by engine.save_16bit_model(folder), take them from "
        "engine._zero3_consolidated_16bit_state_dict(), or call state_dict() inside `with "
        "deepspeed.zero.GatheredParameters(list(module.parameters()))`, on all ranks; zero_to_fp32 "
        "makes them of what engine.save_checkpoint(folder) has saved"
    )


class ShardedValue(torch.Tensor):
    """`param.detach()` of a sharded parameter: no elements, as the parameter has none. To ask for a
    state dict is no mistake, and clients do it who save otherwise; to save it is, and is told.
    Copies are told of too.
    """

    def data_ptr(self) -> int:
        """As any tensor's; safetensors asks for it, and saves."""
        tell_saved()
        return super().data_ptr()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the tensor of no elements that it is."""
        if not self.numel():  # a sum over it has one
            tell_saved()
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A copy that is like it; torch's way asks for the memory."""
        return self.clone()
