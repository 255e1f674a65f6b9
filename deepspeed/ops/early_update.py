"""Updates that begin before their factor is known: `SpeculativeUpdate`.

The factor of a step's gradients follows from the norm of all of them, for which the update of the
first waits. Without clipping it is always the same: with that one, slices whose gradients are final
are updated while backward goes on, into memory beside masters and state, which stay what they are.
If the step then comes to the same update to the bit, the two memories change places. Otherwise what
was made is forgotten, and the step goes as it always does. Nothing is ever undone, so nothing can
come back other than it was; and until then whoever looks sees what no speculation would show.

Of state in files the memory beside is files, and a slice is a window of them.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.ops import state_files
from deepspeed.ops.host_optimizer import FlatUpdate, HostOptimizer, Ranges, Taken

# Elements of one task: the step waits for the one that is running.
TASK_NUMEL = 1 << 21
# Steps without speculation after as many misses as it takes to get there, each doubling the pause.
MAX_PAUSE = 63

_use_count: Callable[[Any], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    """What is another after a write that torch counts, or with other memory."""
    return tensor.untyped_storage()._cdata, tensor._version


def _bits(scalars: Sequence[float]) -> bytes:
    return struct.pack(f"{len(scalars)}d", *scalars)


def _is_shared(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether there are more tensors on their memory, views that a script keeps, or may be."""
    storages = [torch.empty(1).untyped_storage(), tensors[0].untyped_storage()]
    if _use_count is None:
        return True
    alone, here = (_use_count(storage._cdata) for storage in storages)
    return here - alone != len(tensors)


def _gaps(ranges: Ranges, end: int) -> Ranges:
    """What ascending `ranges` leave of 0 to `end`."""
    starts, ends = [first for first, _ in ranges], [last for _, last in ranges]
    pairs = zip([0, *ends], [*starts, end], strict=True)
    return [(first, last) for first, last in pairs if first < last]


