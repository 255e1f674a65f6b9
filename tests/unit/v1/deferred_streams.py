"""CUDA's stream order on the host: work on a side stream is late, a missing wait gives NaN.

On a side stream of `DeferredAccelerator` an operator returns at once with NaN in its result
(in-place operators: with the old content) and runs when something forces it: a wait, an event, a
synchronize, a collective, a read by the host. That is the latest moment that a device could run it,
so code that relies on luck fails here each time. `backward_on_streams` makes a backward do what
autograd does on a device. Only names that upstream has too are used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# startup: torch.optim imports it at its first use; here every forked rank has it already.
import torch._dynamo
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator


class DeferredStream:
    """A first-in first-out queue of operators; `eager` runs them at once, as the default stream."""

    def __init__(self, sim: DeferredAccelerator, name: str, eager: bool = False) -> None:
        self.sim = sim
        self.name = name
        self.eager = eager
        self._queue: deque[Callable[[], Any]] = deque()
        self._issued = 0
        self._done = 0

    def __repr__(self) -> str:
        return f"<stream {self.name}>"

    def issue(self, work: Callable[[], Any]) -> None:
        """Put `work` behind everything issued so far."""
        if self.eager:
            work()
            return
        self._issued += 1
        self._queue.append(work)

    @property
    def position(self) -> int:
        return self._issued

    def drain(self, position: int | None = None) -> None:
        """Run what was issued up to `position` (everything if None)."""
        end = self._issued if position is None else position
        with _disable_current_modes(), torch.no_grad():
            while self._done < end:
                self._done += 1
                self._queue.popleft()()

    # The interface of a device's stream

    def wait_stream(self, stream: DeferredStream) -> None:
        """Work issued here from now on runs after the work issued on `stream` so far."""
        self.sim.waits.append((self, stream))
        self._wait_for(stream, stream.position)

    def _wait_for(self, stream: DeferredStream, position: int) -> None:
        if stream is not self:
            self.issue(lambda: stream.drain(position))

    def wait_event(self, event: DeferredEvent) -> None:
        """The same for the work that `event` was recorded after."""
        if event.stream is not None:
            self._wait_for(event.stream, event.position)

    def record_event(self, event: DeferredEvent | None = None) -> DeferredEvent:
        """Record `event` (a new one if None) here."""
        event = event or DeferredEvent(self.sim)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.drain()

    def query(self) -> bool:
        return not self._queue

    def __enter__(self) -> DeferredStream:
        self._outer = self.sim.current
        self.sim.current = self
        return self

    def __exit__(self, *exc: object) -> None:
        self.sim.current = self._outer


class DeferredEvent:
    """A position in a stream."""

    def __init__(self, sim: DeferredAccelerator) -> None:
        self.sim = sim
        self.stream: DeferredStream | None = None
        self.position = 0

    def record(self, stream: DeferredStream | None = None) -> None:
        """Take the present position of `stream` (the current one if None)."""
        self.stream = stream or self.sim.current
        self.position = self.stream.position

    def wait(self, stream: DeferredStream | None = None) -> None:
        """Let `stream` (the current one if None) wait for this event."""
        (stream or self.sim.current).wait_event(self)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.drain(self.position)

    def query(self) -> bool:
        return self.stream is None or self.stream._done >= self.position

    def elapsed_time(self, end_event: DeferredEvent) -> float:
        """Nothing here takes time."""
        return 0.0


class DeferredAccelerator(CPU_Accelerator):
    """The host with side streams that run late.

    Attributes:
        default: The default stream; it runs work at once.
        waits: Every `(waiter, waited for)` of `wait_stream`, in order.
        collectives: `(operation, stream, numel)` of every collective, in order, in `deferring`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._streams: list[DeferredStream] = []
        self.default = DeferredStream(self, "default", eager=True)
        self.current = self.default
        self.waits: list[tuple[DeferredStream, DeferredStream]] = []
        self.collectives: list[tuple[str, DeferredStream, int]] = []

    def make_stream(self, *args: Any, name: str = "side", **kwargs: Any) -> DeferredStream:
        """A new side stream; a device's arguments (device, priority) mean nothing here."""
        self._streams.append(DeferredStream(self, f"{name}{len(self._streams)}"))
        return self._streams[-1]

    def is_synchronized_device(self) -> bool:
        return False

    def resolves_data_dependency(self) -> bool:
        return False

    def use_host_timers(self) -> bool:
        return True

    @property
    def Stream(self) -> Any:
        return self.make_stream

    @property
    def Event(self) -> Any:
        return lambda *args, **kwargs: DeferredEvent(self)

    @contextmanager
    def stream(self, stream: DeferredStream | None) -> Iterator[None]:
        outer = self.current
        self.current = stream or outer
        try:
            yield
        finally:
            self.current = outer

    def current_stream(self, device_index: int | None = None) -> Any:
        return self.current

    def default_stream(self, device_index: int | None = None) -> Any:
        return self.default

    def synchronize(self, device_index: int | None = None) -> None:
        for stream in self._streams:
            stream.drain()

    @contextmanager
    def deferring(self, monkeypatch: Any) -> Iterator[None]:
        """Be the process's accelerator, and see every operator."""
        set_accelerator(self)
        # A device's tensor can be told of a foreign stream; it changes when memory is reused, and
        # here none is while referenced.
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        with _Operators(self):
            yield
        self.synchronize()


