"""Optimizers whose parameters and state lie on the host: one pass over memory per tensor, by the
native op, or the same arithmetic in torch where it cannot be built. Each rule has a file here and
one in `csrc/`, which round alike: results do not depend on which of the two runs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.native import native_op
from deepspeed.ops.parameter_runs import STATE_BY_PARAMETER, ElementRun

if TYPE_CHECKING:
    from deepspeed.ops.state_files import StateFiles

# As csrc/host_update/host_update.h numbers them.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Elements that the torch version updates at a time: its temporaries stay in the cache, and small.
TORCH_CHUNK = 1 << 17
_ABSENT = (0, 0)
# First and last+1 element of each, ascending.
Ranges = list[tuple[int, int]]


class ScalarRun(NamedTuple):
    """Elements `start` to `end` of a parameter, which are updated with these scalars."""

    start: int
    end: int
    scalars: tuple[float, ...]


class FlatUpdate(NamedTuple):
    """One update of all elements of a parameter, in place; tensors are contiguous, on the host and
    of equal size. States are fp32, or of the parameter's dtype; `out` receives the new parameter,
    rounded to bf16 or fp16; of `scalars`, which are rounded to fp32, the gradient's factor is the
    first. With `runs` only their elements are updated, each by scalars of its own.
    """

    param: torch.Tensor
    grad: torch.Tensor
    states: list[torch.Tensor]
    out: torch.Tensor | None
    scalars: tuple[float, ...]
    runs: Sequence[ScalarRun] | None = None

    def piece(self, start: int, end: int, out: torch.Tensor | None) -> FlatUpdate:
        flats = [tensor.view(-1)[start:end] for tensor in (self.param, self.grad, *self.states)]
        runs = None
        if self.runs is not None:
            cut = ((max(start, run.start), min(end, run.end), run.scalars) for run in self.runs)
            runs = [ScalarRun(a - start, b - start, scalars) for a, b, scalars in cut if a < b]
        return FlatUpdate(flats[0], flats[1], flats[2:], out, self.scalars, runs)

    def of_runs(self) -> Iterator[FlatUpdate]:
        """Yield the update of each run by itself; `out` then has the rest already."""
        for run in self.runs or ():
            out = None if self.out is None else self.out.view(-1)[run.start : run.end]
            piece = self.piece(run.start, run.end, out)
            yield piece._replace(scalars=run.scalars, runs=None)


class Delivery(Protocol):
    """Takes the new values of a parameter piece by piece, while the optimizer goes on."""

    @property
    def grad(self) -> torch.Tensor:
        """Return the gradient, which may be narrower than the parameter."""

    def pieces(self) -> Iterable[tuple[int, int]]:
        """List first and last+1 element of each piece of the parameter, as they are updated."""

    def low_precision_out(self, start: int, end: int) -> torch.Tensor | None:
        """Return where the piece goes in bf16 or fp16, contiguous, on the host; asked for first."""

    def updated(self, start: int, end: int) -> None:
        """Take a piece that is updated and rounded."""


class Taken(NamedTuple):
    """What was made of an update ahead of the step: it is of tensors where they lie now, and of the
    elements that are `left`. `old`: in files, where these lie, of parameter and states.
    """

    update: FlatUpdate
    left: Ranges
    old: Sequence[torch.Tensor] = ()


class EarlyUpdate(Protocol):
    """Updates that were made ahead of the step."""

    def take(self, param: torch.Tensor, update: FlatUpdate) -> Taken | None:
        """Return what is made of an update; None: nothing is."""


def update_native(op: ModuleType, update: FlatUpdate, instruction_set: str | None = None) -> None:
    """Run the op, in as many threads as torch uses, by the best instruction set or another."""
    op.update(
        instruction_set or op.instruction_sets()[0],
        torch.get_num_threads(),
        update.param.numel(),
        _array(update.param),
        _array(update.grad),
        tuple(_array(state) for state in update.states),
        _ABSENT if update.out is None else _array(update.out),
        update.scalars,
    )


def _array(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), DTYPE_CODES[tensor.dtype]


def update_torch(rule: Callable[..., None], update: FlatUpdate) -> None:
    """Do the same with torch's operations, an optimizer's `_rule`, chunk by chunk."""
    flats = [tensor.view(-1) for tensor in (update.param, *update.states)]
    grads = update.grad.view(-1)
    for start in range(0, grads.numel(), TORCH_CHUNK):
        chunk = slice(start, start + TORCH_CHUNK)
        stored = [flat[chunk] for flat in flats]
        values = [tensor.float() for tensor in stored]  # the tensor itself where it is fp32 already
        rule(update.scalars, values[0], grads[chunk].float() * update.scalars[0], *values[1:])
        for tensor, value in zip(stored, values, strict=True):
            if tensor is not value:
                tensor.copy_(value)
        if update.out is not None:
            update.out.view(-1)[chunk].copy_(values[0])


def square_root(x: torch.Tensor) -> torch.Tensor:
    """Round a root correctly, as torch's own on fp32 is not everywhere."""
    return x.double().sqrt_().to(x.dtype)


