"""The device seam: everything the rest of the package knows about a device goes through
`get_accelerator()`.

    abstract_accelerator             what a device has to offer
    real_accelerator, device_choice  which accelerator, and which device of it, a process uses
    streams, host_streams            what is asked of streams, and those of a device that has
                                     none
    torch_device_accelerator         devices whose torch module is like `torch.cuda`
    cpu_accelerator                  the host
    sim_accelerator, sim             a device without hardware whose streams order work as CUDA's
                                     do
    stream_trace, cuda_trace         what happens on streams, told to a listener
    file_trace                       reads and writes of files, told to it too
    operators                        which memory an operator reads and writes
    host_waits, call_stacks          when the host waits for the device, and where in the code
    thread_state                     what torch knows of a thread, for another one

Of the shape of `torch.cuda` are `cuda_accelerator`, `xpu_accelerator`, `npu_accelerator`,
`hpu_accelerator` and `mps_accelerator`.
"""

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.real_accelerator import (
    get_accelerator,
    is_current_accelerator_supported,
    runs_ahead,
    set_accelerator,
)
from deepspeed.accelerator.streams import Event, Stream

__all__ = [
    "DeepSpeedAccelerator",
    "Event",
    "Stream",
    "get_accelerator",
    "is_current_accelerator_supported",
    "runs_ahead",
    "set_accelerator",
]
