"""Huawei Ascend through the extension `torch_npu`, which adds `torch.npu`."""

from typing import Any

from deepspeed.accelerator.torch_device_accelerator import TorchDeviceAccelerator, vendor_module


class NPU_Accelerator(TorchDeviceAccelerator):
    """`torch.npu`."""

    _export_envs = ("ASCEND", "HCCL", "LD_LIBRARY", "PATH")
    _visible_devices_envs = ("ASCEND_RT_VISIBLE_DEVICES",)

    def __init__(self) -> None:
        super().__init__()
        self._name = "npu"
        self._communication_backend_name = "hccl"

    @property
    def _module(self) -> Any:
        if vendor_module("torch_npu") is None:
            raise RuntimeError(
                "the npu accelerator needs the package torch_npu, which is not installed"
            )
        return super()._module

    def is_available(self) -> bool:
        return vendor_module("torch_npu") is not None and bool(self._module.is_available())
