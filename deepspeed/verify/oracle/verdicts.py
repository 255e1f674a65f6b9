"""From what runs found to the rows of the table. Pure: reads results, runs nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import zip_longest
from typing import Any

from pydantic import TypeAdapter

from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.utils.exceptions import MisuseError
from deepspeed.verify.oracle.judge import Deviation, StepFindings
from deepspeed.verify.oracle.plan import AS_CONFIGURED, LEFT_OUT, TRACED_BACKEND, Plan, Run, RunKind
from deepspeed.verify.oracle.ranks import Outcome, Session
from deepspeed.verify.oracle.report import Report, Row, Verdict

MOST_NAMED = 3
_STEP = TypeAdapter(StepFindings)

Outside = dict[str, tuple[int, Deviation]]
"""Parameter -> first step at which it was outside its allowance, and by how much."""


# What torch.compile raises of code that it does not take, and the engine of what it cannot compile.
COMPILER_ERRORS = frozenset(
    "BackendCompilerFailed InternalTorchDynamoError TorchRuntimeError Unsupported UserError "
    "NotImplementedError".split()
)
_CALLED = {"parameters": "value after the step"}  # others are gradients


def family_of(name: str) -> str:
    """A parameter's name with layer numbers left out: one family per place in a repeated block."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def make_report(plan: Plan, session: Session, settings: dict[str, Any]) -> Report:
    """Make all rows, notes and curves of a session."""
    if session.not_started:
        rows = [Row("start of the ranks", Verdict.FAIL, session.not_started)]
        rows += [Row(run.name, Verdict.NOT_RUN, "the ranks did not start") for run in plan.runs]
        return Report(rows, [], {}, settings)
    rows, curves, notes = _same_everywhere(session), {}, []
    for entry in session.ready[:1]:
        notes += entry["notes"]
    for run in plan.runs:
        outcome = session.outcomes.get(run.name, Outcome(failure="was not reached"))
        for result in outcome.ranks[:1]:
            curves[run.name] = _curves(outcome, _findings(outcome))
            notes += [note for note in result.get("notes", []) if note not in notes]
        if run.kind in _ROWS:
            rows += _ROWS[run.kind](run, outcome)
    if not plan.only_exact:
        rows += _absent(plan)
        simulated = [run for run in plan.runs if run.kind is RunKind.SIM]
        rows += _stream_rows([(run, session.outcomes[run.name]) for run in simulated])
    rows += _exact_rows(plan, session)
    return Report(rows, notes, curves, settings, _not_covered(plan, rows, settings))


def _not_covered(plan: Plan, rows: list[Row], settings: dict[str, Any]) -> list[str]:
    """Name what no row says anything of."""
    config = settings.get("config", {})
    loads = any(run.kind is RunKind.RESUMED for run in plan.runs)
    on_host = (config.get("zero_optimization") or {}).get("offload_optimizer")
    lacks_native = bool(on_host) and CPUAdamBuilder().compiler() is None
    return [
        "kernels, collectives and times of a device",
        f"more than {plan.ranks} ranks or {plan.steps} steps",
        "evaluation",
        "the order of a sampler",
        *(["all other rows (--exact)"] if plan.only_exact else []),
        *([] if loads else ["saving and loading (--checkpoint)"]),
        *(["native optimizers of the host (no C++ compiler)"] if lacks_native else []),
        *dict.fromkeys(row.check for row in rows if row.verdict is Verdict.NOT_RUN),
        *(name for name, block in config.items() if name in LEFT_OUT and isinstance(block, dict)),
    ]


# What all rows need


def _findings(outcome: Outcome) -> list[StepFindings]:
    # From whichever rank judged a step.
    found = [_STEP.validate_python(one) for result in outcome.ranks for one in result["findings"]]
    of_optimizer = outcome.ranks[0].get("parameters", {}) if outcome.ranks else {}
    for one in found:
        for name, value in of_optimizer.get(str(one.step), {}).items():
            one.parameters[name] = Deviation(**value)
    return sorted(found, key=lambda one: one.step)


