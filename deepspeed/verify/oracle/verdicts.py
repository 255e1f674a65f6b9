"""From what runs found to the rows of the table: PASS, FAIL with the parameter's name, NOT RUN or
LEFT OUT with the reason.

Pure: reads results, runs nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from deepspeed.verify.oracle.judge import Deviation, StepFindings
from deepspeed.verify.oracle.plan import AS_CONFIGURED, TRACED_BACKEND, Plan, Run, RunKind
from deepspeed.verify.oracle.ranks import Outcome, Session
from deepspeed.verify.oracle.report import Report, Row, Verdict

MOST_NAMED = 3

Outside = dict[str, tuple[int, Deviation]]
"""Parameter -> first step at which it was outside its allowance, and by how much."""


# What torch.compile raises of code that it does not take.
COMPILER_ERRORS = (
    "BackendCompilerFailed",
    "InternalTorchDynamoError",
    "TorchRuntimeError",
    "Unsupported",
    "UserError",
)


def family_of(name: str) -> str:
    """A parameter's name with layer numbers left out: one family per place in a repeated block."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def make_report(plan: Plan, session: Session, settings: dict[str, Any]) -> Report:
    """All rows, notes and curves of a session."""
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
        if run.kind is not RunKind.SIM:
            rows += _ROWS[run.kind](run, outcome)
    rows += _absent(plan)
    rows += _stream_rows(
        [(run, session.outcomes[run.name]) for run in plan.runs if run.kind is RunKind.SIM]
    )
    return Report(rows, notes, curves, settings)


# What all rows need


def _findings(outcome: Outcome) -> list[StepFindings]:
    # From whichever rank judged a step.
    found = [StepFindings.from_json(one) for result in outcome.ranks for one in result["findings"]]
    of_optimizer = outcome.ranks[0].get("parameters", {}) if outcome.ranks else {}
    for one in found:
        for name, value in of_optimizer.get(str(one.step), {}).items():
            one.parameters[name] = Deviation(**value)
    return sorted(found, key=lambda one: one.step)


def _failed_row(check: str, outcome: Outcome) -> Row:
    return Row(check, Verdict.FAIL, f"no result: {outcome.failure}")


def _worst(devs: Iterable[Deviation]) -> float | None:
    """Largest share of the allowance; infinite for NaN."""
    shares = [_share(one) for one in devs]
    return max(shares) if shares else None


def _share(one: Deviation) -> float:
    if math.isnan(one.error):
        return math.inf
    return one.error / one.bound if one.bound > 0 else (0.0 if one.error == 0 else math.inf)


def _named(names: Iterable[str]) -> str:
    listed = list(dict.fromkeys(names))
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return ", ".join(listed[:MOST_NAMED]) + more


def _outside(
    findings: list[StepFindings], pick: Callable[[StepFindings], dict[str, Deviation]]
) -> Outside:
    """First step at which each failing parameter was outside its allowance."""
    found: Outside = {}
    for one in findings:
        for name, value in pick(one).items():
            if not value.is_within:
                found.setdefault(name, (one.step, value))
    return found


def _describe(what: str, outside: Outside) -> str:
    name, (step, value) = max(outside.items(), key=lambda item: _share(item[1][1]))
    return (
        f"{what} of {_named(outside)} wrong: at step {step} {name} is off by {value.error:.2e}, "
        f"allowed {value.bound:.2e}, its norm {value.size:.2e}"
    )


# Before any training


def _same_everywhere(session: Session) -> list[Row]:
    """Ask whether all ranks made the same model and data, without which there is no reference."""
    if not session.ready:
        return []
    first = session.ready[0]
    for what, remedy in (("weights", "initial weights"), ("batches", "batches")):
        apart = [rank for rank, said in enumerate(session.ready) if said[what] != first[what]]
        if apart:
            text = (
                f"ranks 0 and {apart[0]} made different {remedy} from one seed; let the function "
                "draw from torch's generator only"
            )
            return [Row("same model and data", Verdict.FAIL, text)]
    return [
        Row(
            "same model and data",
            Verdict.PASS,
            f"{len(session.ready)} ranks made equal weights and batches",
        )
    ]


