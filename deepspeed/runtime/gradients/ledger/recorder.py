"""The debit side of the ledger: what autograd hands out, fingerprinted by a hook on every parameter
as it leaves, with what the engine multiplied the loss by, measured at the loss. A step asks for the
sum, weighted as in the definition of correct (`gradient_ledger`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.gradients.accumulation import AccumulationTracker
from deepspeed.runtime.gradients.ledger.fingerprint import DIMS, Fingerprint
from deepspeed.runtime.gradients.observer import GradientObserver
from deepspeed.runtime.gradients.scope import GradientPiece, GradientScope
from deepspeed.utils.tensor_fragment import logical_shape


@dataclass
class _MicroBatch:
    """Contributions of one backward, or of all backwards of one micro-batch that a schedule runs.

    `divisor` is what the client's loss has still to be divided by; `entries` are for each piece the
    fingerprint and norm of each gradient; `is_unnoticed`: the model was called past the engine.
    """

    divisor: float
    micro_step: int
    entries: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    loss_factor: torch.Tensor | None = None
    is_unnoticed: bool = False
    number: int | None = None

    def factor(self) -> torch.Tensor | float:
        """What autograd's gradients are divided by to be those of the client's loss."""
        return 1.0 if self.loss_factor is None else self.loss_factor


class ContributionRecorder(GradientObserver):
    """See module. `pieces` are all of all parameters, cut alike on all ranks."""

    def __init__(
        self,
        pieces: Sequence[GradientPiece],
        scope: GradientScope,
        tracker: AccumulationTracker,
        sum_op: bool,
    ) -> None:
        self._pieces = pieces
        self._scope = scope
        self._tracker = tracker
        self._sum_op = sum_op
        self._device = pieces[0].param.device if pieces else scope.device
        self._fingerprints: dict[torch.device, Fingerprint] = {}
        self._micro_batches: list[_MicroBatch] = []
        self._passes: list[tuple[int, int]] = []  # that a schedule has run: (micro-batch, chunk)
        # By micro-batch of a schedule, the gradient that its loss got.
        self._at_loss: dict[int, torch.Tensor | None] = {}
        self._is_open = False  # whether gradients belong to the last micro-batch
        self._sealed: set[nn.Parameter] = set()
        # As triples of micro-batch, piece and entry.
        self._late: dict[nn.Parameter, list[tuple[_MicroBatch, int, int]]] = {}
        self._by_param: dict[nn.Parameter, list[int]] = {}
        for index, piece in enumerate(pieces):
            self._by_param.setdefault(piece.param, []).append(index)
        self._entered: set[nn.Parameter] = set()
        self._unseen: set[nn.Parameter] = set()
        self._handles: dict[nn.Parameter, Any] = {}
        self._later_handles: list[Any] = []
        for param in self._by_param:
            self._handles[param] = param.register_hook(self._make_hook(param))  # type: ignore[no-untyped-call]  # torch's is untyped
            handle = param.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]  # as above
            self._later_handles.append(handle)
        # The hooks read the signs on streams that never waited for the one that wrote them here.
        self._fingerprint(self._device)
        get_accelerator().current_stream().synchronize()

    def _fingerprint(self, device: torch.device) -> Fingerprint:
        if device not in self._fingerprints:
            self._fingerprints[device] = Fingerprint(
                device, max((logical_shape(param).numel() for param in self._by_param), default=1)
            )
        return self._fingerprints[device]

    # As it happens

    def opened(self, loss: torch.Tensor | None, divisor: float) -> None:
        micro_batch = _MicroBatch(divisor, self._tracker.micro_steps)
        self._micro_batches.append(micro_batch)
        self._begin()
        if loss is not None and loss.requires_grad:

            def on_loss(grad: torch.Tensor) -> None:
                micro_batch.loss_factor = grad.detach().float().sum()

            loss.register_hook(on_loss)  # type: ignore[no-untyped-call]  # torch's is untyped

    def pass_opened(self, micro_batch: int, chunk: int) -> None:
        self._passes.append((micro_batch, chunk))
        known = next((m for m in self._micro_batches if m.number == micro_batch), None)
        if known is not None:
            self._micro_batches.remove(known)
        entry = known or _MicroBatch(float(self._tracker.divisor), 0, number=micro_batch)
        entry.micro_step = self._tracker.micro_steps
        self._micro_batches.append(entry)
        self._begin()

    def loss_known(self, micro_batch: int, loss: torch.Tensor) -> None:
        self._at_loss[micro_batch] = None

        def on_loss(grad: torch.Tensor) -> None:
            self._at_loss[micro_batch] = grad.detach().float().sum()

        loss.register_hook(on_loss)  # type: ignore[no-untyped-call]  # torch's is untyped

    def _begin(self) -> None:
        self._is_open = True
        for param, handle in self._handles.items():
            hooks = param._backward_hooks
            if hooks is not None and next(reversed(hooks)) != handle.id:
                # A hook that the client registered later may change the gradient: be the last one
                # again. autograd reads the plain dict, which move_to_end leaves as it is
                hooks[handle.id] = hooks.pop(handle.id)

    def closed(self) -> None:
        self._is_open = False
        self._sealed.clear()

    def _make_hook(self, param: nn.Parameter) -> Callable[[torch.Tensor], None]:
        def on_gradient(grad: torch.Tensor) -> None:
            self._entered.add(param)
            self._enter(param, grad.detach())

        return on_gradient

    @torch.no_grad()
    def _accumulated(self, param: torch.Tensor) -> None:
        """From a hook that torch keeps when it drops those before: 2.9 and older do, if a Python
        function that saved a parameter gets it in backward through hooks of saved tensors.
        """
        assert isinstance(param, nn.Parameter), "hooks are given the parameter"
        if param in self._entered:
            self._entered.remove(param)
            return
        self._unseen.add(param)
        unknown = torch.full((), math.nan, device=self._device)
        self._enter(param, unknown.expand(logical_shape(param)))

    def _enter(self, param: nn.Parameter, grad: torch.Tensor) -> None:
        """From a parameter's hook, on the stream that produced the gradient: nothing here waits for
        the device.

        What is made here is only read at the step, on a stream that autograd has joined to this
        one, and let go after the host has waited for the result.
        """
        if not self._is_open or self._micro_batches[-1].micro_step != self._tracker.micro_steps:
            self.opened(None, float(self._tracker.divisor))
            self._micro_batches[-1].is_unnoticed = True
        micro_batch = self._micro_batches[-1]
        flat = grad.reshape(-1)
        for index in self._by_param[param]:
            piece = self._pieces[index]
            part = flat[piece.start : piece.start + piece.numel]
            norm = torch.linalg.vector_norm(part, dtype=torch.float32)
            entries = micro_batch.entries.setdefault(index, [])
            entries.append((self._fingerprint(flat.device).of(part, piece.start), norm))
            if param in self._sealed:
                self._late.setdefault(param, []).append((micro_batch, index, len(entries) - 1))

    def sent(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            self._sealed.add(param)
            self._late.pop(param, None)

    def resumed(self, is_empty: Callable[[], bool]) -> None:
        if is_empty():
            self._forget_contributions()

    def _forget_contributions(self) -> None:
        """All gradients are gone; a backward that has begun but brought nothing yet goes on."""
        self._micro_batches = [
            m for m in self._micro_batches[-1:] if self._is_open and not m.entries
        ]
        self._late.clear()
        self._is_open = bool(self._micro_batches)

    def cleared(self) -> None:
        self._forget_contributions()
        self._passes.clear()
        self._at_loss.clear()

    def detached(self) -> None:
        for handle in (*self._handles.values(), *self._later_handles):
            handle.remove()
        self._handles, self._later_handles = {}, []
        self._micro_batches = []

    # What was recorded, for a step

    def _share_loss_factors(self) -> None:
        """Let the ranks that have no loss know what was measured at it."""
        passes = self._scope.passes
        if passes is None:
            return
        factors = torch.zeros(passes.micro_batches, device=self._device)
        for number, factor in self._at_loss.items():
            if factor is not None:
                factors[number] = factor
        dist.all_reduce(factors, group=passes.group)
        # A loss that got no gradient has given none to anybody.
        factors[factors == 0] = 1.0
        for micro_batch in self._micro_batches:
            if micro_batch.number is not None:
                micro_batch.loss_factor = factors[micro_batch.number]

    def _absent_passes(self) -> list[str]:
        passes = self._scope.passes
        if passes is None:
            return []
        absent = []
        for number, chunk in itertools.product(range(passes.micro_batches), range(passes.chunks)):
            times = self._passes.count((number, chunk))
            if times != 1:
                through = f" through chunk {chunk + 1} of {passes.chunks}"
                place = through if passes.chunks > 1 else ""
                how = "never ran" if not times else f"ran {times} times"
                absent.append(
                    f"the backward of micro-batch {number + 1} of {passes.micro_batches}{place} "
                    f"{how}"
                )
        for number, factor in self._at_loss.items():
            if factor is None:
                absent.append(
                    f"the loss of micro-batch {number + 1} of {passes.micro_batches} got no "
                    "gradient"
                )
        return absent

    def _weighted_contributions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Fingerprints `[A, pieces, DIMS]` and norms `[A, pieces]`, weighted as defined."""
        num_pieces = len(self._pieces)
        passes = self._scope.passes
        num_micro = max(0 if passes is None else passes.micro_batches, len(self._micro_batches))
        prints = torch.zeros(num_micro, num_pieces, DIMS, device=self._device)
        norms = torch.zeros(num_micro, num_pieces, device=self._device)
        if not num_pieces:
            return prints, norms
        nothing = [(prints.new_zeros(DIMS), norms.new_zeros(()))]
        for position, micro_batch in enumerate(self._micro_batches):
            row = position if micro_batch.number is None else micro_batch.number
            entries = [micro_batch.entries.get(index, nothing) for index in range(num_pieces)]
            weight = self._weight(micro_batch)
            sums = [[_sum(list(parts)) for parts in zip(*own, strict=True)] for own in entries]
            prints[row] = torch.stack([print_ for print_, _ in sums]) * weight
            norms[row] = torch.stack([norm for _, norm in sums]) * weight
        return prints, norms

    def _weight(self, micro_batch: _MicroBatch) -> torch.Tensor | float:
        """1/(N*A) of the definition over the loss factor; see the module's text."""
        share = 1.0 if self._sum_op else 1.0 / self._scope.num_replicas
        return share / (micro_batch.divisor * micro_batch.factor())

    def _late_contributions(self) -> torch.Tensor:
        """What came after its bucket was sealed and was not sent again; `[pieces, DIMS]`."""
        late = torch.zeros(len(self._pieces), DIMS, device=self._device)
        for micro_batch, piece, entry in (one for places in self._late.values() for one in places):
            late[piece] += micro_batch.entries[piece][entry][0] * self._weight(micro_batch)
        return late


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total