def _every(findings: Iterable[StepFindings], what: str) -> list[Deviation]:
    return [value for one in findings for value in getattr(one, what).values()]


def _worst(deviations: Iterable[Deviation]) -> float | None:
    return max(map(_share, deviations), default=None)


def _share(one: Deviation) -> float:
    """Return the error as a share of the allowance; infinite for NaN."""
    if math.isnan(one.error):
        return math.inf
    return one.error / one.bound if one.bound > 0 else (0.0 if one.error == 0 else math.inf)


def _outside(
    findings: list[StepFindings], what: str, names: Container[str] | None = None
) -> Outside:
    """Find the first step at which each failing parameter was outside its allowance."""
    found: Outside = {}
    for one in findings:
        for name, value in getattr(one, what).items():
            if (names is None or name in names) and not value.is_within:
                found.setdefault(name, (one.step, value))
    return found


def _describe(what: str, outside: Outside) -> str:
    name, (step, value) = max(outside.items(), key=lambda item: _share(item[1][1]))
    more = f" and {len(outside) - MOST_NAMED} more" if len(outside) > MOST_NAMED else ""
    return (
        f"{what} of {', '.join(list(outside)[:MOST_NAMED])}{more} wrong: at step {step} {name} is "
        f"off by {value.error:.2e}, allowed {value.bound:.2e}, its norm {value.size:.2e}"
    )


def _fail(row: Row, detail: str, parameters: Iterable[str] = ()) -> Row:
    row.verdict, row.detail, row.parameters = Verdict.FAIL, detail, list(parameters)
    return row


def _judge(row: Row, findings: list[StepFindings], gradients: str = "gradients") -> Row:
    """Fail by what is outside its allowance; parameters come last, as clipping spreads errors."""
    row.gradient = _worst(_every(findings, gradients))
    for what in ("gradients", "parameters") if gradients == "gradients" else (gradients,):
        if outside := _outside(findings, what):
            return _fail(row, _describe(_CALLED.get(what, "gradient"), outside), sorted(outside))
        if what == "parameters":
            row.parameter = _worst(_every(findings, what))
    return row


# Before any training


def _same_everywhere(session: Session) -> list[Row]:
    """Ask whether all ranks made the same model and data, without which there is no reference."""
    if not session.ready:
        return []
    first = session.ready[0]
    many = len(session.ready)
    row = Row("same model and data", detail=f"{many} ranks made equal weights and batches")
    for what, name in (("weights", "initial weights"), ("batches", "batches")):
        apart = [rank for rank, said in enumerate(session.ready) if said[what] != first[what]]
        if apart:
            text = f"ranks 0 and {apart[0]} made different {name} from one seed"
            return [_fail(row, f"{text}; let the function draw from torch's generator only")]
    return [row]


def _absent(plan: Plan) -> list[Row]:
    kinds = {run.kind for run in plan.runs}
    rows = []
    if RunKind.USER not in kinds:
        text = "the configuration names no optimizer"
        rows.append(Row("configured optimizer", Verdict.NOT_RUN, text))
    if RunKind.COMPILED not in kinds:
        rows.append(Row("eager = compiled", Verdict.NOT_RUN, plan.no_compile))
    if RunKind.SPLIT not in kinds:
        verdict = Verdict.LEFT_OUT if plan.no_whole else Verdict.NOT_RUN
        rows.append(Row("accumulation invariance", verdict, plan.no_split))
    return rows


# Training runs


def _training_rows(run: Run, outcome: Outcome) -> list[Row]:
    label = "SGD" if run.kind is RunKind.SGD else run.name
    if outcome.failure:
        return [Row(label, Verdict.FAIL, f"no result: {outcome.failure}")]
    findings = _findings(outcome)
    rows = []
    if run.kind is RunKind.SGD:
        rows += [_start_row(outcome), _model_row(findings, outcome)]
    rows += _family_rows(label, run, findings)
    return [*rows, _norm_row(label, findings), _ranks_row(label, outcome)]


