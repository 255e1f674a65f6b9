"""Parameters that are gathered while the next forward runs (`overlap_param_gather`).

After an update the gathers are issued on a stream of their own, and nobody waits for them there.
Whoever reads a parameter waits, by event, for the one gather that fills it: on the stream that is
current at the read, once per stream. A gather is remembered until the next update, however many
streams have waited: a stream that comes later has not.

[Note: how a read is heard]
A parameter on its way is a `PendingParameter`. It hears

1. a module's attribute being read (`parameter_reads`), and parameters of modules being listed;
2. every function and method of torch that is given the parameter itself, or a list with it: forward
   code, `param.data`, `detach()`, `copy_()`, and what is built on them, such as `state_dict()`.

Kernels from elsewhere that a module calls are covered by 1. What cannot be heard, because no code
of Python's is run on the parameter, is a read through memory: a tensor that was made from the
parameter before the update and shares its memory, a replayed graph, and an extension's function
that is given a parameter which the script has kept. No check of ours could make these wait, and so
the gathers are only left alone where a script says that it does none of that. The stream checker
finds those that it does.

A tensor made from a parameter belongs to the stream that made it, as any other: another stream that
uses it waits for that one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import Event, Stream, get_accelerator
from deepspeed.comm.shard_ops import PendingShards
from deepspeed.runtime.module_hooks.parameter_reads import (
    flat_values,
    plain_copy,
    unwatch_reads,
    watch_reads,
)
from deepspeed.runtime.streams import SideStream

# Of torch's attributes, those that say nothing of a parameter's elements.
_NO_READ = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("grad", "requires_grad", "is_leaf", "shape", "dtype", "device", "layout")
    ),
    *(getattr(torch.Tensor.grad, access) for access in ("__set__", "__delete__")),
    torch.Tensor.numel,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
}


class Arrival:
    """One gather on its way, with the event behind it."""

    def __init__(self, event: Event) -> None:
        self._event = event
        self._waited: set[Stream] = set()

    def wait(self) -> None:
        """Let the current stream wait, if it has not; RuntimeError while torch.compile traces the
        reader: what it compiles would not wait.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "zero_optimization.overlap_param_gather: true, and a function that reads "
                "parameters is being compiled; its code would not wait for them. Compile modules "
                "of the model (engine.compile()) instead, or set the key to false"
            )
        stream = get_accelerator().current_stream()
        if stream not in self._waited:
            stream.wait_event(self._event)
            self._waited.add(stream)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class PendingParameter(nn.Parameter):
    """A parameter on its way; see [Note: how a read is heard]."""

    _arrival: Arrival

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func not in _NO_READ:
            for value in flat_values((*args, *kwargs.values())):
                if isinstance(value, PendingParameter):
                    value._arrival.wait()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def ds_was_read(self) -> None:
        self._arrival.wait()

    def ds_was_listed(self) -> None:
        """Wait: whoever goes over parameters may hand them to anybody."""
        self._arrival.wait()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return plain_copy(self, memo)


class ParameterArrivals:
    """The gathers behind one update of a model, and who has to wait for them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._gather = SideStream(overlap=True, name="parameter gathers")
        self._pending: list[tuple[Arrival, Sequence[nn.Parameter]]] = []

    def begin(self, gather: Callable[[], PendingShards], params: Sequence[nn.Parameter]) -> None:
        """Issue a gather that fills `params`, behind what the current stream was given so far."""
        stream = self._gather.stream
        assert stream is not None, "a device without streams has nothing to leave alone"
        self._gather.wait_for([self._gather.current_stream()])
        with self._gather.issue():
            gather().wait()  # this stream waits, not the host
        self._pending.append((Arrival(stream.record_event()), params))

    def hand_over(self) -> None:
        """Let readers wait from now on: all gathers of this update were issued. Where a read would
        not be heard, the current stream waits at once: for all if a part of the model is compiled
        or scripted, and for parameters of classes of their own.
        """
        if not self._hears():
            self.settle()
            return
        for module in self._model.modules():
            watch_reads(module)
        for arrival, params in self._pending:
            if any(type(param) is not nn.Parameter for param in params):
                arrival.wait()
                continue
            for param in params:
                param._arrival = arrival  # type: ignore[attr-defined]  # the class is about to change
                param.__class__ = PendingParameter

    def _hears(self) -> bool:
        return not any(
            module._compiled_call_impl is not None
            or "_orig_mod" in module._modules  # what torch.compile(module) returns
            or isinstance(module, torch.jit.ScriptModule)
            for module in self._model.modules()
        )

    def settle(self) -> None:
        """Let the current stream wait for all that is on its way; nobody else has to after it."""
        for arrival, params in self._pending:
            arrival.wait()
            for param in params:
                if type(param) is PendingParameter:
                    del param._arrival
                    param.__class__ = nn.Parameter  # type: ignore[assignment]  # as it was
        self._pending = []

    def destroy(self) -> None:
        self.settle()
        for module in self._model.modules():
            unwatch_reads(module)
