"""On which stream a gradient is made, as autograd decides on a device.

[Note: streams of a backward]
A node of the graph runs on the stream that was current when it was made in forward; an accumulation
node on the stream that was current when *it* was made, which is when its parameter was first used,
or earlier if somebody holds it. A node's stream waits for those of its producers; at the end the
caller's stream waits for all streams that accumulated. Hooks run inside of their node.

All of it runs in a thread of its own, as on a device: what a hook asks of its thread, or of locks
that the caller's holds, is answered as there.

Where several nodes hand gradients to one, the engine adds them up as they come, before that one
runs. Here it does so on the stream of the later producer, which waits for the sum so far; whoever
uses the sum waits for the last of them, and no summand's memory is handed out before it was read.

torch numbers nodes in the order in which they are made, so a list of stream switches says where
each one was. Accumulation nodes have no number. One that was held since earlier carries a mark, set
while a side stream is current; otherwise the first node that uses it was made together with it.
"""

from __future__ import annotations

import bisect
import functools
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from deepspeed.accelerator.call_stacks import called_from
from deepspeed.accelerator.sim.host_reads import Patches
from deepspeed.accelerator.sim.queues import Event, Scheduler, Stream
from deepspeed.accelerator.thread_state import KNOWS_SAVED_HOOKS, as_in_the_caller

_MARK = "deepspeed.sim.stream"
StreamOf = Callable[[torch.Tensor], Stream]