def _start_row(outcome: Outcome) -> Row:
    found = {name: Deviation(**value) for name, value in outcome.ranks[0]["start"].items()}
    row = Row("initial weights", detail="masters are the model's weights, rounded to its dtype")
    wrong = {name: (0, one) for name, one in found.items() if not one.is_within}
    if wrong:
        return _fail(row, _describe("fp32 weight", wrong), wrong)
    row.parameter = _worst(found.values())
    return row


def _model_row(findings: list[StepFindings], outcome: Outcome) -> Row:
    """Tell whether the model itself lets its batch be cut: no engine can repair it if not."""
    row = Row("model: micro-batches = whole batch", detail="one process, double precision")
    if not any(one.split for one in findings):
        return _without_whole(row, outcome)
    _judge(row, findings, "split")
    if row.verdict is Verdict.FAIL:
        why = "in one plain process, so the loss or the backward depends on how the batch is cut"
        row.detail += f" ({why})"
    return row


def _without_whole(row: Row, outcome: Outcome) -> Row:
    """Say why a check that needs the gradient of the whole batch has none."""
    reason, of_data = outcome.ranks[0]["no_whole"]
    # A model that is another one in each cut has no whole batch to be checked against.
    row.verdict = Verdict.NOT_RUN if reason and not of_data else Verdict.LEFT_OUT
    row.detail = reason or "the step was skipped"
    return row


def _family_rows(label: str, run: Run, findings: list[StepFindings]) -> list[Row]:
    compared = [one for one in findings if not one.skipped]
    if not compared:
        if not findings:
            return [Row(label, Verdict.FAIL, "no step was judged")]
        why = f"no step could be compared ({findings[0].skipped})"
        remedy = "raise --steps or lower fp16.initial_scale_power"
        return [Row(label, Verdict.LEFT_OUT, f"{why}; {remedy}")]
    families: dict[str, set[str]] = {}
    for name in compared[0].gradients:
        families.setdefault(family_of(name), set()).add(name)
    # Clipping spreads one wrong gradient over all parameters; then only the gradients tell where it
    # is.
    judged = ("gradients",) if _outside(compared, "gradients") else ("gradients", "parameters")
    return [
        _family_row(Row(label, family=f), n, run, compared, judged) for f, n in families.items()
    ]


def _family_row(
    row: Row, names: set[str], run: Run, findings: list[StepFindings], judged: Sequence[str]
) -> Row:
    wrong: list[str] = []
    culprits: set[str] = set()
    for what in judged:
        values = [v for one in findings for n, v in getattr(one, what).items() if n in names]
        if what == "gradients":
            row.gradient = _worst(values)
            row.relative = max(
                (one.error / one.size for one in values if one.size > 0), default=None
            )
        else:
            row.parameter = _worst(values)
        if outside := _outside(findings, what, names):
            wrong.append(_describe(_CALLED.get(what, "gradient"), outside))
            culprits |= outside.keys()
    row.divisor, expected, allowed = _divisor(names, run, findings)
    if row.divisor is not None and not abs(row.divisor / expected - 1) <= allowed:
        wrong.append(f"divided by {row.divisor:.4g}, not by {expected:g}")
    return _fail(row, "; ".join(wrong), sorted(culprits)) if wrong else row