def _absent(plan: Plan) -> list[Row]:
    kinds = {run.kind for run in plan.runs}
    rows = []
    if RunKind.USER not in kinds:
        rows.append(
            Row("configured optimizer", Verdict.NOT_RUN, "the configuration names no optimizer")
        )
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
        return [_failed_row(label, outcome)]
    findings = _findings(outcome)
    rows = []
    if run.kind is RunKind.SGD:
        rows += [_start_row(outcome), _model_row(findings, outcome)]
    rows += _family_rows(label, run, findings)
    return [*rows, _norm_row(label, findings), _ranks_row(label, outcome)]


def _start_row(outcome: Outcome) -> Row:
    found = {name: Deviation(**value) for name, value in outcome.ranks[0]["start"].items()}
    wrong = {name: (0, one) for name, one in found.items() if not one.is_within}
    if wrong:
        return Row(
            "initial weights", Verdict.FAIL, _describe("fp32 weight", wrong), parameters=list(wrong)
        )
    return Row(
        "initial weights",
        Verdict.PASS,
        "masters are the model's weights, rounded to its dtype",
        parameter=_worst(found.values()),
    )


def _model_row(findings: list[StepFindings], outcome: Outcome) -> Row:
    """Whether the model itself lets its batch be cut: no engine can repair it if not."""
    check = "model: micro-batches = whole batch"
    if not any(one.split for one in findings):
        return _without_whole(check, outcome)
    outside = _outside(findings, lambda one: one.split)
    if outside:
        text = _describe("gradient", outside)
        why = "in one plain process, so the loss or the backward depends on how the batch is cut"
        return Row(check, Verdict.FAIL, f"{text} ({why})", parameters=list(outside))
    worst = _worst(value for one in findings for value in one.split.values())
    return Row(check, Verdict.PASS, "one process, double precision", gradient=worst)


def _without_whole(check: str, outcome: Outcome, family: str = "") -> Row:
    """The row of a check that needs the gradient of the whole batch, where there is none."""
    reason, of_data = outcome.ranks[0]["no_whole"]
    # A model that is another one in each cut has no whole batch to be checked against.
    verdict = Verdict.NOT_RUN if reason and not of_data else Verdict.LEFT_OUT
    return Row(check, verdict, reason or "the step was skipped", family=family)


def _family_rows(label: str, run: Run, findings: list[StepFindings]) -> list[Row]:
    compared = [one for one in findings if not one.skipped]
    if not compared:
        reason = findings[0].skipped if findings else "no step was judged"
        return [
            Row(
                label,
                Verdict.FAIL,
                f"no step could be compared ({reason}); raise --steps or lower "
                "fp16.initial_scale_power",
            )
        ]
    families: dict[str, list[str]] = {}
    for name in compared[0].gradients:
        families.setdefault(family_of(name), []).append(name)
    # Clipping spreads one wrong gradient over all parameters; then only the gradients tell where it
    # is.
    are_gradients_right = not _outside(compared, lambda one: one.gradients)
    return [
        _family_row(label, family, set(names), run, compared, are_gradients_right)
        for family, names in families.items()
    ]


def _family_row(
    label: str,
    family: str,
    names: set[str],
    run: Run,
    findings: list[StepFindings],
    judges_parameters: bool,
) -> Row:
    def only(values: dict[str, Deviation]) -> dict[str, Deviation]:
        return {name: value for name, value in values.items() if name in names}

    grads = [value for one in findings for value in only(one.gradients).values()]
    params = [
        value for one in findings for value in only(one.parameters).values() if judges_parameters
    ]
    row = Row(label, Verdict.PASS, family=family, gradient=_worst(grads), parameter=_worst(params))
    row.relative = max(
        (value.error / value.size for value in grads if value.size > 0), default=None
    )
    row.divisor, expected, allowed = _divisor(names, run, findings)
    wrong = []
    outside = _outside(findings, lambda one: only(one.gradients))
    if outside:
        wrong.append(_describe("gradient", outside))
    outside_params = (
        _outside(findings, lambda one: only(one.parameters)) if judges_parameters else {}
    )
    if outside_params:
        wrong.append(_describe("value after the step", outside_params))
    if row.divisor is not None and not abs(row.divisor / expected - 1) <= allowed:
        wrong.append(f"divided by {row.divisor:.4g}, not by {expected:g}")
    if wrong:
        row.verdict, row.detail = Verdict.FAIL, "; ".join(wrong)
        row.parameters = sorted({*outside, *outside_params})
    return row