def _windows(start: int, end: int) -> Iterator[tuple[int, int]]:
    """The windows that elements `start` to `end` lie in: the number, and how many in it."""
    size = state_files.WINDOW_NUMEL
    for number in range(start // size, -(-end // size)) if start < end else ():
        yield number, min(end, (number + 1) * size) - max(start, number * size)


class _Begun:
    """The update of one parameter, made of `update` into `made`, of memory beside. In files `ready`
    are the windows that all of `filled` have come in, elements that there are gradients of.
    """

    def __init__(self, update: FlatUpdate, made: FlatUpdate, filled: Ranges | None) -> None:
        self.update = update
        self.made = made
        self.grad_mark = _mark(update.grad)
        self.done: Ranges = []
        self.filled = filled
        self.ready: deque[int] = deque()
        self._missing: Counter[int] = Counter()
        for start, end in filled or ():
            self._missing.update(dict(_windows(start, end)))
        self._marks = self._marks_now()

    def is_that(self, wanted: FlatUpdate) -> bool:
        """Whether `wanted` would make the same, to the bit."""
        own = self.update
        pairs = zip((wanted.grad, *wanted.states), (own.grad, *own.states), strict=True)
        return (
            all(a is b for a, b in pairs)
            and wanted.param.data_ptr() == own.param.data_ptr()
            and [*self._marks, self.grad_mark] == [*self._marks_now(), _mark(own.grad)]
            and _bits(wanted.scalars) == _bits(own.scalars)
        )

    def came(self, start: int, end: int) -> None:
        """Hear that these elements of the gradient are final; some of them may be padding."""
        for first, last in self.filled or ():
            for number, count in _windows(max(start, first), min(end, last)):
                self._missing[number] -= count
                if not self._missing[number]:
                    self.ready.append(number)

    def _marks_now(self) -> list[tuple[int, int]]:
        return [_mark(tensor) for tensor in (self.update.param, *self.update.states)]


class SpeculativeUpdate:
    """Updates slices of flat parameters of an optimizer on the host, ahead of its step.

    It goes on from window to window, of which `clear` is the end. After a miss, windows pass
    without it: one, three, seven and so on up to `MAX_PAUSE`, until there is a hit again.

    Args:
        optimizer: Whose parameters are updated.
        aliases: For each parameter, the first of each group, another tensor on all its memory.
        filled: Of each, elements that there are gradients of: not padding, in ascending order.

    Attributes:
        predict: The factor of the next step's gradients if they are not clipped.
        hits, misses: Windows whose update was that of their step, and others.
    """

    def __init__(
        self,
        optimizer: HostOptimizer,
        aliases: Sequence[torch.Tensor],
        filled: Sequence[Ranges],
    ) -> None:
        self._optimizer = optimizer
        firsts = [group["params"][0] for group in optimizer.param_groups]
        self._aliases = dict(zip(firsts, aliases, strict=True))
        self._filled = dict(zip(firsts, filled, strict=True))
        self.predict: Callable[[], float] = lambda: 1.0
        self.hits = self.misses = 0
        self._begun: dict[torch.Tensor, _Begun] = {}
        self._memory: dict[torch.Tensor, list[torch.Tensor]] = {}
        self._is_over = False  # whether nothing more begins in this window
        self._is_missed = False  # whether something of this window's was in vain
        self._is_used = False
        self._is_halting = False
        self._error: OSError | None = None  # of the disk, which the next step has to raise
        self._paused = self._passed = 0
        self._pool: ThreadPoolExecutor | None = None
        self._tasks: list[Future[None]] = []

    # While gradients come

    def landing(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Hear that something is about to be added to the gradient."""
        begun = self._begun.get(param)
        if begun is not None and (begun.update.grad is not grad or begun.grad_mark != _mark(grad)):
            self.forget()

    def landed(self, param: torch.Tensor, grad: torch.Tensor, final: Ranges) -> None:
        """Hear that it was added, and which of the gradient is `final` with that."""
        begun = self._begun.get(param)
        if begun is None and final:
            begun = self._begin(param, grad)
        if begun is None:
            return
        begun.grad_mark = _mark(grad)
        for start, end in final:
            if begun.filled is not None:
                begun.came(start, end)
                continue
            for first in range(start, end, TASK_NUMEL):
                self._submit(self._run, begun, first, min(first + TASK_NUMEL, end))
        if begun.ready:
            self._submit(self._run_windows, begun)

    def _begin(self, param: torch.Tensor, grad: torch.Tensor) -> _Begun | None:
        if self._is_over or param not in self._aliases:
            return None
        if self._passed < self._paused:
            self._is_over, self._passed = True, self._passed + 1
            return None
        update = self._optimizer.foreseen(param, grad, self.predict())
        if update is None:
            return None
        in_files = self._optimizer.lies_in_file(param)
        try:
            made, *states = self._memory_like(param, [update.param, *update.states])
        except OSError as error:
            self._error, self._is_over = error, True
            return None
        beside = update._replace(param=made, states=states)
        begun = _Begun(update, beside, self._filled[param] if in_files else None)
        self._begun[param] = begun
        return begun

    def _memory_like(
        self, param: torch.Tensor, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        kinds = [(one.shape, one.dtype) for one in tensors]
        memory = self._memory.get(param, [])
        if [(one.shape, one.dtype) for one in memory] != kinds:
            files = self._optimizer.state_files if self._optimizer.lies_in_file(param) else None
            make = get_accelerator().host_empty if files is None else files.zeros
            memory = [make(one.numel(), one.dtype).view(one.shape) for one in tensors]
            self._memory[param] = memory
        return memory

    def _submit(self, run: Callable[..., None], *args: Any) -> None:
        # The host of a simulated device is one thread: what another did there would not be seen.
        if get_accelerator().defers_collectives:
            run(*args)
            return
        self._pool = self._pool or ThreadPoolExecutor(1, "speculative update")
        self._tasks.append(self._pool.submit(run, *args))

    @torch.no_grad()
    def _run(self, begun: _Begun, start: int, end: int) -> None:
        self._optimizer.run_apart(
            begun.update.piece(start, end, None), begun.made.piece(start, end, None)
        )
        begun.done.append((start, end))

    @torch.no_grad()
    def _run_windows(self, begun: _Begun) -> None:
        """Update the windows that are ready when their turn comes."""
        numbers: list[int] = []

        def coming() -> Iterator[int]:
            while begun.ready and not self._is_halting:
                numbers.append(begun.ready.popleft())
                yield numbers[-1]

        try:
            self._optimizer.run_windows_apart(begun.update, begun.made, coming())
        except OSError as error:
            self._error = error
            return
        # Not before all is written.
        size, numel = state_files.WINDOW_NUMEL, begun.update.param.numel()
        begun.done += [(one * size, min((one + 1) * size, numel)) for one in numbers]

    def _halt(self) -> None:
        """Return when no task runs any more; what one of them has failed of, the step will meet."""
        self._is_halting = True
        for task in self._tasks:
            if not task.cancel():
                task.exception()
        self._tasks, self._is_halting = [], False

    def forget(self) -> None:
        """Go without for the rest of the window: a gradient that was final changes."""
        self._halt()
        self._is_missed = self._is_missed or bool(self._begun)
        self._begun, self._is_over = {}, True

    def lent(self) -> None:
        """Hear that a script is given masters, state or gradients themselves: it may write to them
        as torch does not count (`.data`).
        """
        if self._begun:
            self.forget()

    # In the step

    def take(self, param: torch.Tensor, update: FlatUpdate) -> Taken | None:
        """Let what is made be the parameter and its state, if the step would make the same; return
        that, and what is left to do. None: everything is.

        Raises:
            OSError: an update ahead has met it; what there is is that of before.
        """
        begun = self._begun.pop(param, None)
        self._halt()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if begun is None:
            return None
        if not begun.is_that(update):
            self._is_missed = True
            return None
        done = sorted(begun.done)
        left = _gaps(done, update.param.numel())
        # Each with all tensors on the memory of the parameter or state.
        every = [[param, self._aliases[param], update.param, begun.update.param]]
        every += [[state] for state in update.states]
        is_shared = any(map(_is_shared, every))
        if begun.filled is not None and is_shared:
            # Copies would take as long as the update.
            self._is_missed = True
            return None
        self._is_used = True
        if begun.filled is not None:
            self._change_places(param, every)
            return Taken(update._replace(param=param.data), left, self._memory[param])
        is_most = sum(last - first for first, last in left) * 2 <= update.param.numel()
        if is_most and not is_shared:
            self._change_places(param, every)
            for start, end in left:
                for tensors, old in zip(every, self._memory[param], strict=True):
                    tensors[0].data.view(-1)[start:end].copy_(old.view(-1)[start:end])
        else:
            for start, end in done:
                for tensors, made in zip(every, self._memory[param], strict=True):
                    tensors[0].detach().view(-1)[start:end].copy_(made.view(-1)[start:end])
        return Taken(update._replace(param=param.data), left)

    def _change_places(self, param: torch.Tensor, every: Sequence[Sequence[torch.Tensor]]) -> None:
        memory = self._memory[param]
        for number, tensors in enumerate(every):
            # Not a view to torch, which would count its writes as the other's.
            made, memory[number] = memory[number], tensors[0].data
            for tensor in tensors:
                tensor.data = made

    # Between steps

    def clear(self) -> None:
        """End the window: its gradients are used, or forgotten."""
        self.forget()
        if self._is_missed:
            self.misses += 1
            self._paused, self._passed = min(2 * self._paused + 1, MAX_PAUSE), 0
        elif self._is_used:
            self.hits += 1
            self._paused = 0
        self._is_over = self._is_missed = self._is_used = False

    def destroy(self) -> None:
        self.clear()
        self._memory = {}
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
