"""Intel GPUs through `torch.xpu`."""

import torch

from deepspeed.accelerator import streams
from deepspeed.accelerator.torch_device_accelerator import TorchDeviceAccelerator


class XPU_Accelerator(TorchDeviceAccelerator):
    """`torch.xpu`."""

    _export_envs = ("CCL", "ONEAPI", "SYCL", "ZE")
    _visible_devices_envs = ("ZE_AFFINITY_MASK",)

    def __init__(self) -> None:
        super().__init__()
        self._name = "xpu"
        self._communication_backend_name = "xccl"

    def default_stream(self, device_index: int | None = None) -> streams.Stream:
        """The stream that is current: torch.xpu does not name its default stream."""
        return self.current_stream(device_index)

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.xpu.default_generators[device_index]

    def is_triton_supported(self) -> bool:
        return self.is_available()