def _divisor(
    names: set[str], run: Run, findings: list[StepFindings]
) -> tuple[float | None, float, float]:
    """Measure a family's divisor; return it, what it must be, and the relative error allowed.

    The undivided sum is the mean times A * N; the system's gradient projected on the reference
    gives the rest.
    """
    summed = str(run.config.get("gradient_allreduce_op", "mean")) == "sum"
    expected = float(run.shape.accumulation if summed else run.shape.micro_batches)
    own = sum(one.products[name][0] for one in findings for name in names if name in one.products)
    other = sum(one.products[name][1] for one in findings for name in names if name in one.products)
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
    row = Row(f"{label}: gradient norm", Verdict.PASS, gradient=_worst(norms.values()))
    if not norms:
        row.verdict, row.detail = Verdict.LEFT_OUT, "no step could be compared"
    if wrong:
        step, one = wrong[0]
        row.verdict = Verdict.FAIL
        row.detail = (
            f"at step {step} the reported norm is off by {one.error:.2e}, allowed {one.bound:.2e}; "
            f"it must be {one.size:.6g}"
        )
    return row


def _ranks_row(label: str, outcome: Outcome) -> Row:
    check = f"{label}: equal on all ranks"
    faults = [
        f"rank {rank}: {fault}"
        for rank, result in enumerate(outcome.ranks)
        for fault in result["faults"]
    ]
    first = outcome.ranks[0]["checksums"]
    apart = [
        (rank, step)
        for rank, result in enumerate(outcome.ranks)
        for step, one in enumerate(result["checksums"])
        if one != first[step]
    ]
    if apart:
        rank, step = apart[0]
        faults.insert(0, f"after step {step} ranks 0 and {rank} hold different parameters")
    if faults:
        return Row(
            check,
            Verdict.FAIL,
            f"{faults[0]}{f' and {len(faults) - 1} more findings' if len(faults) > 1 else ''}",
        )
    return Row(check, Verdict.PASS, "bit for bit, and every parameter is its rounded master")


def _whole_rows(run: Run, outcome: Outcome) -> list[Row]:
    """Gradients of another cut, or of the compiled model, against the whole batch."""
    check = "eager = compiled" if run.kind is RunKind.COMPILED else "accumulation invariance"
    family = run.name
    if outcome.failure:
        # Nobody who did not ask for a compiler need have a model that it takes.
        is_refused = run.backend == TRACED_BACKEND and outcome.kind in COMPILER_ERRORS
        verdict = Verdict.NOT_RUN if is_refused else Verdict.FAIL
        return [Row(check, verdict, f"no result: {outcome.failure}", family=family)]
    findings = [one for one in _findings(outcome) if not one.skipped]
    if not any(one.whole for one in findings):
        return [_without_whole(check, outcome, family)]
    outside = _outside(findings, lambda one: one.whole)
    row = Row(
        check,
        Verdict.PASS,
        family=family,
        gradient=_worst(v for one in findings for v in one.whole.values()),
    )
    if outside:
        row.verdict, row.detail, row.parameters = (
            Verdict.FAIL,
            _describe("gradient", outside),
            list(outside),
        )
    return [row]


# Watched runs

_WATCHED = {RunKind.LEDGER: "gradient ledger", RunKind.COLLECTIVES: "collective agreement"}
_CLEAN = {
    RunKind.LEDGER: "every contribution reached the optimizer once",
    RunKind.COLLECTIVES: "all ranks issued the same collectives in the same order",
}


