"""Which accelerator this process uses: chosen by `set_accelerator`, by ``DS_ACCELERATOR``, or by
looking at the machine, which must not initialize a device (a forked worker could not use it). Third
parties register a class under the entry-point group ``deepspeed.accelerators``.
"""

import importlib
import os
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

import torch

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

ACCELERATOR_ENV = "DS_ACCELERATOR"
ENTRY_POINT_GROUP = "deepspeed.accelerators"

# name -> (module, class), in the order in which a machine is searched. The host is always there, so
# what comes after it, the simulated device, is never found but only asked for.
_BUILT_IN: dict[str, tuple[str, str]] = {
    "cuda": ("deepspeed.accelerator.cuda_accelerator", "CUDA_Accelerator"),
    "xpu": ("deepspeed.accelerator.xpu_accelerator", "XPU_Accelerator"),
    "npu": ("deepspeed.accelerator.npu_accelerator", "NPU_Accelerator"),
    "hpu": ("deepspeed.accelerator.hpu_accelerator", "HPU_Accelerator"),
    "mps": ("deepspeed.accelerator.mps_accelerator", "MPS_Accelerator"),
    "cpu": ("deepspeed.accelerator.cpu_accelerator", "CPU_Accelerator"),
    "sim": ("deepspeed.accelerator.sim_accelerator", "Sim_Accelerator"),
}
SUPPORTED_ACCELERATOR_LIST = list(_BUILT_IN)

ds_accelerator: DeepSpeedAccelerator | None = None
# Called when `set_accelerator` has changed it, by what is above accelerators and depends on which
# one there is.
_followers: list[Callable[[], None]] = []


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _validate(accelerator: object, origin: str) -> DeepSpeedAccelerator:
    if not isinstance(accelerator, DeepSpeedAccelerator):
        raise TypeError(
            f"{origin} is {accelerator!r}, which is not a DeepSpeedAccelerator; "
            "derive its class from deepspeed.accelerator.DeepSpeedAccelerator"
        )
    return accelerator


def _make_built_in(name: str) -> DeepSpeedAccelerator:
    module_name, class_name = _BUILT_IN[name]
    # startup: only the accelerator that is used is imported; some of them import vendor packages.
    accelerator_class = getattr(importlib.import_module(module_name), class_name)
    return _validate(accelerator_class(), f"{module_name}.{class_name}")


def _make_plugin(point: EntryPoint) -> DeepSpeedAccelerator:
    return _validate(
        point.load()(), f"entry point {point.name!r} ({point.value}) of group {ENTRY_POINT_GROUP}"
    )


def _from_environment(name: str) -> DeepSpeedAccelerator:
    if name in _BUILT_IN:
        return _make_built_in(name)
    plugins = _plugins()
    if name in plugins:
        return _make_plugin(plugins[name])
    known = [*_BUILT_IN, *plugins]
    raise ValueError(
        f"{ACCELERATOR_ENV}={name} names no accelerator; use one of {known}, unset the variable, "
        f"or install a package that registers {name!r} under the entry-point group "
        f"{ENTRY_POINT_GROUP}"
    )


def _detect() -> DeepSpeedAccelerator:
    # An installed plug-in was installed for a reason: it goes first, but only on machines where it
    # works.
    for point in _plugins().values():
        plugin = _make_plugin(point)
        if plugin.is_available():
            return plugin
    for name in _BUILT_IN:
        accelerator = _make_built_in(name)
        if accelerator.is_available():
            return accelerator
    raise AssertionError(f"no accelerator among {list(_BUILT_IN)} is available, not even the host")


def get_accelerator() -> DeepSpeedAccelerator:
    """The accelerator of this process; chosen at the first call.

    Raises:
        ValueError: ``DS_ACCELERATOR`` names no accelerator.
        TypeError: a plug-in is not a `DeepSpeedAccelerator`.
    """
    global ds_accelerator
    if ds_accelerator is None:
        wanted = os.environ.get(ACCELERATOR_ENV)
        ds_accelerator = _from_environment(wanted) if wanted else _detect()
    return ds_accelerator


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> DeepSpeedAccelerator:
    """Use ``accel_obj`` from now on.

    Raises:
        TypeError: it is not a `DeepSpeedAccelerator`.
    """
    global ds_accelerator
    ds_accelerator = _validate(accel_obj, "set_accelerator's argument")
    for follower in _followers:
        follower()
    return ds_accelerator


def follow_accelerator(follower: Callable[[], None]) -> None:
    """Call `follower` each time that `set_accelerator` has changed the accelerator."""
    _followers.append(follower)


def is_current_accelerator_supported() -> bool:
    """Whether the current accelerator ships with this package or is registered by a plug-in."""
    current = get_accelerator()
    if current._name in _BUILT_IN:
        return True
    return current._name in _plugins()


def runs_ahead(tensor: torch.Tensor) -> bool:
    """Whether the host issues work on `tensor`'s device ahead, so that reading a value waits."""
    current = get_accelerator()
    return not current.resolves_data_dependency() and current.on_accelerator(tensor)
