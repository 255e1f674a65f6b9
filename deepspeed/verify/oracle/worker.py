"""One rank of `ds_verify`: makes the runs of a plan and judges its share of their steps.

Every rank writes one line of JSON per event to its own file, which the parent follows. A run that
raises ends the process: others may be inside a collective, and the parent starts the rest anew.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from pydantic import TypeAdapter

import deepspeed
from deepspeed.verify.budgets import Budget
from deepspeed.verify.oracle.batches import GlobalBatches
from deepspeed.verify.oracle.judge import (
    Deviation,
    ReferenceOptimizer,
    StepFindings,
    deviation,
    judge_sgd,
    judge_step,
)
from deepspeed.verify.oracle.plan import Plan, Precision, Run, RunKind, precision_of, read_config
from deepspeed.verify.oracle.reference import ROUNDOFF, Reference
from deepspeed.verify.oracle.system import RunRecord, StepRecord, SystemRun
from deepspeed.verify.oracle.workload import load_workload, seed_everything

# Gradients are accumulated on this many streams beside autograd's own under the simulated device.
BACKWARD_STREAMS = 2


class Worker:
    """One rank."""

    def __init__(self, plan: Plan, rank: int, events: IO[str]) -> None:
        self.plan = plan
        self.rank = rank
        self.events = events
        self.workload = load_workload(plan.model, plan.data, plan.seed, plan.shape.rows)
        self.batches = GlobalBatches(self.workload, plan.shape, plan.steps)
        self.sgd_steps: list[StepRecord] = []
        self._references: dict[Precision, Reference] = {}

    def tell(self, event: str, **values: object) -> None:
        """Write one event."""
        self.events.write(json.dumps({"event": event, **values}) + "\n")
        self.events.flush()

    def work(self) -> None:
        """Make all runs, one after the other."""
        weights = [float(one.detach().double().sum()) for one in self.workload.module.parameters()]
        self.tell(
            "ready",
            batches=self.batches.checksum(),
            weights=weights,
            notes=[*self.workload.notes, *self.batches.notes],
        )
        for run in self.plan.runs:
            self.tell("begin", run=run.name)
            seed_everything(self.plan.seed + 1)
            result = self._simulated(run) if run.kind is RunKind.SIM else self._run(run)
            self.tell("end", run=run.name, result=result)

    def _run(self, run: Run) -> dict[str, Any]:
        followers: list[ReferenceOptimizer] = []
        followed: dict[int, dict[str, Deviation]] = {}

        def follow(record: StepRecord) -> None:
            if not followers:
                module = self.workload.copy_module()
                followers.append(ReferenceOptimizer(run, record.before, module))
            followed[record.step] = followers[0].judge(record)

        def keeps(step: int) -> bool:
            shared = run.kind is RunKind.SGD and step < self._sim_steps()
            return run.kind.is_judged and (shared or step % self.plan.ranks == self.rank)

        # One rank's reference is enough: that all ranks hold the same parameters is checked by
        # their checksums.
        follows = run.kind in (RunKind.USER, RunKind.RESUMED) and self.rank == 0
        record = self._trained(run, keeps, follow if follows else None)
        record.faults += [fault for one in followers for fault in one.faults]
        findings = [self._judge(run, one) for one in self._own(record)]
        if run.kind is RunKind.SGD:
            self.sgd_steps = [one for one in record.steps if one.step < self._sim_steps()]
        reference = self._reference(run)
        notes = (reference.no_whole, reference.no_double, *(one.note for one in followers))
        return {
            **_summary(record, findings, followed),
            "notes": [note for note in notes if note],
            "no_whole": (reference.no_whole, self.batches.whole_reason),
            "start": self._start(record, reference.precision),
        }

    def _trained(
        self,
        run: Run,
        keep: Callable[[int], bool],
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> RunRecord:
        system = SystemRun(run, self.workload, self.batches)
        try:
            progress = partial(self.tell, "step", run=run.name)
            return system.train(keep, lambda step: progress(step=step), on_step)
        finally:
            system.engine.destroy()

    def _own(self, record: RunRecord) -> list[StepRecord]:
        return [one for one in record.steps if one.step % self.plan.ranks == self.rank]

    def _reference(self, run: Run) -> Reference:
        config = read_config(run.config, run.shape.world)
        precision = precision_of(config, self.workload.module)
        if precision not in self._references:
            summed = config.tree.gradient_allreduce_op == "sum"
            made = Reference(self.workload, self.batches, precision, summed, self._sim_steps())
            self._references[precision] = made
        return self._references[precision]

    def _sim_steps(self) -> int:
        return max((run.steps for run in self.plan.runs if run.kind is RunKind.SIM), default=0)

    def _start(self, record: RunRecord, precision: Precision) -> dict[str, dict[str, float]]:
        """Compare fp32 weights before the first step with the model's own, rounded to its dtype."""
        if not record.steps or record.steps[0].step != 0:
            return {}
        given = {name: param.detach() for name, param in self.workload.module.named_parameters()}
        unit = ROUNDOFF.get(precision.model, 0.0) if precision.model != torch.float32 else 0.0
        return {
            name: vars(deviation(value, given[name], unit * given[name].norm().item()))
            for name, value in record.steps[0].before.items()
        }

    def _judge(self, run: Run, record: StepRecord, only_sums: bool = False) -> StepFindings:
        """Judge one step by the reference at the weights that it began with."""
        reference = self._reference(run)
        is_single = reference.precision.is_single
        config = read_config(run.config, run.shape.world).tree
        # Ranks that share layers or sequences round partial sums: no one process rounds as they do.
        shares_sums = self.plan.ranks > run.shape.world * self.workload.parts.stages
        # Double precision is the reference of these, of fp32 and of other cuts; in half precision
        # it is looked at at both ends of a run.
        apart = (RunKind.SPLIT, RunKind.COMPILED, RunKind.BATCHED)
        all_of_them = is_single or shares_sums or run.kind in apart
        with_exact = all_of_them or (run.kind is RunKind.SGD and record.step in (0, run.steps - 1))
        expected = reference.expected(
            record.before, record.step, run.shape, record.loss_scale, with_exact
        )
        largest = torch.finfo(reference.precision.sums).max
        exact = shares_sums or run.kind is RunKind.COMPILED or (is_single and not only_sums)
        findings = judge_step(record, expected, largest, exact)
        steps_sgd = (RunKind.SGD, RunKind.BATCHED)
        if run.kind in steps_sgd or (run.kind is RunKind.SIM and not run.has_user_optimizer):
            judge_sgd(findings, record, expected.wanted(exact)[0], config.gradient_clipping)
        if run.kind is not RunKind.SIM:
            self.tell("judged", run=run.name, step=record.step)
        return findings

    def _simulated(self, run: Run) -> dict[str, Any]:
        """Make a run on the simulated device, watched by the stream checker."""
        # optional: device and checker are loaded only where they are used
        from deepspeed.accelerator.sim_accelerator import simulate
        from deepspeed.verify import BudgetError, check_budgets, check_streams, lowered_sizes

        lowered, hangs = run.piece_numel > 0, ""
        with (
            lowered_sizes(run.piece_numel) if lowered else nullcontext(),
            simulate(self.plan.seed, run.schedule, BACKWARD_STREAMS if lowered else 0),
            check_streams(raises=False) as checker,
        ):
            try:
                with check_budgets(*self._budgets()):
                    record = self._trained(run, lambda step: True)
            except BudgetError as error:
                hangs = str(error)
        findings, followed = [], {}
        for one in self._own(record):
            findings.append(self._judge(run, one))
            if not run.has_user_optimizer:
                findings[-1].parameters.update(self._beside_host(run, one))
        if run.has_user_optimizer and self.rank == 0:
            optimizer = ReferenceOptimizer(run, record.steps[0].before, self.workload.copy_module())
            followed = {one.step: optimizer.judge(one) for one in record.steps}
        found = checker.findings
        hazards = [{"kind": one.kind.value, "text": one.describe()} for one in found]
        return {**_summary(record, findings, followed), "hazards": hazards, "hangs": hangs}

    def _budgets(self) -> tuple[Budget, Budget]:
        """The usual device and the least one: a pipeline's messages stand beside computation, and
        beside collectives where its stages have experts.
        """
        parts = self.workload.parts
        if parts.stages == 1:
            return Budget(), Budget(queues=1, processors=1)
        return Budget(), Budget(2, 12, per_collective=4 if parts.experts > 1 else 12)

    def _beside_host(self, run: Run, record: StepRecord) -> dict[str, Deviation]:
        """Name what a step on the simulated device leads elsewhere than the host's SGD run, if both
        began at the same weights. They sum the same gradients in their own orders, and each is
        within the bound of that alone.
        """
        host = next((one for one in self.sgd_steps if one.step == record.step), None)
        if host is None or not all(
            torch.equal(value, record.before[name]) for name, value in host.before.items()
        ):
            return {}
        summed = self._judge(run, record, only_sums=True).parameters
        beside = {
            name: deviation(record.after.get(name), host.after[name], 2 * one.bound)
            for name, one in summed.items()
        }
        return {name: one for name, one in beside.items() if not one.is_within}


