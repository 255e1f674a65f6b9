"""Which of this machine's devices processes may use, in the launcher's slot numbers.

Owns: reading and writing the accelerator's visibility variables (CUDA_VISIBLE_DEVICES and its
like). Does not own:
filtering slots (`resources`). A slot is the number of a physical device, as in the visibility
variable; where that names devices otherwise (by UUID), it is the position there.
"""

import os


def visible_slots() -> dict[int, str]:
    """Return each usable slot with its name in the visibility variable; none on the CPU."""
    # startup: importing this package must not look for devices
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return {}
    names = _restriction(accelerator.visible_devices_envs())
    count = accelerator.device_count()
    if names is None:
        return {slot: str(slot) for slot in range(count)}
    # A list may name devices that are not there; the runtime ignores those and all behind them.
    names = names[:count]
    if all(name.isdigit() for name in names):
        return {int(name): name for name in names}
    return dict(enumerate(names))


def _restriction(variables: list[str]) -> list[str] | None:
    for variable in variables:
        if os.environ.get(variable):
            return [name.strip() for name in os.environ[variable].split(",")]
    return None


def device_environment(slots: list[int]) -> dict[str, str]:
    """Return variables that show processes the devices `slots` alone; none on the CPU."""
    usable = visible_slots()
    if not usable:
        return {}
    foreign = [slot for slot in slots if slot not in usable]
    if foreign:
        raise ValueError(f"device slots {foreign} are not usable here; usable are {list(usable)}")
    from deepspeed.accelerator import get_accelerator  # startup: see visible_slots

    value = ",".join(usable[slot] for slot in slots)
    return dict.fromkeys(get_accelerator().visible_devices_envs(), value)
