"""The gradient ledger: double-entry bookkeeping of every contribution, from autograd to the
optimizer.

Debit: each (parameter, rank, micro-batch) contribution, fingerprinted as it leaves autograd.
Credit: the gradient that the optimizer is about to use, fingerprinted where its owners hold it.
Both must agree with the definition of correct,

    used = 1/(N*A) * sum over ranks r < N and micro-batches a of g[r,a]

(times N for `gradient_allreduce_op` "sum") over the ranks that contribute to the parameter
(`gradients.scope`), where g[r,a] is the gradient of the micro-batch's own loss: what autograd hands
out divided by what the engine multiplied that loss by (loss scale over accumulation steps), which
is measured as the gradient at the loss and not asked of anybody. Nothing that synchronizes is
trusted: not its factors, not its buffers, not its groups.

Where a schedule runs the backwards, the ledger also knows how many must come. The loss is then on
one rank only, and the others learn from it what was measured; the gradient that a stage sends to
the one before is not checked by itself.

[Note: tolerance]
Synchronization makes at most F - 1 additions over the F gradients that autograd handed out on this
rank, N - 1 over ranks and two scalings, and S - 1 additions over the S parts of the model that
share a parameter, each with a relative error of at most u (half a unit in the last place of the
narrowest dtype that sums pass through) of a partial sum, and no partial sum exceeds M, the weighted
sum of the contributions' norms. One more for a vector kernel that rounds otherwise on other
alignments, so the gradient used deviates by at most (F + N + S) u M in the 2-norm; in fp16 by F + N
+ S times half the smallest subnormal per element besides. The fingerprints of that error are SLACK
times as long at most, and have a rounding error of their own (`fingerprint`).

Not excused: what a client does to `param.grad` itself between two backwards, and gradients that
`torch.autograd.grad` takes from parameters of a model called past the engine; nor what it does to
`param.grad` between the reduction and the step, but for stage 0 without masters, which is checked
right after the reduction. `safe_set_full_grad` is the way to replace a gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.gradients.accumulation import AccumulationTracker
from deepspeed.runtime.gradients.ledger.contributors import ContributorSum, with_common_cuts
from deepspeed.runtime.gradients.ledger.families import PieceKey, RankReport, explain_all
from deepspeed.runtime.gradients.ledger.findings import NAMES_SHOWN, LedgerFinding, RankRecord
from deepspeed.runtime.gradients.ledger.fingerprint import (
    DIMS,
    SLACK,
    Fingerprint,
    fingerprint_roundoff,
)
from deepspeed.runtime.gradients.observer import GradientObserver
from deepspeed.runtime.gradients.scope import GradientPiece, GradientScope
from deepspeed.utils.logging import logger

FP16_SMALLEST = 2.0**-24


class GradientLedgerError(RuntimeError):
    """The gradient that the optimizer was about to use is not what autograd produced.

    Attributes:
        findings: What happened, the finding with most parameters first; the same on all ranks.
    """

    def __init__(self, message: str, findings: Sequence[LedgerFinding]) -> None:
        super().__init__(message)
        self.findings = tuple(findings)


@dataclass
class _MicroBatch:
    """Contributions of one backward, or of all backwards of one micro-batch that a schedule runs.

    Attributes:
        divisor: What the client's loss has still to be divided by: the accumulation steps, or 1 if
            the client did.
        micro_step: The tracker's count when it began.
        entries: For each piece, (fingerprint `[DIMS]`, norm) of each gradient that autograd handed
            out.
        loss_factor: Gradient at the client's loss, 0-dim; None is 1.
        is_unnoticed: The model was called past the engine, which learns of the gradients at the
            step.
        number: Which micro-batch of a schedule; None without one.
    """

    divisor: float
    micro_step: int
    entries: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    loss_factor: torch.Tensor | None = None
    is_unnoticed: bool = False
    number: int | None = None

    def factor(self) -> torch.Tensor | float:
        """By what autograd's gradients are divided to be those of the client's loss."""
        return 1.0 if self.loss_factor is None else self.loss_factor


class GradientLedger(GradientObserver):
    """See module. Made by `runtime.verification`, called by optimizers and engines.

    Args:
        pieces: All pieces of all parameters, in an order that is the same on all ranks that hold
            them.
        names: Name of each parameter.
        scope: Who contributes to them. Construction is collective where parts of the model share
            parameters.
        tracker: Who knows how many micro-batches make a step.
        sum_op: `gradient_allreduce_op` is "sum".
        raises: Raise on a deviation; otherwise it is only added to `findings`.

    Attributes:
        findings: All deviations so far.
        zero_gradients: Parameters whose gradient was exactly zero on all ranks in the last step.
        steps: Steps checked.
    """

    def __init__(
        self,
        pieces: Sequence[GradientPiece],
        names: Mapping[nn.Parameter, str],
        scope: GradientScope,
        tracker: AccumulationTracker,
        sum_op: bool = False,
        raises: bool = True,
    ) -> None:
        self.findings: list[LedgerFinding] = []
        self.zero_gradients: tuple[str, ...] = ()
        self.steps = 0
        self._scope = scope

        def name_of(param: nn.Parameter) -> str:
            return names.get(param, f"a parameter of shape {tuple(param.shape)}")

        self._pieces = with_common_cuts(pieces, scope, name_of)
        self._names = [name_of(piece.param) for piece in self._pieces]
        self._contributors = ContributorSum(self._pieces, scope)
        self._tracker = tracker
        self._sum_op = sum_op
        self._raises = raises
        self._held = [index for index, piece in enumerate(self._pieces) if piece.read is not None]
        self._device = self._pieces[0].param.device if self._pieces else scope.device
        self._fingerprints: dict[torch.device, Fingerprint] = {}
        self._micro_batches: list[_MicroBatch] = []
        self._passes: list[tuple[int, int]] = []  # that a schedule has run: (micro-batch, chunk)
        # By micro-batch of a schedule, the gradient that its loss got.
        self._at_loss: dict[int, torch.Tensor | None] = {}
        self._is_open = False  # whether gradients belong to the last micro-batch
        self._excused: set[nn.Parameter] = set()
        self._sealed: set[nn.Parameter] = set()
        # As triples of micro-batch, piece and entry.
        self._late: dict[nn.Parameter, list[tuple[_MicroBatch, int, int]]] = {}
        self._before: torch.Tensor | None = None
        self._warned: set[tuple[str, ...]] = set()
        self._skips_window = False
        self._by_param: dict[nn.Parameter, list[int]] = {}
        for index, piece in enumerate(self._pieces):
            self._by_param.setdefault(piece.param, []).append(index)
        self._handles: dict[nn.Parameter, Any] = {}
        for param in self._by_param:
            self._handles[param] = param.register_hook(self._make_hook(param))  # type: ignore[no-untyped-call]  # torch's is untyped
        # The hooks read the signs on streams that never waited for the one that wrote them here.
        self._fingerprint(self._device)
        get_accelerator().synchronize()

    def _fingerprint(self, device: torch.device) -> Fingerprint:
        if device not in self._fingerprints:
            self._fingerprints[device] = Fingerprint(
                device, max((param.numel() for param in self._by_param), default=1)
            )
        return self._fingerprints[device]

    # The debit side

    def opened(self, loss: torch.Tensor | None, divisor: float) -> None:
        """See base class: measures the gradient at the loss."""
        micro_batch = _MicroBatch(divisor, self._tracker.micro_steps)
        self._micro_batches.append(micro_batch)
        self._begin()
        if loss is not None and loss.requires_grad:

            def on_loss(grad: torch.Tensor) -> None:
                micro_batch.loss_factor = grad.detach().float().sum()

            loss.register_hook(on_loss)  # type: ignore[no-untyped-call]  # torch's is untyped

    def pass_opened(self, micro_batch: int, chunk: int) -> None:
        """See base class: all passes of one micro-batch are one entry."""
        self._passes.append((micro_batch, chunk))
        known = next((m for m in self._micro_batches if m.number == micro_batch), None)
        if known is not None:
            self._micro_batches.remove(known)
        entry = known or _MicroBatch(float(self._tracker.divisor), 0, number=micro_batch)
        entry.micro_step = self._tracker.micro_steps
        self._micro_batches.append(entry)
        self._begin()

    def loss_known(self, micro_batch: int, loss: torch.Tensor) -> None:
        """See base class: measures the gradient at the loss."""
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
        """See base class."""
        self._is_open = False
        self._sealed.clear()

    def _make_hook(self, param: nn.Parameter) -> Callable[[torch.Tensor], None]:
        def on_gradient(grad: torch.Tensor) -> None:
            self._enter(param, grad.detach())

        return on_gradient

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
        """See base class: what comes later in this backward is late unless it is sent again."""
        for param in params:
            self._sealed.add(param)
            self._late.pop(param, None)

    def replaced(self, param: nn.Parameter) -> None:
        """See base class: it is not checked at this step."""
        self._excused.add(param)

    def skip_window(self) -> None:
        """Check nothing until the next `cleared`: the ledger has not seen the beginning."""
        self._skips_window = True

    def resumed(self, is_empty: Callable[[], bool]) -> None:
        """See base class."""
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
        """See base class."""
        self._forget_contributions()
        self._passes.clear()
        self._at_loss.clear()
        self._excused.clear()
        self._skips_window = False

    # The credit side

    @torch.no_grad()
    def settled(self, factor: float) -> None:
        """See base class: compares the gradient that is about to be used with the contributions.

        Raises:
            GradientLedgerError: On all ranks, if a parameter's gradient deviates on one.
        """
        if self._skips_window:
            return
        self._share_loss_factors()
        contributions, norms = self._weighted_contributions()
        norm = norms.sum(0)
        # One payload: the right gradient's fingerprints, the sum of the contributions' norms, and
        # the allowed deviation. [pieces, DIMS + 2]
        totals = torch.cat(
            [contributions.sum(0), norm[:, None], self._bounds(norm)[:, None]], dim=1
        )
        self._contributors.add_up(totals)
        found = self._found(factor)
        right, norm, tolerance = (
            totals[:, :DIMS],
            totals[:, DIMS],
            SLACK * totals[self._held, DIMS + 1],
        )
        wrong = self._deviates(found, right[self._held], tolerance)
        absent = self._absent_passes()
        anywhere = (wrong.any() | bool(absent)).float().reshape(1)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self._scope.everyone)
        # The one moment when the host waits for the device.
        is_wrong, *sizes = torch.cat([anywhere, norm]).tolist()
        self.steps += 1
        self._note_zero_gradients(sizes)
        if is_wrong:
            self._report(contributions, found, tolerance, wrong, absent)
        self._before = found

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
        """What a schedule has not run, or twice, in words."""
        passes = self._scope.passes
        if passes is None:
            return []
        absent = []
        for number, chunk in itertools.product(range(passes.micro_batches), range(passes.chunks)):
            times = self._passes.count((number, chunk))
            if times != 1:
                place = (
                    f" through chunk {chunk + 1} of {passes.chunks}" if passes.chunks > 1 else ""
                )
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
        """Fingerprints `[A, pieces, DIMS]` and norms `[A, pieces]` with their weight in the
        definition.
        """
        num_pieces = len(self._pieces)
        passes = self._scope.passes
        num_micro = (
            len(self._micro_batches)
            if passes is None
            else max(passes.micro_batches, len(self._micro_batches))
        )
        prints = torch.zeros(num_micro, num_pieces, DIMS, device=self._device)
        norms = torch.zeros(num_micro, num_pieces, device=self._device)
        if not num_pieces:
            return prints, norms
        zero, zero_norm = (
            torch.zeros(DIMS, device=self._device),
            torch.zeros((), device=self._device),
        )
        for position, micro_batch in enumerate(self._micro_batches):
            row = position if micro_batch.number is None else micro_batch.number
            entries = [
                micro_batch.entries.get(index, [(zero, zero_norm)]) for index in range(num_pieces)
            ]
            weight = self._weight(micro_batch)
            prints[row] = (
                torch.stack([_sum([print_ for print_, _ in of_piece]) for of_piece in entries])
                * weight
            )
            norms[row] = (
                torch.stack([_sum([norm for _, norm in of_piece]) for of_piece in entries]) * weight
            )
        return prints, norms

    def _weight(self, micro_batch: _MicroBatch) -> torch.Tensor | float:
        """1/(N*A) of the definition over the loss factor; see the module's text."""
        share = 1.0 if self._sum_op else 1.0 / self._scope.num_replicas
        return share / (micro_batch.divisor * micro_batch.factor())

    def _found(self, factor: float) -> torch.Tensor:
        """Fingerprints of what this rank holds, as the optimizer will use it; `[held, DIMS]`."""
        prints = [torch.zeros(0, DIMS, device=self._device)]
        for index in self._held:
            piece = self._pieces[index]
            assert piece.read is not None, f"{self._names[index]} is listed as held"
            held = piece.read()
            prints.append(
                self._fingerprint(held.device).of(held, piece.start).to(self._device)[None]
            )
        return torch.cat(prints) * factor

    def _bounds(self, norms: torch.Tensor) -> torch.Tensor:
        """This rank's part of the allowed deviation, before SLACK; see [Note: tolerance].

        Each rank knows best how its own contributions were rounded, so the parts are added up over
        ranks.

        Args:
            norms: M of this rank's contributions; `[pieces]`.

        Returns:
            Shape `[pieces]`.
        """
        relative, absolute = [], []
        for index, (piece, num_parts) in enumerate(
            zip(self._pieces, self._contributors.num_parts, strict=True)
        ):
            firings = [len(m.entries.get(index, ())) for m in self._micro_batches]
            narrowest = piece.sums_in
            if max(firings, default=0) > 1 or any(m.is_unnoticed for m in self._micro_batches):
                # Autograd itself added to `param.grad` before any accumulator came.
                narrowest = max(
                    narrowest, piece.param.dtype, key=lambda dtype: torch.finfo(dtype).eps
                )
            roundings = sum(firings) + self._scope.num_replicas + num_parts
            relative.append(
                roundings * torch.finfo(narrowest).eps / 2 + fingerprint_roundoff(piece.numel)
            )
            absolute.append(
                roundings * FP16_SMALLEST * math.sqrt(piece.numel)
                if narrowest == torch.float16
                else 0.0
            )
        smallest = torch.tensor(absolute, dtype=torch.float32, device=self._device)
        if self._micro_batches:
            # Subnormals are those of scaled gradients.
            smallest = smallest * self._weight(self._micro_batches[-1])
        return torch.tensor(relative, dtype=torch.float32, device=self._device) * norms + smallest

    def _deviates(
        self, found: torch.Tensor, right: torch.Tensor, tolerance: torch.Tensor
    ) -> torch.Tensor:
        """Which held pieces are wrong; bool, `[held]`."""
        within = (found - right).norm(dim=1) <= tolerance  # false for NaN
        # A contribution that is not finite makes a step that is skipped; there is no value to
        # compare.
        comparable = right.isfinite().all(1) & tolerance.isfinite()
        held = [self._pieces[index] for index in self._held]
        # Finite fp16 contributions may have a sum that is not.
        in_fp16 = torch.tensor(
            [torch.float16 in (p.sums_in, p.param.dtype) for p in held],
            dtype=torch.bool,
            device=self._device,
        )
        overflows = in_fp16 & ~found.isfinite().all(1)
        excused = torch.tensor(
            [piece.param in self._excused for piece in held], dtype=torch.bool, device=self._device
        )
        return torch.logical_not(within | overflows | excused) & comparable

    def _note_zero_gradients(self, sizes: Sequence[float]) -> None:
        seen: dict[str, float] = {}
        for name, size in zip(self._names, sizes, strict=True):
            seen[name] = max(seen.get(name, 0.0), size if size == size else 1.0)
        self.zero_gradients = tuple(name for name, size in seen.items() if size == 0.0)
        if self.zero_gradients and self.zero_gradients not in self._warned:
            self._warned.add(self.zero_gradients)
            if self._contributors.speaks:
                logger.warning(
                    "gradient ledger: exactly zero on all ranks: %s", _shown(self.zero_gradients)
                )

    # Errors

    def _report(
        self,
        contributions: torch.Tensor,
        found: torch.Tensor,
        tolerance: torch.Tensor,
        wrong: torch.Tensor,
        absent: list[str],
    ) -> None:
        record = RankRecord(
            contributions.cpu(),
            self._late_contributions().cpu(),
            self._held,
            found.cpu(),
            None if self._before is None else self._before.cpu(),
            tolerance.cpu(),
            wrong.nonzero().flatten().tolist(),
        )
        keys = [
            PieceKey(name, piece.start, piece.numel)
            for name, piece in zip(self._names, self._pieces, strict=True)
        ]
        report = RankReport(
            record, keys, self._contributors.holders, self._contributors.sharers, absent
        )
        group = self._scope.everyone
        reports: list[Any] = [None] * dist.get_world_size(group=group)
        dist.all_gather_object(reports, report, group=group)
        by_rank = dict(zip(dist.get_all_ranks_from_group(group), reports, strict=True))
        findings = explain_all(by_rank, self._scope.num_replicas)
        self.findings += findings
        ranks = [rank for rank, other in by_rank.items() if other.record.wrong or other.absent]
        text = "\n".join(f"  {finding}" for finding in findings)
        message = (
            f"gradient ledger, check {self.steps}: wrong gradients are about to be used on rank(s) "
            f"{ranks}:\n{text}"
        )
        if self._raises:
            raise GradientLedgerError(message, findings)
        logger.error(message)

    def _late_contributions(self) -> torch.Tensor:
        """What came after its bucket was sealed and was not sent again; `[pieces, DIMS]`."""
        late = torch.zeros(len(self._pieces), DIMS, device=self._device)
        for micro_batch, piece, entry in (
            place for places in self._late.values() for place in places
        ):
            late[piece] += micro_batch.entries[piece][entry][0] * self._weight(micro_batch)
        return late

    def report(self) -> str:
        """What the ledger has seen so far, in words."""
        lines = [
            f"gradient ledger: {self.steps} checks of {len(self._by_param)} parameters, "
            f"{len(self.findings)} finding(s)"
        ]
        lines += [f"  {finding}" for finding in self.findings]
        if self.zero_gradients:
            lines.append(f"  exactly zero on all ranks: {_shown(self.zero_gradients)}")
        return "\n".join(lines)

    def detached(self) -> None:
        """See base class."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}
        self._micro_batches = []


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
