"""In which order a backward needs units and is done with them: that of its forward, backwards.

[Note: one order on all ranks]
Autograd runs of the nodes that are ready the one that was made last, so a backward goes through its
forward strictly backwards: when a node runs that was made at some place of the forward, whatever
was made behind that place and is used at all has run, and its parameters have their gradients. So
the forward is written down here as the places where modules begin and end, and backward goes
through all of them, from the last one to the first: where a module ends its units are gathered,
where it begins they are let go and, if nothing before it uses them too, their gradients are sent.

How far backward is shows in gradients of modules' inputs and outputs and in saved tensors that are
asked for. These differ between ranks: one that needs nothing of a module has no gradient of it. But
they only say *when* a rank goes through its places. Which places there are depends on the modules
that ran, so all ranks issue the same gathers and reductions in the same order, whichever parameters
have gradients on which of them.

[Note: several forwards]
A backward may come from several forwards, or not from the last one. It takes the later ones first,
so a unit is done with when the forward at hand has no use of it left and none of the earlier ones
that are still to come has one. Those that never come (an evaluation with gradients) hold the
gradients of one backward back until its end.

[Note: recomputation]
Which place a recomputation is at says the number of the node that asks for it. One that runs a
backward of its own (reentrant checkpointing) is written down as a forward, later than all others;
it is over when the outer backward comes to its next place. Of what ran without gradients at first
the outer forward has a use too, for which nothing is gathered and which begins with the node that
recomputes it, made just before. Other recomputation only makes anew what the forward has saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch

from deepspeed.runtime.zero.gathering.coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.gathering.gather_unit import GatherUnit

# Forwards whose backward has not come that are remembered.
MAX_PENDING = 32
_NOT_BEGUN = -1
_ENDING = -2  # outside of autograd's tasks
_next_node = torch.autograd._get_sequence_nr


class Use:
    """A forward of one module: the `units` it used, and those that backward reads (`gathered`)."""

    __slots__ = ("begin", "gathered", "has_graph", "is_open", "micro_batch", "units")

    def __init__(self, begin: int, micro_batch: int) -> None:
        self.begin, self.micro_batch = begin, micro_batch
        self.has_graph = torch.is_grad_enabled()
        self.units: tuple[GatherUnit, ...] = ()
        self.gathered: tuple[GatherUnit, ...] = ()
        self.is_open = False


class Forward:
    """An outermost forward; later ones have higher numbers.

    Attributes:
        places: Uses, each where it begins and once more where it ends.
        nodes: For each place, the number of the first node that autograd makes behind it.
        reached: Backward has gone through the places from this one on.
        left: How many uses of each unit, by micro-batch, it has not gone through.
        task: Autograd's number of the backward, if one has come here.
    """

    __slots__ = ("is_recomputed", "left", "nodes", "number", "places", "reached", "task")

    def __init__(self, number: int, is_recomputed: bool) -> None:
        self.number = number
        self.is_recomputed = is_recomputed
        self.places: list[Use] = []
        self.nodes: list[int] = []
        self.reached = 0
        self.left: Counter[tuple[GatherUnit, int]] = Counter()
        self.task = _NOT_BEGUN


Place = tuple[Forward, int]


class BackwardOrder:
    """The places of forwards, and how far their backward is; `coordinator`, set before the first
    forward, gathers units and lets them go, and `on_done` hears when a backward is done with one
    in a micro-batch: of the one there is, or where forwards take turns (`vertical`), `micro_batch`.
    """

    coordinator: PartitionedParameterCoordinator

    def __init__(self) -> None:
        self.current: Forward | None = None
        self.on_done: Callable[[GatherUnit, int], None] | None = None
        self.micro_batch = 0
        self._forwards: list[Forward] = []  # whose backward may come, or runs
        self._last: Forward | None = None  # that the running backward has come to
        self._count = 0
        self._has_forgotten = False
        self._open: Counter[GatherUnit] = Counter()

    # Forward

    @property
    def here(self) -> Place | None:
        """The place that the running forward is at; None if no backward will come."""
        return None if self.current is None else (self.current, len(self.current.places))

    def begin(self, recomputes: bool) -> None:
        self.current = None
        if not recomputes:
            for forward in self._forwards:
                self._reset(forward)  # a backward that nobody has said the end of
        elif not self._come_to_recomputation():
            return
        if not torch.is_grad_enabled():
            return
        self.current = Forward(self._count, recomputes)
        self._count += 1
        self._forwards.append(self.current)
        if len(self._forwards) > MAX_PENDING:
            del self._forwards[0]
            self._has_forgotten = True

    def end(self) -> None:
        self.current = None

    def enter(self) -> Use | None:
        """Note that a module's forward begins; None if no backward will come."""
        if self.current is None:
            return None
        use = Use(len(self.current.places), self.micro_batch)
        self.current.places.append(use)
        self.current.nodes.append(_next_node() - (not use.has_graph))
        return use

    def leave(self, use: Use, units: Iterable[GatherUnit], gathered: Iterable[GatherUnit]) -> None:
        """Note that it is over, and has used `units`, of which backward reads `gathered`."""
        forward = self.current
        if forward is None:
            return
        use.units, use.gathered = tuple(dict.fromkeys(units)), tuple(dict.fromkeys(gathered))
        forward.places.append(use)
        forward.nodes.append(_next_node())
        for unit in use.units:
            forward.left[unit, use.micro_batch] += 1

    def leave_round(self, use: Use, units: Iterable[GatherUnit]) -> None:
        """Note that several micro-batches have used `units` since `use` began, one after another:
        backward has these whole until it is through all of them.
        """
        if self.current is not None:
            inside = self.current.places[use.begin + 1 :]
            self.leave(use, units, (unit for each in inside for unit in each.gathered))

    def watch(self, place: Place, tensors: Iterable[torch.Tensor]) -> None:
        """Notice that backward has come to `place` by the gradient of any of `tensors`, made
        before it. That of a leaf says nothing: it arrives ahead of nodes that wait.
        """

        def on_gradient(grad: torch.Tensor) -> None:
            self.come_to(place)

        for tensor in tensors:
            tensor.register_hook(on_gradient)

    # Backward

    def come_to(self, place: Place) -> None:
        """Go through what is behind `place`, where the running backward is."""
        forward, index = place
        task = torch._C._current_graph_task_id()
        if task == -1 or (
            forward is self._last and forward.task == task and index >= forward.reached
        ):
            return
        if all(known.task != task for known in self._forwards):
            # Not only the engine calls backward (a penalty on gradients), and ranks must be at the
            # same place when it is over.
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._end_task(task))
        if forward.task != task:
            self._begin(forward, task)
        self._go_to(forward, index)

    def _end_task(self, task: int) -> None:
        for forward in reversed(self._forwards):
            if forward.task == task:
                self._go_to(forward, 0)

    def _come_to_recomputation(self) -> bool:
        """Go to the place of the node that recomputes; return whether a backward of its own
        follows. See [Note: recomputation].
        """
        task = torch._C._current_graph_task_id()
        node = torch._C._current_autograd_node()._sequence_nr()
        for forward in reversed(self._forwards):
            is_pending = forward.task == _NOT_BEGUN and not forward.is_recomputed
            index = len(forward.nodes)
            if forward.task == task or (is_pending and index and forward.nodes[0] <= node):
                while index and forward.nodes[index - 1] > node:
                    index -= 1
                self.come_to((forward, index))
                if index:
                    return not forward.places[index - 1].has_graph
        return True

    def _begin(self, forward: Forward, task: int) -> None:
        self._reset(forward)
        forward.task, forward.reached = task, len(forward.places)
        if forward not in self._forwards:  # a graph that was retained
            self._forwards.append(forward)
            self._forwards.sort(key=lambda known: known.number)

    def _reset(self, forward: Forward) -> None:
        if forward.task == _NOT_BEGUN:
            return
        forward.task = _NOT_BEGUN
        forward.left.clear()
        for index, use in enumerate(forward.places):
            if index != use.begin:
                forward.left.update((unit, use.micro_batch) for unit in use.units)
            if use.is_open:
                use.is_open = False
                self._open.subtract(use.gathered)

    def _go_to(self, forward: Forward, index: int) -> None:
        for later in reversed(self._forwards):
            if later.number > forward.number:
                if later.is_recomputed and later.task == _NOT_BEGUN:
                    self._begin(later, forward.task)
                if later.task != _NOT_BEGUN:
                    self._go_through(later, 0)
        self._last = forward
        self._go_through(forward, index)

    def _go_through(self, forward: Forward, index: int) -> None:
        while forward.reached > index:
            forward.reached -= 1
            use = forward.places[forward.reached]
            if forward.reached == use.begin:
                self._close(forward, use)
            else:
                use.is_open = True
                for unit in use.gathered:
                    self._open[unit] += 1
                for unit in reversed(use.gathered):
                    self.coordinator.use_in_backward(unit)
                self.coordinator.foresee(self._after(forward, use))

    def _after(self, forward: Forward, use: Use) -> Iterator[GatherUnit]:
        """Go through what this backward gathers after the units of `use`."""
        for earlier in reversed(self._forwards):
            if earlier.number <= forward.number and earlier.task == forward.task:
                for index in reversed(range(earlier.reached)):
                    other = earlier.places[index]
                    if index != other.begin:
                        yield from (u for u in reversed(other.gathered) if u not in use.gathered)

    def _close(self, forward: Forward, use: Use) -> None:
        if use.is_open:
            use.is_open = False
            for unit in use.gathered:
                self._open[unit] -= 1
        for unit in use.units:
            forward.left[unit, use.micro_batch] -= 1
            if self.on_done is not None and not self._is_used_before(forward, unit, use):
                self.on_done(unit, use.micro_batch)
        self.coordinator.done_in_backward(
            unit
            for unit in use.units
            if not self._open[unit]
            and not (
                self.coordinator.is_recomputed(unit) and self._is_used_before(forward, unit, use)
            )
        )

    def _is_used_before(self, forward: Forward, unit: GatherUnit, use: Use) -> bool:
        return self._has_forgotten or any(
            earlier.left[unit, use.micro_batch]
            for earlier in self._forwards
            if earlier.number <= forward.number
        )

    def finish(self) -> None:
        """Go through what is left of the forwards of a backward that is over."""
        begun = [forward for forward in self._forwards if forward.task != _NOT_BEGUN]
        if not begun and self._forwards:
            # It has shown in nothing here, but may have on other ranks.
            begun = [self._forwards[-1]]
            self._begin(begun[0], _ENDING)
        for forward in reversed(begun):
            self._go_to(forward, 0)

    def end_backward(self) -> None:
        begun = [forward for forward in self._forwards if forward.task != _NOT_BEGUN]
        for forward in begun:
            self._reset(forward)
        newest = max((f.number for f in begun if not f.is_recomputed), default=-1)
        self._forwards = [
            one for one in self._forwards if one.number > newest and not one.is_recomputed
        ]
        self._last = None
        self._has_forgotten = False
