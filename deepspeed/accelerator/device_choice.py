"""Which device a process uses. A launcher either shows every process of a machine all devices, and
the local rank is the device's number; or it shows each process its own only (`srun
--gpus-per-task=1`, a Kubernetes pod per rank), which is then number 0 whatever the local rank.
"""

from __future__ import annotations

from deepspeed.accelerator.real_accelerator import get_accelerator


def select_device(local_rank: int, told_by: str = "LOCAL_RANK") -> int:
    """Make this process's device current, and return its number.

    Raises:
        ValueError: This process sees several devices, but not so many as its rank, of which
            `told_by` tells, needs.
    """
    accelerator = get_accelerator()
    count = accelerator.device_count()
    # The host's count is of processes, as the launcher counts them: no device is missing there.
    if count > 1 and local_rank >= count and accelerator.device_name() != "cpu":
        visible = ", ".join(accelerator.visible_devices_envs())
        raise ValueError(
            f"{told_by}={local_rank}, but this process sees {count} devices (device_count()="
            f"{count}); start no more processes per machine than it has devices, or show each "
            f"process its own device only ({visible})"
        )
    index = local_rank if count > 1 else 0
    accelerator.set_device(index)
    return index
