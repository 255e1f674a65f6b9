"""One simulated device: streams, memory, operators and backward, switched on and off together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from deepspeed.accelerator import file_trace
from deepspeed.accelerator.sim.backward import BackwardStreams, StreamOf
from deepspeed.accelerator.sim.dispatch import Operators
from deepspeed.accelerator.sim.host_reads import Patches, patch_host_reads
from deepspeed.accelerator.sim.host_waits import Counting
from deepspeed.accelerator.sim.memory import Allocator
from deepspeed.accelerator.sim.queues import Scheduler, Stream
from deepspeed.accelerator.stream_trace import StreamTracer


class Simulator:
    """What `Sim_Accelerator` speaks for, which has its arguments."""

    def __init__(self, seed: int = 0, schedule: int = 0, backward_streams: int = 0) -> None:
        self.scheduler = Scheduler(seed, schedule)
        self.allocator = Allocator(self.scheduler)
        self.host_waits = Counting(self.scheduler, self.allocator)
        self.scheduler.on_host_wait = self.host_waits.waited
        self.operators = Operators(
            self.scheduler, self.allocator, self.scheduler.complete_all, self.host_waits
        )
        self.backward = BackwardStreams(self.scheduler, seed)
        self.backward.num_side_streams = backward_streams
        self.scheduler.on_switch = self.backward.switched
        self.is_active = False
        self._patches = Patches()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.operators.in_forked_child = True

    def activate(self) -> None:
        """Defer this thread's operators from now on."""
        if self.is_active:
            return
        self.is_active = True
        self.scheduler.activate()
        self.operators.__enter__()
        patch_host_reads(
            self._patches,
            self._host_reads,
            self.allocator.record_stream,
            self.scheduler.threads,
        )
        self.backward.install(self._patches)

    def close(self) -> None:
        """Run everything and let the host compute again."""
        if not self.is_active:
            return
        try:
            self.scheduler.complete_all()
        finally:
            self.is_active = False
            self._patches.undo()
            self.operators.__exit__(None, None, None)
            self.scheduler.deactivate()

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Within it the host computes at once, past the device, after the current stream's work."""
        self.operators.host_access("on_host", [])
        with _disable_current_modes(), self.backward.paused():
            yield

    def _host_reads(self, what: str, tensor: torch.Tensor) -> None:
        # A custom operator's kernel may look at its own arguments while it runs; work behind it
        # must not run then.
        if tensor.device.type == "cpu" and not self.scheduler.is_running:
            self.host_waits.looked(what, tensor)
            self.operators.host_access(what, [tensor])

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[Stream | None]:
        """Within it, work is issued on `stream`; None changes nothing."""
        if stream is None:
            yield None
            return
        with stream, self.backward.marking(stream):
            yield stream

    @contextmanager
    def trace(self, tracer: StreamTracer) -> Iterator[None]:
        """Within it, `tracer` hears of everything; RuntimeError if somebody listens already."""
        if self.scheduler.tracer is not None:
            raise RuntimeError("trace_streams: another tracer is active; leave its context first")
        self.scheduler.tracer = tracer
        try:
            with file_trace.tracing(file_trace.FileTrace(tracer, self.allocator.accesses)):
                yield
        finally:
            self.scheduler.tracer = None

    def backward_on_streams(self, stream_of: StreamOf) -> AbstractContextManager[None]:
        return self.backward.choosing(stream_of)