def load_moments(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load tensors of state once more, in their own dtype."""
    groups = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    for here, there in groups:
        for param, index in zip(here["params"], there["params"], strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, torch.Tensor) and name != "step":
                    optimizer.state[param][name] = value.detach().clone().to(param.device)


class HostOptimizer(torch.optim.Optimizer):
    """An optimizer that updates every element from that element alone, on the host. Parameters are
    kept by identity: schedulers hold them. State is fp32, or else of the parameter's dtype;
    `op_name` is a key of `deepspeed.ops.op_builder.ALL_OPS`.
    """

    op_name: ClassVar[str]

    def __init__(
        self, model_params: Any, defaults: dict[str, Any], fp32_optimizer_states: bool = True
    ) -> None:
        self.fp32_optimizer_states = fp32_optimizer_states
        self.state_files: StateFiles | None = None
        self._grad_factor = 1.0
        self._deliveries: Mapping[torch.Tensor, Delivery] = {}
        self._early: EarlyUpdate | None = None
        self._runs: Mapping[torch.Tensor, Sequence[ElementRun]] = {}
        super().__init__(model_params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore; groups of another implementation get what they lack from this one's defaults."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    @abstractmethod
    def _slots(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the state tensors, in the order in which the rule takes them."""

    @abstractmethod
    def _scalars(self, group: dict[str, Any], step: int, grad_factor: float) -> tuple[float, ...]:
        """The rule's scalars at step `step` (the first is 1)."""

    @staticmethod
    @abstractmethod
    def _rule(
        scalars: Sequence[float], param: torch.Tensor, grad: torch.Tensor, *states: torch.Tensor
    ) -> None:
        """Update `param` and `states` by torch, in fp32 and in place; `grad` may change. Every
        operation rounds by itself (no `addcmul` or `lerp`, which may fuse), in the order of
        `csrc/`.
        """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; `step_flat` says what is refused."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                delivery = self._deliveries.get(param)
                grad = param.grad if delivery is None else delivery.grad
                if grad is not None:
                    grad = grad if grad.is_sparse else grad.contiguous()
                    update = self._prepare(group, param, grad, self._grad_factor)
                    early = None if self._early is None else self._early.take(param, update)
                    if early is None or delivery is None:
                        self._deliver(update, delivery)
                    else:
                        self._deliver_rest(early, delivery)
        return loss

    def _deliver_rest(self, early: Taken, delivery: Delivery) -> None:
        """Update what is left, and deliver everything; who takes it rounds it."""
        update, left, old = early
        if old:
            self._deliver_by_windows(update, delivery, early)
            return
        for start, end in delivery.pieces():
            for first, last in ((max(start, first), min(end, last)) for first, last in left):
                if first < last:
                    self._run(update.piece(first, last, None))
            delivery.updated(start, end)

    def _deliver(self, update: FlatUpdate, delivery: Delivery | None) -> None:
        if self.lies_in_file(update.param):
            self._deliver_by_windows(update, delivery)
            return
        if delivery is None:
            self._run(update)
            return
        for start, end in delivery.pieces():
            out = delivery.low_precision_out(start, end)
            if out is not None:
                self._check_out(out, update.param[start:end])
            self._run(update.piece(start, end, out))
            delivery.updated(start, end)

    def lies_in_file(self, param: torch.Tensor) -> bool:
        """Whether a parameter or state lies in a file."""
        return self.state_files is not None and self.state_files.holds(param)

    def _deliver_by_windows(
        self, update: FlatUpdate, delivery: Delivery | None, early: Taken | None = None
    ) -> None:
        assert self.state_files is not None, "asked before"
        whole = [(0, update.param.numel())]
        own = [update.param, *update.states]
        old, left = (early.old, early.left) if early else (own, None)
        with self.state_files.windows(old, own, left) as windows:
            for start, end in whole if delivery is None else delivery.pieces():
                out = delivery.low_precision_out(start, end) if delivery else update.out
                if out is not None:
                    self._check_out(out, update.param[start:end])
                # Masters that are sent themselves are read where everybody reads them.
                windows.writes_first = out is not None
                for first, last, (param, *states) in windows.of(start, end):
                    rounded = None if out is None else out.view(-1)[first - start : last - start]
                    if not windows.is_left(first):
                        if rounded is not None:
                            rounded.copy_(param)
                        continue
                    part = update.piece(first, last, rounded)
                    self._run(part._replace(param=param, states=states))
                    if out is None:
                        update.param.view(-1)[first:last].copy_(param)
                if delivery is not None:
                    delivery.updated(start, end)

    @contextmanager
    def fused(
        self,
        grad_factor: float,
        deliveries: Mapping[torch.Tensor, Delivery],
        early: EarlyUpdate | None = None,
        runs: Mapping[torch.Tensor, Sequence[ElementRun]] | None = None,
    ) -> Iterator[None]:
        """Let `step` multiply gradients by `grad_factor`, clip factor / loss scale, and deliver new
        values of flat parameters while the rest is updated, in its one pass; not what was updated
        `early`. Of parameters in `runs` only these elements are updated.
        """
        self._grad_factor = grad_factor
        self._deliveries = deliveries
        self._early = early
        self._runs = runs or {}
        try:
            yield
        finally:
            self._grad_factor = 1.0
            self._deliveries = {}
            self._early = None
            self._runs = {}

    def foreseen(
        self, param: torch.Tensor, grad: torch.Tensor, grad_factor: float
    ) -> FlatUpdate | None:
        """Return the update that `step` would make of `param` now; None if it would have to make or
        convert state first, or parameters in it have missed steps.
        """
        group = next(one for one in self.param_groups if any(param is p for p in one["params"]))
        state = self.state[param] if param in self.state else {}
        if STATE_BY_PARAMETER in state:
            return None
        states: list[torch.Tensor] = []
        for slot in self._slots(group):
            own = state.get(slot)
            if own is None or own.dtype != self._state_dtype(param) or not own.is_contiguous():
                return None
            if self.lies_in_file(own) != self.lies_in_file(param):
                return None
            states.append(own)
        scalars = self._scalars(group, int(state["step"]) + 1, grad_factor)
        return FlatUpdate(param.detach(), grad, states, None, scalars)

    def run_apart(self, update: FlatUpdate, made: FlatUpdate) -> None:
        """Write to `made` what `update` would make of its own memory, which stays as it is."""
        numel = update.param.numel()
        # What is copied is still in the cache when it is updated.
        size = TORCH_CHUNK * torch.get_num_threads()
        for start in range(0, numel, size):
            end = min(start + size, numel)
            old, new = update.piece(start, end, None), made.piece(start, end, None)
            for to, value in zip((new.param, *new.states), (old.param, *old.states), strict=True):
                to.copy_(value)
            self._run(new)

    def run_windows_apart(
        self, update: FlatUpdate, made: FlatUpdate, numbers: Iterator[int]
    ) -> None:
        """Do that with windows of files, as they come. OSError: some are made, and some are not."""
        assert self.state_files is not None, "files of its"
        old, new = ([each.param, *each.states] for each in (update, made))
        with self.state_files.windows(old, new) as windows:
            for first, last, (param, *states) in windows.each(numbers):
                grad = update.grad.view(-1)[first:last]
                self._run(FlatUpdate(param, grad, states, None, update.scalars))

    @torch.no_grad()
    def step_flat(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        *,
        grad_factor: float = 1.0,
        low_precision_out: torch.Tensor | None = None,
    ) -> None:
        """Unscale, clip, update and round one parameter, reading and writing memory once.

        `grad` has the same size in any shape, in fp32, bf16 or fp16, and is not changed;
        `low_precision_out` (bf16 or fp16) receives the new parameter. ValueError, and nothing
        changed, for a tensor that is not contiguous, not on the host, or of another dtype or size.
        """
        own = (one for one in self.param_groups if any(param is each for each in one["params"]))
        group = next(own, None)
        if group is None:
            raise ValueError(
                f"{type(self).__name__}.step_flat: param of shape {tuple(param.shape)} is in no "
                "parameter group"
            )
        if low_precision_out is not None:
            self._check_out(low_precision_out, param)
        update = self._prepare(group, param, grad, grad_factor)._replace(out=low_precision_out)
        self._deliver(update, None)

    def _prepare(
        self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, grad_factor: float
    ) -> FlatUpdate:
        self._check("parameter", param, param)
        self._check("gradient", grad, param)
        state = self.state[param]
        missing = [slot for slot in self._slots(group) if "step" in state and slot not in state]
        if missing:
            raise ValueError(
                f"{type(self).__name__}: the state of a {tuple(param.shape)} parameter has "
                f"{sorted(state)} without {missing}: it was saved by another optimizer, or with "
                "another amsgrad; load with load_optimizer_states=False to start it anew"
            )
        states = [self._state_tensor(state, slot, param) for slot in self._slots(group)]
        if param in self._runs:
            runs = self._scalar_runs(group, self._runs[param], grad_factor)
            return FlatUpdate(param.data, grad, states, None, (), runs)
        state["step"] = int(state.get("step", 0)) + 1
        scalars = self._scalars(group, state["step"], grad_factor)
        return FlatUpdate(param.data, grad, states, None, scalars)

    def _scalar_runs(
        self, group: dict[str, Any], runs: Sequence[ElementRun], grad_factor: float
    ) -> list[ScalarRun]:
        """Count a step of each history, and return its scalars for each of its runs."""
        scalars: dict[int, tuple[float, ...]] = {}
        for run in runs:
            if id(run.shared) not in scalars:
                run.shared["step"] = int(run.shared.get("step", 0)) + 1
                step = run.shared["step"]
                scalars[id(run.shared)] = self._scalars(group, step, grad_factor)
        return [ScalarRun(run.start, run.end, scalars[id(run.shared)]) for run in runs]

    def _run(self, update: FlatUpdate) -> None:
        if update.runs is not None:
            if update.out is not None:
                update.out.view(-1).copy_(update.param.view(-1))
            for part in update.of_runs():
                self._run(part)
            return
        # A simulated device defers, orders and checks torch's operators; the native op would read
        # and write past it.
        op = None if get_accelerator().defers_collectives else native_op(self.op_name)
        if op is None:
            update_torch(self._rule, update)
        else:
            update_native(op, update)

    def _state_dtype(self, param: torch.Tensor) -> torch.dtype:
        return torch.float32 if self.fp32_optimizer_states else param.dtype

    def _state_tensor(self, state: dict[str, Any], slot: str, param: torch.Tensor) -> torch.Tensor:
        dtype = self._state_dtype(param)
        tensor = state.get(slot)
        if tensor is None and not self.lies_in_file(param):
            tensor = torch.zeros_like(param, dtype=dtype)
        # Loaded state may come in another dtype or layout.
        if tensor is not None:
            state[slot] = tensor.to(device=param.device, dtype=dtype).contiguous()
        if self.state_files is not None and self.lies_in_file(param):
            if tensor is None or not self.state_files.holds(tensor):
                zeros = self.state_files.zeros(param.numel(), dtype)
                state[slot] = zeros.view(param.shape).data
                if tensor is not None:
                    state[slot].copy_(tensor)
        self._check(slot, state[slot], param)
        return state[slot]

    def _check_out(self, out: torch.Tensor, param: torch.Tensor) -> None:
        self._check("low_precision_out", out, param)
        if out.dtype == torch.float32:
            raise ValueError(
                f"{type(self).__name__}: low_precision_out is torch.float32; use torch.bfloat16 or "
                "torch.float16"
            )

    def _check(self, what: str, tensor: torch.Tensor, param: torch.Tensor) -> None:
        problem = None
        if tensor.layout != torch.strided:
            problem = f"has layout {tensor.layout}; use dense tensors (sparse=False)"
        elif tensor.device.type != "cpu":
            problem = (
                f"is on {tensor.device}; use zero_optimization.offload_optimizer, or an optimizer "
                "for devices"
            )
        elif tensor.dtype not in DTYPE_CODES:
            problem = f"is {tensor.dtype}; use torch.float32, torch.bfloat16 or torch.float16"
        elif not tensor.is_contiguous():
            problem = f"is not contiguous (strides {tuple(tensor.stride())}); call .contiguous()"
        elif tensor.numel() != param.numel():
            problem = (
                f"has {tensor.numel()} elements, the parameter {param.numel()}; give one element "
                "for each"
            )
        if problem is not None:
            raise ValueError(
                f"{type(self).__name__}: the {what} of shape {tuple(tensor.shape)} {problem}"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore state in its own dtype: torch would round fp32 moments to a bf16 parameter's."""
        super().load_state_dict(state_dict)
        load_moments(self, state_dict)
