"""All-reduce of gradients that every rank keeps whole, in ranges of one flat buffer per group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.watch import lone_waits
from deepspeed.runtime.gradients.reduce_rule import ReduceRule


class FlatGradients:
    """Gives each parameter's `.grad` a place in one flat buffer (`flat`, or a new one of the dtype
    and on the device of `like`, or else of the first parameter), so that reduction needs no copies.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        like: torch.Tensor | None = None,
        flat: torch.Tensor | None = None,
    ) -> None:
        self.params = list(params)
        like = self.params[0] if like is None else like
        self.flat = (
            torch.zeros(sum(p.numel() for p in self.params), dtype=like.dtype, device=like.device)
            if flat is None
            else flat
        )
        self.views = []
        start = 0
        for param in self.params:
            self.views.append(self.flat[start : start + param.numel()].view(param.shape))
            start += param.numel()
        # Whose places hold something that gradients must not be written over.
        self._closed: set[int] = set()
        self._handles: list[Any] = []
        # Autograd makes a gradient anew wherever there is none; left until the end of backward,
        # all of them lie beside the buffer. The host has the memory, and one copy of many small
        # gradients takes it less time than many copies do.
        if not get_accelerator().resolves_data_dependency():
            for index, param in enumerate(self.params):
                hook = self._make_hook(index)
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's is untyped
                self._handles.append(handle)

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(param: torch.Tensor) -> None:
            # [fix 2] Copied on the stream current inside the hook, the one that produced the
            # gradient; autograd joins it to the caller's stream at the end of backward.
            if index not in self._closed:
                self.collect_some((index,))

        return on_gradient

    @property
    def has_hooks(self) -> bool:
        return bool(self._handles)

    def collect(self) -> None:
        """Move every gradient into the buffer, an absent one as zero. `.grad` is then the view."""
        self.collect_some(range(len(self.params)))

    @torch.no_grad()
    def collect_some(self, indices: Iterable[int]) -> None:
        pairs = ((self.views[index], self.params[index]) for index in indices)
        moved = [(view, param) for view, param in pairs if param.grad is not view]
        present = [(view, param.grad) for view, param in moved if param.grad is not None]
        if present:
            torch._foreach_copy_([view for view, _ in present], [grad for _, grad in present])
        absent = [view for view, param in moved if param.grad is None]
        if absent:
            torch._foreach_zero_(absent)
        for view, param in moved:
            param.grad = view

    def take_over(self) -> None:
        """Before a backward, move in what clients have put in the place of a gradient.

        A hook would let go of it after a copy on its own stream, and the client's memory belongs to
        the stream current here. What autograd makes it frees for the stream of the hook.
        """
        if self._handles:
            self.collect_present()

    def collect_present(self) -> None:
        """Move every gradient that there is into the buffer."""
        pairs = enumerate(self.params)
        self.collect_some([index for index, param in pairs if param.grad is not None])

    @torch.no_grad()
    def take_edits(self) -> list[torch.nn.Parameter]:
        """Take in what a script has put in the place of averaged gradients; return the parameters
        whose gradient it has dropped (`param.grad = None`).
        """
        edited = [
            index
            for index, (view, param) in enumerate(zip(self.views, self.params, strict=True))
            if param.grad is not view
        ]
        dropped = [self.params[index] for index in edited if self.params[index].grad is None]
        self.collect_some(edited)
        return dropped

    def detach(self, indices: Iterable[int] | None = None) -> None:
        """Have gradients that arrive stay apart: the buffer, or parts of it, are in other use."""
        for index in range(len(self.params)) if indices is None else indices:
            self._closed.add(index)
            self.params[index].grad = None

    def attach(self) -> None:
        for index in self._closed:
            self.params[index].grad = self.views[index]
        self._closed.clear()

    def forget(self) -> None:
        self._closed.clear()
        for param in self.params:
            param.grad = None

    def destroy(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.forget()


class Flight(NamedTuple):
    """A range of a flat buffer on its way."""

    work: Any  # the collective; None if it is done
    payload: torch.Tensor
    target: torch.Tensor
    post: float  # by what the sum is multiplied


@torch.no_grad()
def start_all_reduce(
    target: torch.Tensor,
    rule: ReduceRule,
    group: dist.Group,
    communication_data_type: torch.dtype | None,
) -> Flight:
    """Begin to average `target`, a range of a flat buffer."""
    travels_as_is = communication_data_type in (None, target.dtype)
    payload = target if travels_as_is else target.to(communication_data_type)
    factors = rule.factors(travels_in=payload.dtype)
    if factors.pre != 1.0:
        payload.mul_(factors.pre)
    work = dist.all_reduce(payload, group=group, async_op=True)
    return Flight(work, payload, target, factors.post)


@torch.no_grad()
def finish_all_reduce(flight: Flight) -> None:
    """Wait, and put the average where it belongs."""
    if flight.work is not None:
        with lone_waits.watch.waiting(lambda: f"{flight.payload.numel()} elements of gradients"):
            flight.work.wait()
    if flight.payload is not flight.target:
        flight.target.copy_(flight.payload)
    if flight.post != 1.0:
        flight.target.mul_(flight.post)


def all_reduce_flat(
    flats: Iterable[torch.Tensor],
    bucket_numel: int,
    rule: ReduceRule,
    groups: Iterable[dist.Group],
    communication_data_type: torch.dtype | None,
) -> None:
    """All-reduce flat buffers in place, `bucket_numel` elements at a time, each over its own group,
    scaled by the reduce rule. Every rank passes the same sizes in the same order.
    """
    in_flight = [
        start_all_reduce(chunk, rule, group, communication_data_type)
        for flat, group in zip(flats, groups, strict=True)
        for chunk in torch.split(flat, max(1, bucket_numel))
        if chunk.numel()
    ]
    for flight in in_flight:
        finish_all_reduce(flight)