class _MarkAccumulation(TorchFunctionMode):
    """Marks accumulation nodes that are made while a side stream is current."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        node = result.grad_fn if isinstance(result, torch.Tensor) and result.requires_grad else None
        for following, _ in node.next_functions if node is not None else ():
            if following is not None and hasattr(following, "variable"):
                metadata: Any = following.metadata  # a dict; declared as a method
                metadata.setdefault(_MARK, self._stream)
        return result


@functools.cache
def _backward_thread() -> tuple[ThreadPoolExecutor, int]:
    """One for all simulated devices of a process, as events of one may be asked for later; its
    identity.
    """
    pool = ThreadPoolExecutor(1, "backward of the simulated device")
    return pool, pool.submit(threading.get_ident).result()


os.register_at_fork(after_in_child=_backward_thread.cache_clear)


class BackwardStreams:
    """Runs every backward on the streams that a device would choose. Accumulation nodes are spread
    over `num_side_streams`, placed by the seed, as a compiled backward may; 0 is autograd's own
    choice.
    """

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self._scheduler = scheduler
        self._random = random.Random(seed)
        self.num_side_streams = 0
        self._side_streams: list[Stream] = []
        self._starts: list[int] = [0]
        self._streams: list[Stream] = [scheduler.default]
        self._chosen: StreamOf | None = None
        self._running = False
        scheduler.threads.add(_backward_thread()[1])

    def install(self, patches: Patches) -> None:
        self.switched(self._scheduler.current)
        patches.replace(torch.autograd, "backward", lambda original: self._entry(original, False))
        patches.replace(torch.autograd, "grad", lambda original: self._entry(original, True))

    def _entry(self, original: Any, captures: bool) -> Any:
        def entry(*args: Any, **kwargs: Any) -> Any:
            roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
            backward = functools.partial(original, *args, **kwargs)
            pool, thread = _backward_thread()
            with self.of(roots, captures):
                if threading.get_ident() == thread or not KNOWS_SAVED_HOOKS:
                    return backward()  # one inside of another, or torch 2.6
                with called_from(thread):
                    return pool.submit(as_in_the_caller(backward)).result()

        return functools.wraps(original)(entry)

    def switched(self, stream: Stream) -> None:
        number = torch.autograd._get_sequence_nr()
        if self._starts[-1] == number:
            self._streams[-1] = stream
        elif self._streams[-1] is not stream:
            self._starts.append(number)
            self._streams.append(stream)

    def marking(self, stream: Stream) -> AbstractContextManager[Any]:
        return nullcontext() if stream is self._scheduler.default else _MarkAccumulation(stream)

    @contextmanager
    def choosing(self, stream_of: StreamOf) -> Iterator[None]:
        outer, self._chosen = self._chosen, stream_of
        try:
            yield
        finally:
            self._chosen = outer

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it, a backward runs where it is called."""
        outer, self._running = self._running, True
        try:
            yield
        finally:
            self._running = outer

    @contextmanager
    def of(self, roots: Any, captures: bool = False) -> Iterator[None]:
        """Run one backward of `roots` within it on its streams; `captures`: gradients are returned,
        whatever node they are at, and not accumulated.
        """
        given = [roots] if isinstance(roots, torch.Tensor) else list(roots)
        plan = None if self._running else self._planned(given, captures)
        if plan is None:
            yield
            return
        self._running = True
        caller = self._scheduler.current
        try:
            with plan:
                yield
        finally:
            self._running = False
            self._scheduler.switch(caller)

    def _planned(self, roots: list[Any], captures: bool) -> _Run | None:
        if (
            self._chosen is None
            and not self.num_side_streams
            and set(self._streams) == {self._scheduler.current}
        ):
            return None
        nodes = _nodes([root.grad_fn for root in roots if isinstance(root, torch.Tensor)])
        streams = {node: self._stream_of(node, nodes) for node in nodes}
        if set(streams.values()) <= {self._scheduler.current}:
            return None
        copies = self._chosen is not None or self.num_side_streams > 0
        return _Run(self._scheduler, roots, nodes, streams, captures, copies)

    def _stream_of(self, node: Any, consumers: dict[Any, list[Any]]) -> Stream:
        variable = getattr(node, "variable", None)
        if variable is None:
            return self._made_under(node._sequence_nr())
        if self._chosen is not None:
            return self._chosen(variable)
        if self.num_side_streams:
            return self._side_stream()
        if _MARK in node.metadata:
            marked: Stream = node.metadata[_MARK]
            return marked
        numbers = [consumer._sequence_nr() for consumer in consumers[node]]
        return self._made_under(min(numbers)) if numbers else self._scheduler.current

    def _made_under(self, number: int) -> Stream:
        return self._streams[bisect.bisect_right(self._starts, number) - 1]

    def _side_stream(self) -> Stream:
        while len(self._side_streams) < self.num_side_streams:
            name = f"backward stream {len(self._side_streams)}"
            self._side_streams.append(self._scheduler.stream_class(name=name))
        return self._side_streams[self._random.randrange(self.num_side_streams)]


