"""What `ds_verify` does, on ranks that a test already has, without new processes. Collective."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed import comm as dist
from deepspeed.verify.oracle.parts import Parts
from deepspeed.verify.oracle.plan import Plan, RunKind, Settings, make_plan, shape_of
from deepspeed.verify.oracle.ranks import Outcome, Session
from deepspeed.verify.oracle.report import Report
from deepspeed.verify.oracle.verdicts import make_report
from deepspeed.verify.oracle.worker import Worker
from unit import models

MODELS = Path(__file__).with_name("planted_models.py")
TRAINING = (RunKind.SGD, RunKind.USER, RunKind.SPLIT)


def config_of(stage: int, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    more = {
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"reduce_bucket_size": 100},
        **more,
    }
    config = models.config_of(stage, 4, 2, precision, **more)
    if precision == "fp16":
        config["fp16"]["loss_scale"] = 128
    return config


def plan_of(
    config: dict[str, Any],
    function: str,
    kinds: tuple[RunKind, ...],
    steps: int = 2,
    schedules: int = 0,
    sizes: Sequence[int] = (128, 16, 240, 16),
    ranks: int = 2,
    parts: Parts | None = None,
    checkpoint: str | None = None,
) -> Plan:
    """A plan for a function of `MODELS`, or for a model of transformers (`hf:...`)."""
    model = function if function.startswith("hf:") else f"{MODELS}:{function}"
    settings = Settings(config, model, steps=steps, schedules=schedules, checkpoint=checkpoint)
    plan = make_plan(settings, config, *shape_of(config, ranks, parts), sizes, parts=parts)
    return replace(plan, runs=[run for run in plan.runs if run.kind in kinds])


def session_of(plan: Plan) -> Session:
    """Run the plan here; the same results on every rank."""
    events = io.StringIO()
    Worker(plan, dist.get_rank(), events).work()
    everywhere: list[Any] = [None] * dist.get_world_size()
    said = [json.loads(line) for line in events.getvalue().splitlines()]
    dist.all_gather_object(everywhere, said)
    session = Session(ready=[next(e for e in said if e["event"] == "ready") for said in everywhere])
    ends = [{e["run"]: e["result"] for e in said if e["event"] == "end"} for said in everywhere]
    for run in plan.runs:
        session.outcomes[run.name] = Outcome([results[run.name] for results in ends])
    return session


def report_of(plan: Plan) -> Report:
    """What is said of the plan's runs; the same on every rank."""
    return make_report(plan, session_of(plan), {})


def failures(report: Report) -> list[str]:
    failed = (row for row in report.rows if row.verdict.value == "FAIL")
    return [f"{row.check} {row.family}: {row.detail}" for row in failed]
