"""`DS_ACCELERATOR=sim`: a device without hardware whose streams order work as CUDA's do. Numbers
are the host's, bit for bit, as long as the program orders its work; else results are wrong in the
same way in each run.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.host_waits import HostWaits
from deepspeed.accelerator.real_accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.sim.backward import StreamOf
from deepspeed.accelerator.sim.queues import Event
from deepspeed.accelerator.sim.simulator import Simulator
from deepspeed.accelerator.stream_trace import StreamTracer

SEED_ENV = "DS_SIM_SEED"
SCHEDULE_ENV = "DS_SIM_SCHEDULE"
BACKWARD_STREAMS_ENV = "DS_SIM_BACKWARD_STREAMS"

NUM_DEVICES = 8

# The schedule under which the host runs ahead as far as it can: nothing is done before something
# waits for it, so every `query` before says no.
RUN_AHEAD = 0
_NAMES = {"run-ahead": str(RUN_AHEAD)}


def _number(given: int | None, name: str) -> int:
    if given is not None:
        return given
    text = os.environ.get(name) or "0"
    text = _NAMES.get(text, text) if name == SCHEDULE_ENV else text
    if not text.isdecimal():
        raise ValueError(
            f"{name}={text!r} is not a number; set it to 0 or a positive integer, or unset it"
        )
    return int(text)


class Sim_Accelerator(CPU_Accelerator):
    """The simulated device. Operators of the thread that makes it are deferred until `close()`.

    Args:
        seed: Chooses what schedules other than 0 do; None is DS_SIM_SEED, or 0.
        schedule: 0 runs everything as late as possible, other numbers are other allowed orders;
            None is DS_SIM_SCHEDULE, or 0.
        backward_streams: How many side streams gradients are accumulated on, as a compiled backward
            may; 0 is autograd's own choice; None is DS_SIM_BACKWARD_STREAMS, or 0.

    Attributes:
        simulator: The device itself.

    Raises:
        ValueError: an environment variable is not a number.
    """

    def __init__(
        self,
        seed: int | None = None,
        schedule: int | None = None,
        backward_streams: int | None = None,
    ) -> None:
        super().__init__()
        self._name = "sim"
        self._communication_backend_name = "gloo"
        self._compile_backend = "aot_eager"
        self.simulator = Simulator(
            _number(seed, SEED_ENV),
            _number(schedule, SCHEDULE_ENV),
            _number(backward_streams, BACKWARD_STREAMS_ENV),
        )
        self.simulator.activate()
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        # After an error other ranks may never start what is still queued here; waiting for them
        # would hide the error.
        if not hasattr(sys, "last_value"):
            self.simulator.close()

    def close(self) -> None:
        self.simulator.close()
        atexit.unregister(self._at_exit)

    def is_synchronized_device(self) -> bool:
        return False

    @property
    def defers_collectives(self) -> bool:
        return True

    def device_count(self) -> int:
        """The number that machines usually have: each process simulates its own."""
        return NUM_DEVICES

    def set_device(self, device_index: int) -> None:
        self.simulator.scheduler.threads.add(threading.get_ident())

    def synchronize(self, device_index: int | None = None) -> None:
        self.simulator.scheduler.on_device_wait()
        self.simulator.scheduler.synchronize()

    # -- streams -----------------------------------------------------------------------------------

    @property
    def Stream(self) -> Any:
        return self.simulator.scheduler.stream_class

    @property
    def Event(self) -> Any:
        return Event

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return self.simulator.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return self.simulator.scheduler.current

    def default_stream(self, device_index: int | None = None) -> Any:
        return self.simulator.scheduler.default

    def on_host(self) -> AbstractContextManager[None]:
        """Within it the host computes at once, untraced, and as fast as without a simulation.
        Entering waits for the current stream only, so use tensors that nobody else uses.
        """
        return self.simulator.on_host()

    def count_host_waits(self) -> AbstractContextManager[HostWaits]:
        return self.simulator.host_waits.count()

    def has_passed(self, event: Any) -> bool:
        return bool(event.has_passed())

    @contextmanager
    def capture_to_graph(
        self, graph: object, pool: object = None, stream: Any = None
    ) -> Iterator[None]:
        """Work is issued as ever; no thread may ask the device anything, or wait for it."""
        self.simulator.scheduler.capturing = threading.get_ident()
        try:
            with self.stream(stream):
                yield
        finally:
            self.simulator.scheduler.capturing = None

    def is_capturing(self) -> bool:
        scheduler = self.simulator.scheduler
        return scheduler.capturing is not None and threading.get_ident() in scheduler.threads

    def name_stream(self, stream: Any, name: str) -> None:
        stream.name = name

    def trace_streams(self, tracer: StreamTracer) -> AbstractContextManager[None]:
        return self.simulator.trace(tracer)

    def backward_on_streams(self, stream_of: StreamOf) -> AbstractContextManager[None]:
        """Within it, gradients are accumulated on `stream_of(parameter)`, where hooks run."""
        return self.simulator.backward_on_streams(stream_of)

    @property
    def backward_streams(self) -> int:
        """How many side streams gradients are accumulated on; 0 is autograd's own choice."""
        return self.simulator.backward.num_side_streams

    @backward_streams.setter
    def backward_streams(self, count: int) -> None:
        self.simulator.backward.num_side_streams = count

    # -- host memory -------------------------------------------------------------------------------

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        """A copy in page-locked memory."""
        return self.simulator.allocator.host.pin(tensor, make_copy)

    def host_empty(self, numel: int, dtype: torch.dtype, pin: bool = False) -> torch.Tensor:
        return self.simulator.allocator.host.empty(numel, dtype, pin)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.simulator.allocator.host.copy(tensor)

    def as_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.simulator.allocator.host.own(tensor, is_mapped=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        host = self.simulator.allocator.host
        return host.owns(tensor) and not host.owns(tensor, unlocked=True)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return not self.simulator.allocator.host.owns(tensor)

    # -- memory ------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        self.simulator.allocator.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self.simulator.allocator.allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self.simulator.allocator.max_allocated

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self.simulator.allocator.reserved

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self.simulator.allocator.max_reserved

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        memory = self.simulator.allocator
        return {
            "allocated_bytes.all.current": memory.allocated,
            "allocated_bytes.all.peak": memory.max_allocated,
            "reserved_bytes.all.current": memory.reserved,
            "reserved_bytes.all.peak": memory.max_reserved,
        }

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        memory = self.simulator.allocator
        memory.max_allocated, memory.max_reserved = memory.allocated, memory.reserved


def simulated_device(needed_by: str) -> Sim_Accelerator:
    """This process's accelerator, which must be the simulated device, for whoever `needed_by`
    names.

    Raises:
        RuntimeError: It is another.
    """
    accelerator = get_accelerator()
    if not isinstance(accelerator, Sim_Accelerator):
        raise RuntimeError(
            f"{needed_by}: {accelerator.device_name()} is not simulated; set DS_ACCELERATOR=sim"
        )
    return accelerator


@contextmanager
def simulate(
    seed: int = 0, schedule: int = 0, backward_streams: int = 0
) -> Iterator[Sim_Accelerator]:
    """A simulated device as this process's accelerator; arguments as those of `Sim_Accelerator`."""
    before = get_accelerator()
    outer = (
        before.simulator
        if isinstance(before, Sim_Accelerator) and before.simulator.is_active
        else None
    )
    if outer is not None:
        outer.close()  # operators go to one device at a time
    accelerator = Sim_Accelerator(seed, schedule, backward_streams)
    set_accelerator(accelerator)
    try:
        yield accelerator
    except BaseException:
        # What is left in the queues may need ranks that have failed too; the error is what matters.
        with suppress(RuntimeError):
            accelerator.close()
        raise
    finally:
        try:
            accelerator.close()
        finally:
            set_accelerator(before)
            if outer is not None:
                outer.activate()