class _Run:
    """One backward: hooks on its nodes that switch streams and order them. `nodes` are all of them,
    with those that hand gradients to each.

    With `copies`, accumulation writes memory of its own on its own stream, as it does for a
    gradient that somebody else holds. Otherwise `param.grad` may be what an earlier node made, and
    where it was accumulated makes no difference.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        roots: list[Any],
        nodes: dict[Any, list[Any]],
        streams: dict[Any, Stream],
        captures: bool,
        copies: bool,
    ) -> None:
        self._scheduler = scheduler
        self._roots = roots
        self._producers = nodes
        self._streams = streams
        self._caller = scheduler.current
        # Behind a node's work, and the sums into which the engine put its gradients.
        self._done: dict[Any, Event] = {}
        self._left: Any = None
        self._begun: Event | None = None
        self._captures = captures
        self._copies = copies
        self._finished: list[Stream] = []
        self._is_joining = False
        self._handles = ExitStack()
        self._consumers: dict[Any, list[Any]] = {}

    def __enter__(self) -> None:
        crossing = set()
        for node, producers in self._producers.items():
            used_on = {self._streams[one] for one in (node, *producers)}
            crossing |= set(producers) if len(used_on) > 1 else set()
            for producer in producers:
                self._consumers.setdefault(producer, []).append(node)
        for root in self._roots:
            if isinstance(root, torch.Tensor) and root.grad_fn in self._streams:
                self._lead(root, root.grad_fn)
        for node in self._streams:
            self._handles.callback(node.register_prehook(self._entering(node)).remove)
            if hasattr(node, "variable"):
                self._lead(node.variable, node)
            if node in crossing:
                self._handles.callback(node.register_hook(self._leaving(node)).remove)

    def __exit__(self, *exc: object) -> None:
        self._handles.close()
        self._settle()
        self._join()

    def _join(self) -> None:
        self._scheduler.switch(self._caller)
        while self._finished:
            self._caller.wait_stream(self._finished.pop())

    def _settle(self) -> None:
        """Note that the engine has put the gradients of the node that ran last in their places."""
        if self._left is not None:
            self._done[self._left] = self._streams[self._left].record_event()
        self._left, self._scheduler.is_summing = None, False

    def _mixed(self, node: object) -> bool:
        return len({self._streams[producer] for producer in self._producers[node]}) > 1

    def _entering(self, node: Any) -> Callable[[Any], Any]:
        stream = self._streams[node]
        accumulates = hasattr(node, "variable")

        def enter(grads: Any) -> Any:
            self._arrive(node, grads)
            if (
                (self._captures or accumulates)
                and stream is not self._caller
                and stream not in self._finished
            ):
                self._finished.append(stream)
            if not (accumulates and self._copies) or stream is self._caller:
                return None
            return tuple(grad if grad is None else grad.clone() for grad in grads)

        return enter

    def _arrive(self, node: Any, grads: Any) -> None:
        stream = self._streams[node]
        self._settle()
        if self._begun is None:
            # Behind the gradient of the roots, which is made on the caller's stream.
            self._begun = self._caller.record_event()
        if not self._is_joining:
            # Queued first, so that callbacks queued by hooks find the caller's stream current, and
            # joined.
            self._is_joining = True
            torch.autograd.Variable._execution_engine.queue_callback(self._join)
        self._scheduler.switch(stream)
        self._await_producers(node)
        for grad in grads:
            if grad is not None:
                # As autograd does: its producer's stream reuses the memory as soon as it is freed.
                grad.record_stream(stream)

    def _lead(self, tensor: torch.Tensor, node: object) -> None:
        """Let hooks of a parameter or a root run where its node does: before the node's own."""
        hooks = tensor._backward_hooks
        if hooks:
            handle = tensor.register_hook(lambda grad: self._arrive(node, (grad,)))
            self._handles.callback(handle.remove)
            # They run in the order in which they are in the dictionary; handles find them by key.
            others = [(key, hook) for key, hook in hooks.items() if key != handle.id]
            for key, _ in others:
                del hooks[key]
            hooks.update(others)

    def _await_producers(self, node: object) -> None:
        stream, producers = self._streams[node], self._producers[node]
        if not producers and stream is not self._caller and self._begun is not None:
            stream.wait_event(self._begun)
        for producer in producers:
            if producer in self._done and self._streams[producer] is not stream:
                stream.wait_event(self._done[producer])

    def _leaving(self, node: object) -> Callable[[Any, Any], None]:
        stream = self._streams[node]

        def leave(inputs: object, outputs: object) -> None:
            self._left = node
            for consumer in self._consumers.get(node, ()):
                if self._mixed(consumer):
                    # The engine adds this gradient to those of other streams next, on the stream
                    # that is current now.
                    self._scheduler.is_summing = True
                    for other in self._producers[consumer]:
                        if other in self._done and self._streams[other] is not stream:
                            stream.wait_event(self._done[other])

        return leave


def _nodes(roots: list[Any]) -> dict[Any, list[Any]]:
    """Every node reachable from `roots`, with the nodes that hand gradients to it."""
    producers: dict[Any, list[Any]] = {root: [] for root in roots if root is not None}
    waiting = list(producers)
    while waiting:
        node = waiting.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            if following not in producers:
                producers[following] = []
                waiting.append(following)
            producers[following].append(node)
    return producers