def _divisor(
    names: set[str], run: Run, findings: list[StepFindings]
) -> tuple[float | None, float, float]:
    """Measure a family's divisor: A * N times the reference, projected on it, by the system's
    gradient. Return it, what it must be, and the relative error allowed.
    """
    summed = str(run.config.get("gradient_allreduce_op", "mean")) == "sum"
    expected = float(run.shape.accumulation if summed else run.shape.micro_batches)
    products = [one.products[name] for one in findings for name in names if name in one.products]
    own, other = (sum(column) for column in zip(*products, strict=True)) if products else (0.0, 0.0)
    bounds = math.sqrt(sum(one.gradients[name].bound ** 2 for one in findings for name in names))
    # Where rounding is as large as the gradient, a quotient says nothing.
    if other <= 0 or bounds > 0.25 * math.sqrt(other):
        return None, expected, 0.0
    if own <= 0:
        return math.inf, expected, 0.0
    return expected * other / own, expected, 2 * bounds / math.sqrt(other)


def _norm_row(label: str, findings: list[StepFindings]) -> Row:
    norms = {str(one.step): one.norm for one in findings if one.norm is not None}
    wrong = [(step, one) for step, one in norms.items() if not one.is_within]
    row = Row(f"{label}: gradient norm", gradient=_worst(norms.values()))
    if not norms:
        row.verdict, row.detail = Verdict.LEFT_OUT, "no step could be compared"
    for step, one in wrong[:1]:
        text = f"the reported norm is off by {one.error:.2e}, allowed {one.bound:.2e}"
        _fail(row, f"at step {step} {text}; it must be {one.size:.6g}")
    return row


def _ranks_row(label: str, outcome: Outcome) -> Row:
    row = Row(f"{label}: equal on all ranks")
    results = list(enumerate(outcome.ranks))
    faults = [f"rank {rank}: {fault}" for rank, result in results for fault in result["faults"]]
    seen: dict[tuple[int, str], tuple[int, str]] = {}
    for rank, result in results:
        for step, digests in enumerate(result["checksums"]):
            for holders, digest in digests.items():
                first, wanted = seen.setdefault((step, holders), (rank, digest))
                if digest != wanted:
                    name = holders.partition(" of ")[0]
                    text = f"after step {step} ranks {first} and {rank} hold another {name}"
                    return _fail(row, text, [name])
    if faults:
        more = f" and {len(faults) - 1} more findings" if len(faults) > 1 else ""
        return _fail(row, faults[0] + more)
    row.detail = "bit for bit, and every parameter is its rounded master"
    return row


def _whole_rows(run: Run, outcome: Outcome) -> list[Row]:
    """Judge gradients of another cut, or of the compiled model, by the whole batch."""
    check = "eager = compiled" if run.kind is RunKind.COMPILED else "accumulation invariance"
    row = Row(check, family=run.name)
    if outcome.failure:
        # Nobody who did not ask for a compiler need have a model that it takes.
        is_refused = run.backend == TRACED_BACKEND and outcome.kind in COMPILER_ERRORS
        row.verdict = Verdict.NOT_RUN if is_refused else Verdict.FAIL
        row.detail = f"no result: {outcome.failure}"
        return [row]
    findings = [one for one in _findings(outcome) if not one.skipped]
    # A model that is another one in each cut is compiled all the same.
    what = "gradients" if run.kind is RunKind.COMPILED else "whole"
    if not any(getattr(one, what) for one in findings):
        return [_without_whole(row, outcome)]
    return [_judge(row, findings, what)]


def _batched_rows(run: Run, outcome: Outcome) -> list[Row]:
    """Judge steps by one call as those of the loop; in the engine's words where it refuses them."""
    row = Row("train_batch = loop", detail="whole steps by one call, all micro-batches together")
    if outcome.failure:
        is_refused = outcome.kind == MisuseError.__name__
        row.verdict = Verdict.NOT_RUN if is_refused else Verdict.FAIL
        row.detail = outcome.failure.partition(f"{outcome.kind}: ")[2] or outcome.failure
        return [row]
    return [_compared(row, _findings(outcome))]