def _watched_rows(run: Run, outcome: Outcome) -> list[Row]:
    check = _WATCHED[run.kind]
    if outcome.failure:
        return [Row(check, Verdict.FAIL, outcome.failure)]
    return [Row(check, Verdict.PASS, f"{_CLEAN[run.kind]} ({run.steps} steps)")]


def _stream_rows(runs: list[tuple[Run, Outcome]]) -> list[Row]:
    checks = ("stream races", "memory lifetimes", "simulated device = host")
    if not runs:
        return [Row(check, Verdict.NOT_RUN, "not asked for (--schedules 0)") for check in checks]
    failed = [(run, outcome) for run, outcome in runs if outcome.failure]
    if failed:
        run, outcome = failed[0]
        return [Row(checks[0], Verdict.FAIL, f"{run.name}: {outcome.failure}")]
    first = runs[0][0]
    bucket = first.config["zero_optimization"]["reduce_bucket_size"]
    where = (
        f"{len(runs) - 1} schedules x {first.steps} steps on the simulated device, "
        f"reduce_bucket_size {bucket:,}, pieces of {first.piece_numel:,}; "
        f"{runs[-1][0].steps} steps {AS_CONFIGURED}"
    )
    hazards = [
        (run.name, hazard)
        for run, outcome in runs
        for result in outcome.ranks
        for hazard in result["hazards"]
    ]
    rows = []
    for check, is_race in ((checks[0], True), (checks[1], False)):
        mine = [(name, hazard) for name, hazard in hazards if (hazard["kind"] == "race") == is_race]
        text = f"none in {where}"
        if mine:
            text = f"{len(mine)} in {where}; {mine[0][0]}: {mine[0][1]['text']}"
        rows.append(Row(check, Verdict.FAIL if mine else Verdict.PASS, text))
    return [*rows, _simulated_row(checks[2], where, runs)]


def _simulated_row(check: str, where: str, runs: list[tuple[Run, Outcome]]) -> Row:
    """Each step against one process that begins it at the same weights: what a step before rounded
    otherwise is no error of this one, whatever it grows to behind a choice that jumps.
    """
    row = Row(check, Verdict.PASS, f"steps equal those of one process on the host ({where})")
    found = {run.name: _findings(outcome) for run, outcome in runs}
    compared = [one for steps in found.values() for one in steps if not one.skipped]
    if not compared:
        reason = next((one.skipped for steps in found.values() for one in steps), "no step")
        return Row(check, Verdict.LEFT_OUT, f"no step could be compared ({reason})")
    row.gradient = _worst(value for one in compared for value in one.gradients.values())
    for name, steps in found.items():
        gradients = _outside(steps, lambda one: one.gradients)
        # Clipping spreads one wrong gradient over all parameters.
        outside = gradients or _outside(steps, lambda one: one.parameters)
        if outside:
            what = "gradient" if gradients else "value after the step"
            row.verdict, row.detail = Verdict.FAIL, f"{name}: {_describe(what, outside)}"
            row.parameters = sorted(outside)
            return row
    row.parameter = _worst(value for one in compared for value in one.parameters.values())
    return row


def _curves(outcome: Outcome, findings: list[StepFindings]) -> dict[str, list[Any]]:
    def finite(value: float | None) -> float | None:
        return None if value is None or not math.isfinite(value) else value

    return {
        "loss": [
            finite(sum(losses) / len(losses))
            for losses in zip(*(rank["losses"] for rank in outcome.ranks), strict=True)
        ],
        "norm": [finite(value) for value in outcome.ranks[0]["norms"]],
        "step": [one.step for one in findings],
        "expected_norm": [None if one.norm is None else finite(one.norm.size) for one in findings],
        "gradient": [finite(_worst(one.gradients.values())) for one in findings],
        "parameter": [finite(_worst(one.parameters.values())) for one in findings],
    }


_ROWS: dict[RunKind, Callable[[Run, Outcome], list[Row]]] = {
    RunKind.SGD: _training_rows,
    RunKind.USER: _training_rows,
    RunKind.SPLIT: _whole_rows,
    RunKind.COMPILED: _whole_rows,
    RunKind.LEDGER: _watched_rows,
    RunKind.COLLECTIVES: _watched_rows,
}
