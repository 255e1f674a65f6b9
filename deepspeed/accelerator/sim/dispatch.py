"""How an operator becomes deferred work.

[Note: what runs when]
- Operators that compute are deferred, on every stream: their results are allocated (poisoned) and
  returned at once.
- Views and changes of an argument's sizes only are made at once; they touch no memory.
- What makes a device wait makes the host wait for the current stream here too, and for nothing
  else: reading a value, results whose shape depends on values. The operator then sees memory as it
  is.
- Random operators use up the generator when they are issued, exactly as on the host, so numbers
  don't depend on when they run.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.accelerator import operators
from deepspeed.accelerator.sim.host_waits import COPIES, Counting
from deepspeed.accelerator.sim.memory import Allocator
from deepspeed.accelerator.sim.plans import Fresh, Plan, dummies_of, generator_of, made_plan
from deepspeed.accelerator.sim.queues import Scheduler, Stream, Work


class Kind(enum.Enum):
    """What has to be done for an operator."""

    VIEW = "touches no memory"
    COMPOSITE = "consists of other operators"
    METADATA = "asks for what is known without values"
    READ = "gives the host values, or shapes that depend on values"
    COLLECTIVE = "torch.distributed, past deepspeed.comm"
    RESIZE = "may need other memory"
    ALLOCATE = "leaves its result uninitialized"
    RANDOM = "uses a generator"
    COMPUTE = "everything else"


_ALLOCATING = {
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
}
_METADATA = {
    "aten::is_pinned",
    "aten::is_same_size",
    "aten::result_type",
    "aten::can_cast",
    "aten::_has_same_storage_numel",
    "aten::_fused_sdp_choice",
    "aten::_use_cudnn_ctc_loss",
    "aten::_use_miopen_ctc_loss",
    "aten::is_set_to",
}
# How much of the generator these use depends on the values they draw.
_REJECTION_SAMPLING = {
    "aten::poisson",
    "aten::binomial",
    "aten::_standard_gamma",
    "aten::_sample_dirichlet",
    "aten::multinomial",
}
_MAY_BE_MASKED = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index",
}


@cache
def kind_of(func: Any) -> Kind:
    """What has to be done for an operator, from its schema and tags."""
    schema, tags = func._schema, func.tags
    if func.namespace in ("c10d", "_c10d_functional"):
        return Kind.COLLECTIVE
    if schema.name == "aten::resize_":
        return Kind.RESIZE
    if operators.is_view(func):
        return Kind.VIEW
    if func.namespace == "prim" or schema.name.startswith("aten::sym_") or schema.name in _METADATA:
        return Kind.METADATA
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return Kind.COMPOSITE
    if schema.name in _ALLOCATING or schema.name == "aten::empty_permuted":
        return Kind.ALLOCATE
    returned = [str(r.type) for r in schema.returns]
    if schema.name in _REJECTION_SAMPLING or any("Tensor" not in name for name in returned):
        return Kind.READ
    if torch.Tag.dynamic_output_shape in tags and schema.name not in _MAY_BE_MASKED:
        return Kind.READ
    return Kind.RANDOM if torch.Tag.nondeterministic_seeded in tags else Kind.COMPUTE


class _Facts(NamedTuple):
    func: Any
    kind: Kind
    name: str


_facts: dict[int, _Facts] = {}


def _facts_of(func: Any) -> _Facts:
    # By identity: an operator's own hash is computed in Python. The entry keeps it alive, so no
    # other gets its identity.
    known = _facts.get(id(func))
    if known is None:
        known = _facts[id(func)] = _Facts(func, kind_of(func), func.name())
    return known


class Operators(TorchDispatchMode):
    """Sends every operator of the thread that entered it to the current stream. `before_collective`
    is called before one that did not come through `deepspeed.comm`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        allocator: Allocator,
        before_collective: Callable[[], None],
        host_waits: Counting,
    ) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._allocator = allocator
        self._before_collective = before_collective
        self._host_waits = host_waits
        self._plans: dict[Any, Plan] = {}
        self.in_forked_child = False

    def __torch_dispatch__(
        self, func: object, types: object, args: object = (), kwargs: object = None
    ) -> Any:
        # Below a dispatcher no tensor's class hears of a function any more.
        with torch._C.DisableTorchFunctionSubclass():
            return self._dispatch(func, types, args, kwargs or {})

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if types and any(
            t.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for t in types
        ):
            # A tensor subclass that consists of tensors: they come here one by one.
            return NotImplemented
        if self.in_forked_child and torch.utils.data.get_worker_info() is not None:
            return func(*args, **kwargs)  # a data loader's worker computes on the host
        facts = _facts_of(func)
        kind = facts.kind
        if kind is Kind.VIEW or kind is Kind.METADATA:
            return func(*args, **kwargs)
        if kind is Kind.COMPOSITE:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        tensors: list[torch.Tensor] = []
        key = _call_key(func, args, kwargs, tensors)
        if self._host_waits.counters:
            self._host_waits.computed(func, args, kwargs, tensors)
        plan = self._plans.get(key)
        if plan is not None and not self._allocator.host.is_used:
            # Such a call has passed all that follows.
            return self._defer(facts, args, kwargs, tensors, plan)
        if _elsewhere(tensors, kwargs):
            return func(*args, **kwargs)
        if self._allocator.host.is_used and any(map(self._allocator.host.owns, tensors)):
            return self._with_host_memory(facts, args, kwargs, tensors, key)
        if kind is Kind.COLLECTIVE:
            self._before_collective()
            return func(*args, **kwargs)
        if func._schema.name in _MAY_BE_MASKED and _has_mask(args):
            self._host_waits.indexed(func, args)
            return self._now(func, args, kwargs)
        if kind is Kind.READ or not _is_strided(tensors, kwargs):
            return self._now(func, args, kwargs)
        if kind is Kind.RESIZE:
            return self._resize(func, args, kwargs)
        return self._defer(
            facts, args, kwargs, tensors, plan or self._plan(func, args, kwargs, key)
        )

    def _defer(
        self,
        facts: _Facts,
        args: object,
        kwargs: object,
        tensors: list[torch.Tensor],
        plan: Plan | None,
    ) -> Any:
        if plan is None or not plan.deferrable:
            return self._now(facts.func, args, kwargs)
        work = None
        if facts.kind is not Kind.ALLOCATE:
            bind = self._random if facts.kind is Kind.RANDOM else _bind
            work = bind(facts.func, self.shadows(args), self.shadows(kwargs))
        return self._issue(facts, args, kwargs, tensors, plan, work)

    def _with_host_memory(
        self, facts: _Facts, args: Any, kwargs: Any, tensors: list[torch.Tensor], key: Any
    ) -> Any:
        """Compute on the host's own memory at once; copies to and from the device go by streams."""
        func, host = facts.func, self._allocator.host
        if all(map(host.owns, tensors)):
            tracer = self._scheduler.tracer
            if tracer is not None:
                accesses = self._accesses(
                    operators.reads(func, args, kwargs), operators.writes(func, args, kwargs)
                )
                tracer.host_accessed(func.name(), accesses)
            result = func(*args, **kwargs)
            for tensor in operators.tensors_in(result):
                if not host.owns(tensor):
                    host.own(tensor)
            return result
        if func._schema.name in _MAY_BE_MASKED and _has_mask(args):
            self._host_waits.indexed(func, args)
            return self._now(func, args, kwargs)
        # A number may be the host's.
        if func._schema.name not in COPIES and any(host.owns(one) and one.ndim for one in tensors):
            raise RuntimeError(
                f"{facts.name}: one tensor is on the device and another in page-locked host memory,"
                " which a device refuses; use a copy of the one where the other is, such as "
                "get_accelerator().to_host(tensor)"
            )
        # Under a key of its own: not every such call could be deferred without host memory.
        plan = self._plan(func, args, kwargs, (key, "host memory"))
        result = self._defer(facts, args, kwargs, tensors, plan)
        may_go_on = any(argument.name == "non_blocking" for argument in func._schema.arguments)
        goes_on = operators.arguments(func, args, kwargs).get("non_blocking", False)
        if may_go_on and (not goes_on or any(host.owns(one, unlocked=True) for one in tensors)):
            self._host_waits.blocked()
            self._scheduler.complete(self._scheduler.current)
        return result

    # Deferring

    def shadows(self, args: object) -> Any:
        """Arguments as a kernel gets them: addresses, which keep no tensor of the user alive."""
        if isinstance(args, torch.Tensor):
            return self._allocator.shadow(args)
        if isinstance(args, (list, tuple)):
            return type(args)([self.shadows(item) for item in args]) if args else args
        if isinstance(args, dict):
            return {name: self.shadows(value) for name, value in args.items()}
        return args

    def _issue(
        self,
        facts: _Facts,
        args: object,
        kwargs: object,
        tensors: list[torch.Tensor],
        plan: Plan,
        work: Callable[[], Any] | None,
    ) -> Any:
        fresh: list[torch.Tensor] = []
        results = [self._result(entry, args, kwargs, fresh) for entry in plan.results]
        if work is not None:
            into = [self._allocator.shadow(tensor) for tensor in fresh]
            self.launch(
                facts.name,
                _storing(work, into),
                [tensors[index] for index in plan.reads],
                [*[tensors[index] for index in plan.writes], *fresh],
            )
        if not results:
            return None
        return results[0] if len(results) == 1 else tuple(results)

    def launch(
        self,
        operator: str,
        run: Callable[[], None],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        stream: Stream | None = None,
        waits_for_ranks: bool = False,
    ) -> None:
        """Put work on a stream, the current one by default, with the tensors that it touches on
        memory that it holds itself.
        """
        scheduler, allocator = self._scheduler, self._allocator
        stream = stream or scheduler.current
        if scheduler.tracer is not None:
            scheduler.tracer.launched(operator, stream, self._accesses(reads, writes))
        for tensor in (*reads, *writes):
            block = allocator.block_of(tensor)
            if block is not None:
                block.uses[stream] = stream.issued + 1
                if scheduler.is_summing:
                    allocator.record_stream(tensor, stream)
        scheduler.put(stream, Work(operator, run, waits_for_ranks))

    def _accesses(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> list[Any]:
        allocator = self._allocator
        found = [access for tensor in reads for access in allocator.accesses(tensor, False)]
        return found + [access for tensor in writes for access in allocator.accesses(tensor, True)]

    def _result(self, entry: Any, args: Any, kwargs: Any, fresh: list[torch.Tensor]) -> Any:
        if isinstance(entry, Fresh):
            tensor = self.allocate(entry)
            fresh.append(tensor)
            return tensor
        if isinstance(entry, list):
            return [self._result(item, args, kwargs, fresh) for item in entry]
        if isinstance(entry, int):
            return args[entry]
        return None if entry is None else kwargs[entry]

    def allocate(self, spec: Fresh) -> torch.Tensor:
        nbytes = spec.nbytes
        if not nbytes:
            return torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype)
        return self._allocator.allocate(nbytes, spec.dtype, spec.size, spec.stride)

    def _random(self, func: Any, shadows: Any, shadow_kwargs: Any) -> Callable[[], Any]:
        """Use the generator up now; the work, later, with the generator as it was."""
        generator = generator_of(shadows, shadow_kwargs)
        before = generator.get_state()
        func(*dummies_of(shadows, 0), **dummies_of(shadow_kwargs, 0))

        def work() -> Any:
            now = generator.get_state()
            generator.set_state(before)
            try:
                return func(*shadows, **shadow_kwargs)
            finally:
                generator.set_state(now)

        return work

    # Results' shapes

    def _plan(self, func: object, args: object, kwargs: object, key: object) -> Plan | None:
        plan = self._plans.get(key) or made_plan(func, args, kwargs)
        if plan is not None:
            self._plans[key] = plan
        return plan

    # Not deferring

    def _now(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.host_access(
            func.name(), operators.reads(func, args, kwargs), operators.writes(func, args, kwargs)
        )
        return func(*args, **kwargs)

    def host_access(
        self, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor] = ()
    ) -> None:
        """Wait for the current stream, as a device's copy to the host does, before one looks."""
        self._scheduler.complete(self._scheduler.current)
        tracer = self._scheduler.tracer
        if tracer is not None:
            tracer.host_accessed(what, self._accesses(reads, writes))

    def _resize(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor: torch.Tensor = args[0]
        needed = Fresh(tensor.dtype, tuple(args[1]), _contiguous_stride(args[1]))
        storage = tensor.untyped_storage()
        if needed.nbytes <= storage.nbytes() - tensor.storage_offset() * tensor.element_size():
            return func(*args, **kwargs)
        grown = self.allocate(needed)
        old = torch.empty(0, dtype=torch.uint8).set_(storage)
        new = torch.empty(0, dtype=torch.uint8).set_(grown.untyped_storage())[: old.numel()]
        source, target = self._allocator.shadow(old), self._allocator.shadow(new)
        self.launch(func.name(), _bind(target.copy_, (source,), {}), [old], [new])
        return tensor.set_(grown.untyped_storage(), 0, needed.size, needed.stride)


def _bind(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[], Any]:
    return lambda: function(*args, **kwargs)


def _storing(work: Callable[[], Any], into: list[torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        result = work()
        if into:
            # Arguments that are returned come before or between fresh results; they are no results
            # of ours.
            made = [result]
            if not isinstance(result, torch.Tensor):
                made = list(operators.tensors_in(result))[-len(into) :]
            for target, value in zip(into, made, strict=True):
                target.copy_(value)

    return run


def _contiguous_stride(size: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(size):
        strides.append(step)
        step *= max(1, length)
    return tuple(reversed(strides))


def _elsewhere(tensors: list[torch.Tensor], kwargs: Mapping[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return True
    return not all([tensor.is_cpu for tensor in tensors])


def _is_strided(tensors: list[torch.Tensor], kwargs: Mapping[str, Any]) -> bool:
    if kwargs.get("layout") not in (None, torch.strided):
        return False
    return all([tensor.layout is torch.strided and not tensor.is_quantized for tensor in tensors])


def _has_mask(args: Any) -> bool:
    return any(index.dtype in (torch.bool, torch.uint8) for index in operators.tensors_in(args[1]))


def _call_key(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
    """Equal for calls whose results have equal shapes and that are treated alike; hashable. Appends
    all tensors to `tensors`.
    """
    positional = tuple([_key(argument, tensors) for argument in args])
    named = tuple([(name, _key(one, tensors)) for name, one in kwargs.items()]) if kwargs else ()
    # `_facts` keeps the operator alive, so its identity stands for it.
    return (id(func), torch.get_default_dtype(), positional, named)


_INTEGERS = frozenset((int, bool))


def _key(value: object, tensors: list[torch.Tensor]) -> Any:
    """What the shape of the result, and how the operator is treated, can depend on."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        if value.layout is torch.strided and value.is_cpu:
            return (value.dtype, value.shape, value.stride())
        return (value.device, value.layout)  # never deferred
    if isinstance(value, (list, tuple)):
        types = tuple(map(type, value))
        return (
            (types, tuple(value))
            if _INTEGERS.issuperset(types)
            else tuple([_key(item, tensors) for item in value])
        )
    if isinstance(value, torch.Generator) or (tensors and isinstance(value, float)):
        return type(value)  # with tensors in front, a float's value is no matter of shapes
    return (type(value), value)  # 1, 1.0 and True are equal and make different dtypes