def _resumed_rows(run: Run, outcome: Outcome) -> list[Row]:
    """Judge the second half of a run, that began at a checkpoint, as one that did not stop."""
    row = Row("checkpoint = not stopped", family=run.name)
    faults = [fault for result in outcome.ranks for fault in result["faults"]]
    if outcome.failure or faults:
        return [_fail(row, f"no result: {outcome.failure}" if outcome.failure else faults[0])]
    return [_compared(row, _findings(outcome))]


def _compared(row: Row, findings: list[StepFindings]) -> Row:
    """Judge the steps that were taken; without one nothing was checked."""
    taken = [one for one in findings if not one.skipped]
    if taken:
        return _judge(row, taken)
    reason = next((one.skipped for one in findings), "no step")
    return Row(row.check, Verdict.LEFT_OUT, f"no step could be compared ({reason})", row.family)


# Watched runs

_WATCHED = {
    RunKind.LEDGER: ("gradient ledger", "every contribution reached the optimizer once"),
    RunKind.COLLECTIVES: (
        "collective agreement",
        "all ranks issued the same collectives in the same order",
    ),
    RunKind.FROZEN: (
        "parameters frozen later",
        "they stand still while frozen, masters bit for bit, and are trained again",
    ),
    RunKind.WRITTEN: ("writes into the model", "masters follow, and the next step keeps them"),
}


def _watched_rows(run: Run, outcome: Outcome) -> list[Row]:
    check, clean = _WATCHED[run.kind]
    row = Row(check, detail=f"{clean} ({run.steps} steps)")
    return [_fail(row, outcome.failure) if outcome.failure else row]


def _stream_rows(runs: list[tuple[Run, Outcome]]) -> list[Row]:
    checks = "stream races", "memory lifetimes", "queues and processors", "simulated device = host"
    if not runs:
        return [Row(check, Verdict.NOT_RUN, "not asked for (--schedules 0)") for check in checks]
    for run, outcome in runs:
        if outcome.failure:
            return [Row(checks[0], Verdict.FAIL, f"{run.name}: {outcome.failure}")]
    first = runs[0][0]
    bucket = first.config["zero_optimization"]["reduce_bucket_size"]
    where = (
        f"{len(runs) - 1} schedules x {first.steps} steps on the simulated device, "
        f"reduce_bucket_size {bucket:,}, pieces of {first.piece_numel:,}; "
        f"{runs[-1][0].steps} steps {AS_CONFIGURED}"
    )
    results = ((run.name, result) for run, outcome in runs for result in outcome.ranks)
    hazards = [(name, hazard) for name, result in results for hazard in result["hazards"]]
    rows = []
    for check, is_race in ((checks[0], True), (checks[1], False)):
        mine = [(name, hazard) for name, hazard in hazards if (hazard["kind"] == "race") == is_race]
        row = Row(check, detail=f"none in {where}")
        if mine:
            _fail(row, f"{len(mine)} in {where}; {mine[0][0]}: {mine[0][1]['text']}")
        rows.append(row)
    hangs = [(run.name, outcome.ranks[0]["hangs"]) for run, outcome in runs]
    row = Row(checks[2], detail=f"no device with few of them hangs in {where}")
    for name, text in [one for one in hangs if one[1]][:1]:
        _fail(row, f"{name}: {text}")
    return [*rows, row, _simulated_row(checks[3], where, runs)]


def _simulated_row(check: str, where: str, runs: list[tuple[Run, Outcome]]) -> Row:
    """Compare each step with one process that begins it at the same weights: what a step before
    rounded otherwise is no error of this one, whatever it grows to behind a choice that jumps.
    """
    row = Row(check, detail=f"steps equal those of one process on the host ({where})")
    found = {run.name: _findings(outcome) for run, outcome in runs}
    for name, steps in found.items():
        _judge(row, steps)
        if row.verdict is Verdict.FAIL:
            row.detail = f"{name}: {row.detail}"
            return row
    return _compared(row, [one for steps in found.values() for one in steps])


# Equal bits

