"""NVIDIA GPUs, and AMD GPUs through ROCm: torch offers both as `torch.cuda`.

Nothing here initializes the driver before the first call that needs a device: a process that has
done so cannot fork workers.
"""

import mmap
import sys
import weakref
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from deepspeed.accelerator.stream_trace import CollectiveTracing, StreamTracer
from deepspeed.accelerator.torch_device_accelerator import TorchDeviceAccelerator

# The first GPUs that compute in float16, and the first on which Triton's compiler works.
FIRST_FP16_CAPABILITY = (5, 3)
FIRST_TRITON_MAJOR = 7
# Bytes that are locked by themselves, at least; cudaHostRegisterPortable.
MIN_LOCKED, LOCK_FOR_ALL_DEVICES = 1 << 16, 1


class CUDA_Accelerator(TorchDeviceAccelerator):
    """`torch.cuda`, on NVIDIA or AMD."""

    _export_envs = ("NCCL",)

    def __init__(self) -> None:
        super().__init__()
        self._name = "cuda"
        # NCCL is not built there.
        self._communication_backend_name = "gloo" if sys.platform == "win32" else "nccl"

    def _is_rocm(self) -> bool:
        return torch.version.hip is not None

    def is_available(self) -> bool:
        """Whether there is a device, by the management library, which leaves the driver alone."""
        if torch.version.cuda is None and not self._is_rocm():
            return False
        return torch.cuda.device_count() > 0

    # -- numeric formats, compilation --------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        return self.is_available() and bool(torch.cuda.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        return self._is_rocm() or (
            self.is_available() and torch.cuda.get_device_capability() >= FIRST_FP16_CAPABILITY
        )

    def supported_dtypes(self) -> list[torch.dtype]:
        if not self.is_available():
            # Asked on a login node: what the kind of device trains in.
            return [torch.float32, torch.float16, torch.bfloat16]
        return super().supported_dtypes()

    def is_triton_supported(self) -> bool:
        if not self.is_available():
            return False
        return self._is_rocm() or torch.cuda.get_device_capability()[0] >= FIRST_TRITON_MAJOR

    # -- streams -----------------------------------------------------------------------------------

    def trace_streams(self, tracer: StreamTracer) -> AbstractContextManager[CollectiveTracing]:
        # startup: only the stream checker needs it.
        from deepspeed.accelerator.cuda_trace import CudaTrace, traced

        return traced(CudaTrace(tracer))

    # -- profiling ---------------------------------------------------------------------------------

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        """Open an NVTX (roctx) range; a domain or category is shown before its name."""
        labels = [label for label in (domain, category) if label is not None]
        return torch.cuda.nvtx.range_push(": ".join([*labels, msg]))

    def range_pop(self, domain: str | None = None) -> Any:
        return torch.cuda.nvtx.range_pop()

    # -- graphs ------------------------------------------------------------------------------------

    def create_graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def capture_to_graph(
        self, graph: Any, pool: Any = None, stream: Any = None
    ) -> AbstractContextManager[Any]:
        return torch.cuda.graph(graph, pool, stream)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def replay_graph(self, graph: Any) -> None:
        graph.replay()

    # -- host memory -------------------------------------------------------------------------------

    def host_empty(self, numel: int, dtype: torch.dtype, pin: bool = False) -> torch.Tensor:
        """torch's allocator rounds up to a power of two, and keeps it: pages are locked here."""
        nbytes = numel * dtype.itemsize
        if not pin or nbytes < MIN_LOCKED or sys.platform == "win32":
            return super().host_empty(numel, dtype, pin)
        pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Who hears of an array's end does so before its pages go.
        memory, runtime = np.frombuffer(pages, np.uint8), torch.cuda.cudart()
        address = memory.ctypes.data
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, nbytes, LOCK_FOR_ALL_DEVICES)))
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
        return torch.from_numpy(memory).view(dtype)

    # -- environment -------------------------------------------------------------------------------

    def visible_devices_envs(self) -> list[str]:
        """CUDA's variable; ROCm reads it too, and its own first."""
        names = ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"]
        return names if self._is_rocm() else names[:1]
