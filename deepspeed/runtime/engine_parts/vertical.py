"""The vertical schedule of stage 3: all micro-batches of a step go through a unit before the next
one is gathered (GreedySnake, arXiv 2512.17570).

[Note: turns]
Each micro-batch's forward runs in a thread of its own, one at a time. Where one comes to a module
whose parameters are not held yet, it hands over, and goes on when all others have come as far: so
forwards go in *rounds*, of one unit each, and what a round has used stays whole until it is over.
The last micro-batch comes first in every round.

[Note: one backward]
Autograd runs of the nodes that are ready the one with the highest number, and a thread numbers
those that it makes. Each turn begins with a number above those of the turn before, so all forwards
are numbered as if one thread had made them. One backward of all losses then goes through the rounds
from the last one to the first, and in each through micro-batches 0, 1, ...: to `backward_order` a
forward like others, in which each round is a use of its units. Of the nodes of one micro-batch it
takes the one that this micro-batch's backward alone would. So the bits of a gradient do not depend
on the numbers, which only say how long a unit has to stay.

What comes to a parameter is told apart by `units.leaves`. Random numbers are those of each
micro-batch's own generators: what checkpointing puts back when it recomputes is of one micro-batch.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.thread_state import as_in_the_caller
from deepspeed.runtime.activation_checkpointing.random_states import RandomStates
from deepspeed.runtime.module_hooks.parameter_reads import ParameterDict
from deepspeed.runtime.zero.gathering.backward_order import Use
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload, Frame
from deepspeed.runtime.zero.units.leaves import LeafParameters, MicroBatchLeaves
from deepspeed.utils.exceptions import MisuseError

Result = TypeVar("Result")
INSTEAD = "Use engine.backward(loss) and engine.step() for each micro-batch instead"
_next_node = torch.autograd._get_sequence_nr


class _Ended(Exception):
    """The forward of another micro-batch has failed."""


@contextmanager
def leaves_in(model: nn.Module, leaves: MicroBatchLeaves) -> Iterator[None]:
    """Within it, modules hand out leaves as their parameters."""
    found = [(vars(module), module._parameters) for module in model.modules()]
    for own, params in found:
        if isinstance(params, ParameterDict):
            own["_parameters"] = LeafParameters(params, leaves)
    try:
        yield
    finally:
        for own, params in found:
            own["_parameters"] = params


class Turns(Generic[Result]):
    """Runs `forwards`, one of each micro-batch, in turns; see [Note: turns]. `seed` is called first
    in each, with its number, and the caller's random numbers go on as if there had been none; None:
    forwards are seeded otherwise, and the last one's go on.
    """

    def __init__(
        self,
        offload: DeepSpeedZeRoOffload,
        leaves: MicroBatchLeaves,
        forwards: Sequence[Callable[[], Result]],
        seed: Callable[[int], None] | None,
    ) -> None:
        self._offload, self._leaves = offload, leaves
        self._forwards, self._seed = forwards, seed
        count = len(forwards)
        self._results: dict[int, Result] = {}
        self._failure: BaseException | None = None
        # Under the innermost frame of each lies one of no module, so that its outermost module
        # begins and ends no pass.
        self._frames = [([Frame(nn.Module(), None, False)], False) for _ in range(count)]
        self._random = [RandomStates() for _ in range(count)]
        self._running = list(reversed(range(count)))
        self._to_come: deque[int] = deque()
        self._now = -1
        self._round: Use | None = None
        self._number = 0
        self._gates = [threading.Semaphore(0) for _ in range(count)]
        self._are_over = threading.Event()

    def run(self) -> list[Result]:
        """Return what forwards return, or raise what the first has that failed. A backward comes
        next.
        """
        offload, random = self._offload, RandomStates()
        buffers = {n: (own, own._version) for n, own in offload.module.named_buffers()}
        offload.begin_forward()
        handles = [
            module.register_forward_pre_hook(self._before_unit, prepend=True)
            for module in offload.module.modules()
            if offload.gathers_for(module)
        ]
        threads = [self._thread(number) for number in self._running]
        try:
            with leaves_in(offload.module, self._leaves):
                for thread in threads:
                    thread.start()
                self._to_come.extend(self._running)
                self._go_on()
                self._await(threads)
        finally:
            self._leaves.select(0)
            for handle in handles:
                handle.remove()
            offload.backward_order.micro_batch = 0
            offload.backward_order.end()
            offload.param_coordinator.end_forward()
            (self._random[-1] if self._seed is None else random).restore()
        if self._failure is not None:
            raise self._failure
        _refuse_written(buffers, offload.module)
        return [self._results[number] for number in range(len(self._forwards))]

    def _await(self, threads: Sequence[threading.Thread]) -> None:
        while True:
            try:
                self._are_over.wait()
                for thread in threads:
                    thread.join()
                return
            except BaseException as error:  # the user's interrupt: modules are left one by one
                self._failure = self._failure or error

    def _thread(self, number: int) -> threading.Thread:
        accelerator = get_accelerator()
        device, stream = accelerator.current_device(), accelerator.current_stream()
        forward = as_in_the_caller(
            lambda: self._go(number), accelerator.device_name().split(":")[0]
        )

        def run() -> None:
            self._gates[number].acquire()
            accelerator.set_device(device)
            with accelerator.stream(stream):
                forward()

        context = contextvars.copy_context()
        name = f"micro-batch {number}"
        return threading.Thread(target=context.run, args=(run,), name=name, daemon=True)

    def _go(self, number: int) -> None:
        try:
            self._take()
            if self._seed is not None:
                self._seed(number)
            with self._offload.saved.hooks():
                self._results[number] = self._forwards[number]()
        except _Ended:
            pass
        except BaseException as error:
            self._failure = self._failure or error
        self._random[number] = RandomStates()
        frames, _ = self._offload.exchange([], False)
        for frame in frames:  # the last one, unless modules were not left
            self._offload.param_coordinator.leave(frame.units)
        self._running.remove(number)
        self._hand_over()
        # Leaving the caller's autocast forgets the casts of all micro-batches.
        self._are_over.wait()

    # Turns

    def _before_unit(self, module: nn.Module, args: object) -> None:
        if not self._offload.holds_for(module):
            now = self._now
            self._frames[now] = self._offload.exchange([], False)
            self._random[now] = RandomStates()
            self._hand_over()
            self._gates[now].acquire()
            self._take()

    def _take(self) -> None:
        """Go on where the micro-batch was interrupted."""
        self._offload.exchange(*self._frames[self._now])
        self._random[self._now].restore()
        _number_from(self._number)
        self._offload.backward_order.micro_batch = self._now
        self._leaves.select(self._now)
        if self._failure is not None:
            raise _Ended

    def _hand_over(self) -> None:
        self._number = _next_node()
        try:
            if not self._to_come:
                self._begin_round()
        except BaseException as error:
            self._failure = self._failure or error
        self._go_on()

    def _go_on(self) -> None:
        if self._to_come:
            self._now = self._to_come.popleft()
            self._gates[self._now].release()
        else:
            self._are_over.set()

    def _begin_round(self) -> None:
        """End the round before, if there was one, and begin another, if anything is left."""
        order, coordinator = self._offload.backward_order, self._offload.param_coordinator
        self._to_come.extend(self._running)
        if self._round is not None:
            use, self._round = self._round, None
            order.leave_round(use, coordinator.end_round())
        if self._running:
            coordinator.begin_round()
            order.micro_batch = self._running[0]  # the last one in backward
            with torch.enable_grad():
                self._round = order.enter()


def _refuse_written(buffers: dict[str, tuple[torch.Tensor, int]], model: nn.Module) -> None:
    """Raise if forwards have written buffers, which they did in the order of turns."""
    now = dict(model.named_buffers())
    for name, (own, version) in buffers.items():
        if now.get(name) is not own or own._version != version:
            raise MisuseError(
                f"train_batch(): forwards write the buffer {name} (as BatchNorm does), in another "
                f"order than one after the other would. {INSTEAD}"
            )


def _number_from(number: int) -> None:
    """Let the nodes that this thread makes have numbers from here on: by making some."""
    missing = number - _next_node()
    if missing > 0:
        with _disable_current_modes(), torch.enable_grad():
            tensor = torch.zeros(0, requires_grad=True)
            deque(map(tensor.view_as, itertools.repeat(tensor, missing)), maxlen=0)


def refuse_shared_nodes(losses: Sequence[torch.Tensor], model: nn.Module) -> None:
    """Raise if the graphs of two losses meet, as where a module keeps a tensor of one micro-batch
    for later and finds that of another; or where they end at a parameter of the model itself, which
    has not been read as an attribute of its module.
    """
    names: dict[torch.Tensor, str] = {param: name for name, param in model.named_parameters()}
    owners: dict[Any, int] = {}
    for number, loss in enumerate(losses):
        waiting = [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or (owner := owners.get(node)) == number:
                continue
            leaf = getattr(node, "variable", None) if node.name().endswith("Grad") else None
            name = None if leaf is None else names.get(leaf)
            if owner is not None or name is not None:
                what = name or f"a node {node.name()} of its graph"
                raise MisuseError(
                    f"train_batch(): the loss of a micro-batch depends on {what}, which others "
                    "have too: on a tensor that a module, or the script, keeps from one forward to "
                    "another, or on a parameter that is not read as an attribute of its module. "
                    + INSTEAD
                )
            owners[node] = number
            waiting += [following for following, _ in node.next_functions]