_OF_PARAMETERS = _GRADIENT, _STATE = "gradient", "master or optimizer state"


def _exact_rows(plan: Plan, session: Session) -> list[Row]:
    """Compare ranks with one process by equality, where the canonical sum is possible."""
    digested = [run for run in plan.runs if run.kind.is_digested]
    row, lines = Row(f"exact: one process = {plan.ranks} ranks"), []
    for run in digested:
        outcome = session.outcomes.get(run.name, Outcome(failure="was not reached"))
        if outcome.kind == DeepSpeedConfigError.__name__:
            row.verdict = Verdict.NOT_RUN
            row.detail = outcome.failure.partition(f"{outcome.kind}: ")[2]
            return [row]
        if outcome.failure:
            return [_fail(row, f"no result: {outcome.failure}")]
        lines.append(_digest_lines(outcome))
    if not lines:
        return []
    for step, (one, other) in enumerate(zip(*lines, strict=True)):
        for what, of_names in one.items():
            names = [name for name, value in of_names.items() if other[what].get(name) != value]
            if names:
                where = f"at step {step - 1}" if step else "before the first step"
                more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
                text = f"{where} other bits: {what} of {', '.join(names[:MOST_NAMED])}{more}"
                return [_fail(row, text, names if what in _OF_PARAMETERS else ())]
    if lines[0][0][_STATE] == lines[0][-1][_STATE]:
        row.verdict, row.detail = Verdict.LEFT_OUT, "every step was skipped"
    row.detail = row.detail or (
        "gradients, masters, optimizer state, losses and norms of "
        f"{digested[0].steps} steps with reproducibility.world_size_invariant, bit for bit"
    )
    return [row]


def _digest_lines(outcome: Outcome) -> list[dict[str, dict[str, Any]]]:
    """What a run is known by, before its first step and after each: what it is, of what, digest or
    value.
    """
    first = outcome.ranks[0]
    found: list[dict[str, dict[str, Any]]] = [{_STATE: first["digests"][0]}]
    for step, state in enumerate(first["digests"][1:]):
        each = (result["micro_losses"][step] for result in outcome.ranks)
        # In the order in which micro-batches are dealt.
        losses = [loss for losses in zip_longest(*each) for loss in losses if loss is not None]
        by_number = {f"micro-batch {number}": loss for number, loss in enumerate(losses)}
        norms = sorted({repr(result["norms"][step]) for result in outcome.ranks})
        found.append({_GRADIENT: first["gradients"][step], _STATE: state})
        found[-1] |= {"loss": by_number, "norm": {"all parameters": norms}}
    return found


def _curves(outcome: Outcome, findings: list[StepFindings]) -> dict[str, list[Any]]:
    def finite(value: float | None) -> float | None:
        return None if value is None or not math.isfinite(value) else value

    every = zip(*(rank["losses"] for rank in outcome.ranks), strict=True)
    return {
        "loss": [finite(sum(losses) / len(losses)) for losses in every],
        "norm": [finite(value) for value in outcome.ranks[0]["norms"]],
        "step": [one.step for one in findings],
        "expected_norm": [None if one.norm is None else finite(one.norm.size) for one in findings],
        "gradient": [finite(_worst(one.gradients.values())) for one in findings],
        "parameter": [finite(_worst(one.parameters.values())) for one in findings],
    }


_ROWS: dict[RunKind, Callable[[Run, Outcome], list[Row]]] = {
    RunKind.SGD: _training_rows,
    RunKind.USER: _training_rows,
    RunKind.RESUMED: _resumed_rows,
    RunKind.SPLIT: _whole_rows,
    RunKind.COMPILED: _whole_rows,
    RunKind.BATCHED: _batched_rows,
    RunKind.LEDGER: _watched_rows,
    RunKind.COLLECTIVES: _watched_rows,
    RunKind.FROZEN: _watched_rows,
    RunKind.WRITTEN: _watched_rows,
}