class _Operators(TorchDispatchMode):
    """Sends every operator to the current stream."""

    def __init__(self, sim: DeferredAccelerator) -> None:
        super().__init__()
        self._sim = sim

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stream = self._sim.current
        if func.namespace == "c10d":
            numel = sum(tensor.numel() for tensor in _tensors(args[:1]))
            self._sim.collectives.append((func.name(), stream, numel))
            stream.drain()
            return func(*args, **kwargs)
        if stream.eager or _is_view(func) or "empty" in func.name():
            return func(*args, **kwargs)
        # A kernel keeps the addresses it was launched with, also if `tensor.data` is given other
        # memory meanwhile.
        then, then_named = _aliases((args, kwargs))
        written = _written(func, args, kwargs)
        if written is not None:
            stream.issue(lambda: func(*then, **then_named))
            return written[0] if len(func._schema.returns) == 1 else None
        if not _returns_tensors(func):
            stream.drain()
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        late = _tensors(_aliases(result))
        for tensor in late:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        stream.issue(lambda: _rerun(func, then, then_named, late))
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _aliases(tree: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.Tensor.detach, tree)


def _rerun(func: Any, args: Any, kwargs: Any, into: list[torch.Tensor]) -> None:
    for tensor, result in zip(into, _tensors(func(*args, **kwargs)), strict=True):
        tensor.copy_(result)


def _is_view(func: Any) -> bool:
    aliases = [result.alias_info for result in func._schema.returns[:1]]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _returns_tensors(func: Any) -> bool:
    return bool(func._schema.returns) and "Tensor" in str(func._schema.returns[0].type)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any] | None:
    """The arguments that `func` writes; None if it writes none."""
    names = func._schema.arguments
    given = {argument.name: value for argument, value in zip(names, args, strict=False)} | kwargs
    writes = [a.name for a in names if a.alias_info is not None and a.alias_info.is_write]
    return [given[name] for name in writes if name in given] or None


@contextmanager
def backward_on_streams(
    sim: DeferredAccelerator,
    loss: torch.Tensor,
    stream_of: Callable[[torch.Tensor], DeferredStream],
) -> Iterator[None]:
    """Within it, one backward of `loss`, or of something computed from it, runs as on a device.

    Every node runs on a stream of its own choice, a gradient hook finds the stream of its
    accumulation node (`stream_of`) current, and at the end the caller's stream waits for all.
    """
    caller = sim.current
    producers: list[DeferredStream] = []
    handles = []

    def join() -> None:
        sim.current = caller
        for stream in producers:
            caller.wait_stream(stream)

    def entering(stream: DeferredStream) -> Callable[[Any], Any]:
        def enter(grads: Any) -> Any:
            if not producers:
                producers.append(caller)
                torch.autograd.Variable._execution_engine.queue_callback(join)
            sim.current = stream
            if stream is caller:
                return None
            if stream not in producers:
                producers.append(stream)
            stream.wait_stream(caller)
            return tuple(grad if grad is None else grad.clone() for grad in grads)

        return enter

    for node in _nodes(loss.grad_fn):
        variable = getattr(node, "variable", None)
        stream = caller if variable is None else stream_of(variable)
        handles.append(node.register_prehook(entering(stream)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        sim.current = caller


def _nodes(root: Any) -> list[Any]:
    seen: dict[int, Any] = {}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is not None and id(node) not in seen:
            seen[id(node)] = node
            waiting += [following for following, _ in node.next_functions]
    return list(seen.values())