def _summary(
    record: RunRecord, findings: list[StepFindings], followed: dict[int, dict[str, Deviation]]
) -> dict[str, Any]:
    parameters = {
        str(step): {name: vars(one) for name, one in found.items()}
        for step, found in followed.items()
    }
    said = {key: value for key, value in vars(record).items() if key != "steps"}
    return {**said, "findings": [asdict(one) for one in findings], "parameters": parameters}


def main() -> int:
    """Run the plan on this rank, given its path and a folder by the command line; the rank's number
    comes from the environment, as any launcher sets it.
    """
    plan_path, folder = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plan = TypeAdapter(Plan).validate_json(Path(plan_path).read_text(encoding="utf-8"))
    with (Path(folder) / f"events-{rank}.jsonl").open("w", encoding="utf-8") as events:
        try:
            rendezvous = f"file://{Path(folder).resolve()}/rendezvous"
            deepspeed.init_distributed(
                init_method=rendezvous, rank=rank, world_size=world, verbose=False
            )
            Worker(plan, rank, events).work()
        except Exception as error:
            kind, text = type(error).__name__, str(error)
            said = {"event": "error", "time": time.time(), "kind": kind, "text": text}
            events.write(json.dumps(said) + "\n")
            traceback.print_exc()
            return 1
    # No barrier and no destroy: all results are on disk, and a rank that is gone must not hold up
    # the others.
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
