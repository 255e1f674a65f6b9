"""Intel Gaudi through the extension `habana_frameworks`; ``torch.hpu`` follows `torch.cuda`."""

from collections.abc import Callable
from typing import Any

from deepspeed.accelerator.torch_device_accelerator import TorchDeviceAccelerator, vendor_module

HPU_MODULE = "habana_frameworks.torch.hpu"


class HPU_Accelerator(TorchDeviceAccelerator):
    """``habana_frameworks.torch.hpu``."""

    _export_envs = ("HABANA", "HCCL", "LD_LIBRARY", "PATH", "PT_")
    _visible_devices_envs = ("HABANA_VISIBLE_MODULES",)

    def __init__(self) -> None:
        super().__init__()
        self._name = "hpu"
        self._communication_backend_name = "hccl"
        self._compile_backend = "hpu_backend"

    @property
    def _module(self) -> Any:
        module = vendor_module(HPU_MODULE)
        if module is None:
            raise RuntimeError(f"the hpu accelerator needs {HPU_MODULE}, which is not installed")
        return module

    def is_available(self) -> bool:
        return vendor_module(HPU_MODULE) is not None and bool(self._module.is_available())

    def device_name(self, device_index: int | None = None) -> str:
        """``hpu``: a process has one device, and torch knows it by its kind only."""
        return "hpu"

    def set_device(self, device_index: int) -> None:
        """A process has one device and it is current."""

    def current_device_name(self) -> str:
        return "hpu"

    def synchronize(self, device_index: int | None = None) -> None:
        self._module.synchronize()

    def resolves_data_dependency(self) -> bool:
        """True: the graph compiler orders operations by the data they touch."""
        return True

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback()
