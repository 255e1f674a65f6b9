"""The gradient ledger: double-entry bookkeeping of every contribution, from autograd to the
optimizer.

Debit: each (parameter, rank, micro-batch) contribution, fingerprinted as it leaves autograd
(`recorder`).
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

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.runtime.gradients.accumulation import AccumulationTracker
from deepspeed.runtime.gradients.ledger.contributors import ContributorSum, with_common_cuts
from deepspeed.runtime.gradients.ledger.families import PieceKey, RankReport, explain_all
from deepspeed.runtime.gradients.ledger.findings import NAMES_SHOWN, LedgerFinding, RankRecord
from deepspeed.runtime.gradients.ledger.fingerprint import DIMS, SLACK, fingerprint_roundoff
from deepspeed.runtime.gradients.ledger.recorder import ContributionRecorder
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


class GradientLedger(ContributionRecorder):
    """See module. Construction is collective where parts of the model share parameters.

    Args:
        pieces: All pieces of all parameters, in an order that is the same on all ranks that hold
            them.
        sum_op: `gradient_allreduce_op` is "sum".
        raises: Raise on a deviation; otherwise it is only added to `findings`.
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

        def name_of(param: nn.Parameter) -> str:
            return names.get(param, f"a parameter of shape {tuple(param.shape)}")

        super().__init__(with_common_cuts(pieces, scope, name_of), scope, tracker, sum_op)
        self._names = [name_of(piece.param) for piece in self._pieces]
        self._contributors = ContributorSum(self._pieces, scope)
        self._raises = raises
        self._held = [index for index, piece in enumerate(self._pieces) if piece.read is not None]
        self._excused: set[nn.Parameter] = set()
        self._before: torch.Tensor | None = None
        self._warned: set[tuple[str, ...]] = set()
        self._skips_window = False

    def replaced(self, param: nn.Parameter) -> None:
        self._excused.add(param)

    def skip_window(self) -> None:
        self._skips_window = True

    def cleared(self) -> None:
        super().cleared()
        self._excused.clear()
        self._skips_window = False

    @torch.no_grad()
    def settled(self, factor: float) -> None:
        """Compare the gradient that is about to be used with the contributions.

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
        right, norm = totals[:, :DIMS], totals[:, DIMS]
        tolerance = SLACK * totals[self._held, DIMS + 1]
        wrong = self._deviates(found, right[self._held], tolerance)
        absent = self._absent_passes()
        anywhere = (wrong.any() | bool(absent)).float().reshape(1)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self._scope.everyone)
        # The one moment when the host waits for the device.
        is_wrong, *sizes = torch.cat([anywhere, norm]).tolist()
        self.steps += 1
        self._note_zero_gradients(sizes)
        self._note_unseen()
        if is_wrong:
            self._report(contributions, found, tolerance, wrong, absent)
        self._before = found

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
        """This rank's part of the allowed deviation `[pieces]` for its contributions' norms, before
        SLACK: it knows best how they were rounded. See [Note: tolerance].
        """
        relative, absolute = [], []
        for index, (piece, num_parts) in enumerate(
            zip(self._pieces, self._contributors.num_parts, strict=True)
        ):
            firings = [len(m.entries.get(index, ())) for m in self._micro_batches]
            narrowest = piece.sums_in
            if max(firings, default=0) > 1 or any(m.is_unnoticed for m in self._micro_batches):
                # Autograd itself added to `param.grad` before any accumulator came.
                narrowest = max(narrowest, piece.param.dtype, key=lambda one: torch.finfo(one).eps)
            roundings = sum(firings) + self._scope.num_replicas + num_parts
            relative.append(
                roundings * torch.finfo(narrowest).eps / 2 + fingerprint_roundoff(piece.numel)
            )
            denormal = FP16_SMALLEST if narrowest == torch.float16 else 0.0
            absolute.append(roundings * denormal * math.sqrt(piece.numel))
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
        are_fp16 = [torch.float16 in (p.sums_in, p.param.dtype) for p in held]
        in_fp16 = torch.tensor(are_fp16, dtype=torch.bool, device=self._device)
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

    def _note_unseen(self) -> None:
        names = tuple(self._names[self._by_param[param][0]] for param in self._unseen)
        self._unseen.clear()
        if names and names not in self._warned:
            self._warned.add(names)
            logger.warning(
                "gradient ledger: not checked, as torch %s dropped the hooks of %s: a "
                "torch.autograd.Function saves them (let it save weight.detach()), and backward "
                "reads that through hooks of saved tensors, as of checkpoints or stage 3. A later "
                "torch keeps hooks",
                torch.__version__,
                _shown(names),
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
        named = zip(self._names, self._pieces, strict=True)
        keys = [PieceKey(name, piece.start, piece.numel) for name, piece in named]
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


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
