"""What NCCL refuses, or would send otherwise than the host backend that stands for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as torch_dist

from deepspeed.comm.watch.observation import CollectiveCall

_NUMBERS = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
# torch splits complex numbers in two real ones, and sends 8-bit floats as bytes.
_SUMMED = (*_NUMBERS, torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SENT = (*_SUMMED, *(kind for name, kind in vars(torch).items() if name.startswith("float8_")))
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_BITWISE = (torch_dist.ReduceOp.BAND, torch_dist.ReduceOp.BOR, torch_dist.ReduceOp.BXOR)
# torch packs such a list into one piece of memory, and takes it apart, by copies.
_PACKED = {"all_gather": "tensor_list", "reduce_scatter": "input_list"}


def refusal(call: CollectiveCall, is_hosts: Callable[[torch.Tensor], bool]) -> str | None:
    """Say what of an operation NCCL would refuse or get wrong, and what to do; None if nothing.
    `is_hosts` tells which memory is not the device's.
    """
    op = call.argument("op")
    if op is not None and op in _BITWISE:
        return "NCCL has no bitwise reduction: reduce 0 and 1 by MAX or MIN"
    packed = call.argument(_PACKED.get(call.name, ""))
    for tensor in (*call.reads, *call.writes):
        what = f"a tensor of shape {tuple(tensor.shape)} "
        if is_hosts(tensor):
            return f"{what}is in host memory, which NCCL refuses: copy it to the device first"
        if tensor.dtype not in (*(_SENT if op is None else _SUMMED), *_COMPLEX):
            return f"{what}is {tensor.dtype}, which NCCL does not take: use another dtype"
        if not _is_contiguous(tensor) and not any(tensor is one for one in packed or ()):
            return (
                f"{what}and strides {tensor.stride()} is not contiguous, which NCCL refuses, or "
                "sends as it lies in memory: pass tensor.contiguous()"
            )
    return None


def _is_contiguous(tensor: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.is_contiguous() or (
        tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])
    )
