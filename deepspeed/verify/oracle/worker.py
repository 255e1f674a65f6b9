"""One rank of `ds_verify`: makes the runs of a plan and judges its share of their steps. Started by
`ranks.launch`.

Every rank writes one line of JSON per event to its own file, which the parent follows; nothing of
the user's model has to be quiet. A run that raises ends the process: the other ranks may be inside
a collective, and the parent starts the rest of the plan anew.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import torch

import deepspeed
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
from deepspeed.verify.oracle.workload import GlobalBatches, load_workload, seed_everything

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

    def tell(self, event: str, **values: Any) -> None:
        """Write one event."""
        self.events.write(json.dumps({"event": event, **values}) + "\n")
        self.events.flush()

    def work(self) -> None:
        """All runs, one after the other."""
        weights = [
            float(param.detach().double().sum()) for param in self.workload.module.parameters()
        ]
        self.tell(
            "ready", batches=self.batches.checksum(), weights=weights, notes=self.workload.notes
        )
        for run in self.plan.runs:
            self.tell("begin", run=run.name)
            result = self._simulated(run) if run.kind is RunKind.SIM else self._run(run)
            self.tell("end", run=run.name, result=result)

    def _run(self, run: Run) -> dict[str, Any]:
        seed_everything(self.plan.seed + 1)
        config = read_config(run.config, run.shape.world)
        precision = precision_of(config, self.workload.module)
        system = SystemRun(run, self.workload, self.batches, self.rank)
        findings_of_optimizer: dict[int, dict[str, Deviation]] = {}
        optimizers: list[ReferenceOptimizer] = []

        def follow(record: StepRecord) -> None:
            if not optimizers:
                optimizers.append(
                    ReferenceOptimizer(run, record.before, self.workload.copy_module())
                )
            findings_of_optimizer[record.step] = optimizers[0].judge(
                record, config.tree.gradient_clipping
            )

        # One rank's reference is enough: that all ranks hold the same parameters is checked by
        # their checksums.
        follows = run.kind is RunKind.USER and self.rank == 0
        try:
            record = system.train(
                keep=lambda step: run.kind.is_judged and self._keeps(run, step),
                progress=lambda step: self.tell("step", run=run.name, step=step),
                on_step=follow if follows else None,
            )
        finally:
            system.close()
        reference = self._reference(precision)
        findings = [
            self._judge(run, one, reference, precision)
            for one in record.steps
            if one.step % run.shape.world == self.rank
        ]
        if run.kind is RunKind.SGD:
            self.sgd_steps = [one for one in record.steps if one.step < self._sim_steps()]
        result = _summary(record, findings)
        result["parameters"] = _plain(findings_of_optimizer)
        result["notes"] = [
            note
            for note in (reference.no_whole, reference.no_double, *(one.note for one in optimizers))
            if note
        ]
        result["no_whole"] = (reference.no_whole, self.batches.whole_reason)
        result["is_single"] = precision.is_single
        result["start"] = self._start(record, precision)
        return result

    def _reference(self, precision: Precision) -> Reference:
        if precision not in self._references:
            self._references[precision] = Reference(
                self.workload, self.batches, precision, self._sim_steps()
            )
        return self._references[precision]

    def _sim_steps(self) -> int:
        return max((run.steps for run in self.plan.runs if run.kind is RunKind.SIM), default=0)

    def _keeps(self, run: Run, step: int) -> bool:
        return step % run.shape.world == self.rank or (
            run.kind is RunKind.SGD and step < self._sim_steps()
        )

    def _start(self, record: RunRecord, precision: Precision) -> dict[str, dict[str, float]]:
        """fp32 weights before the first step against the model's own, rounded to its dtype."""
        if not record.steps or record.steps[0].step != 0:
            return {}
        given = {name: param.detach() for name, param in self.workload.module.named_parameters()}
        unit = ROUNDOFF.get(precision.model, 0.0) if precision.model != torch.float32 else 0.0
        return {
            name: vars(deviation(value, given[name], unit * given[name].norm().item()))
            for name, value in record.steps[0].before.items()
        }

    def _judge(
        self,
        run: Run,
        record: StepRecord,
        reference: Reference,
        precision: Precision,
        only_sums: bool = False,
    ) -> StepFindings:
        """One step against the reference at the weights that it began with."""
        config = read_config(run.config, run.shape.world)
        # Double precision is the reference of fp32 and of other cuts; in half precision it is
        # looked at at both ends of a run.
        all_of_them = precision.is_single or run.kind in (RunKind.SPLIT, RunKind.COMPILED)
        with_whole = all_of_them or (run.kind is RunKind.SGD and record.step in (0, run.steps - 1))
        expected = reference.expected(
            record.before, record.step, run.shape, record.loss_scale, with_whole
        )
        factor = float(run.shape.world) if config.tree.gradient_allreduce_op == "sum" else 1.0
        findings = judge_step(
            record,
            expected,
            largest=torch.finfo(precision.sums).max,
            sum_factor=factor,
            whole_is_the_reference=precision.is_single and not only_sums,
        )
        if run.kind is RunKind.SGD or (run.kind is RunKind.SIM and not run.has_user_optimizer):
            judge_sgd(findings, record, expected, config.tree.gradient_clipping, factor)
        if run.kind is not RunKind.SIM:
            self.tell("judged", run=run.name, step=record.step)
        return findings

    def _simulated(self, run: Run) -> dict[str, Any]:
        """A run on the simulated device, watched by the stream checker."""
        seed_everything(self.plan.seed + 1)
        # optional: device and checker are loaded only where they are used
        from deepspeed.accelerator.sim_accelerator import simulate
        from deepspeed.verify import check_streams, lowered_sizes

        lowered = run.piece_numel > 0
        with (
            lowered_sizes(run.piece_numel) if lowered else nullcontext(),
            simulate(self.plan.seed, run.schedule, BACKWARD_STREAMS if lowered else 0),
            check_streams(raises=False) as checker,
        ):
            system = SystemRun(run, self.workload, self.batches, self.rank)
            try:
                record = system.train(
                    keep=lambda step: True,
                    progress=lambda step: self.tell("step", run=run.name, step=step),
                )
            finally:
                system.close()
        precision = precision_of(read_config(run.config, run.shape.world), self.workload.module)
        mine = [one for one in record.steps if one.step % run.shape.world == self.rank]
        findings = [self._judge(run, one, self._reference(precision), precision) for one in mine]
        for one, found in zip(mine, findings, strict=True):
            if not run.has_user_optimizer:
                found.parameters.update(self._beside_host(run, one, precision))
        result = _summary(record, findings)
        if run.has_user_optimizer and self.rank == 0:
            clip = read_config(run.config, run.shape.world).tree.gradient_clipping
            optimizer = ReferenceOptimizer(run, record.steps[0].before, self.workload.copy_module())
            followed = {one.step: optimizer.judge(one, clip) for one in record.steps}
            result["parameters"] = _plain(followed)
        result["hazards"] = [
            {"kind": finding.kind.value, "edge": finding.edge, "text": finding.describe()}
            for finding in checker.findings
        ]
        return result

    def _beside_host(
        self, run: Run, record: StepRecord, precision: Precision
    ) -> dict[str, Deviation]:
        """Parameters that a step on the simulated device leads elsewhere than the host's SGD run,
        if both began at the same weights, bit for bit.

        Then both add up the same gradients of micro-batches in their own orders, and each is within
        the bound of that alone (point 1 of `[Note: bound]`).
        """
        host = next((one for one in self.sgd_steps if one.step == record.step), None)
        if host is None or not all(
            torch.equal(value, record.before[name]) for name, value in host.before.items()
        ):
            return {}
        summed = self._judge(run, record, self._reference(precision), precision, only_sums=True)
        beside = {
            name: deviation(record.after.get(name), host.after[name], 2 * one.bound)
            for name, one in summed.parameters.items()
        }
        return {name: one for name, one in beside.items() if not one.is_within}


def _plain(findings: dict[int, dict[str, Deviation]]) -> dict[str, dict[str, dict[str, float]]]:
    return {
        str(step): {name: vars(one) for name, one in found.items()}
        for step, found in findings.items()
    }


def _summary(record: RunRecord, findings: list[StepFindings]) -> dict[str, Any]:
    return {
        "losses": record.losses,
        "norms": record.norms,
        "checksums": record.checksums,
        "faults": record.faults,
        "findings": [one.to_json() for one in findings],
    }


def main(plan_path: str, folder: str) -> int:
    """Run the plan on this rank; its number comes from the environment, as any launcher sets it."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plan = Plan.from_json(json.loads(Path(plan_path).read_text(encoding="utf-8")))
    with (Path(folder) / f"events-{rank}.jsonl").open("w", encoding="utf-8") as events:
        try:
            rendezvous = f"file://{Path(folder).resolve()}/rendezvous"
            deepspeed.init_distributed(
                init_method=rendezvous, rank=rank, world_size=world, verbose=False
            )
            worker = Worker(plan, rank, events)
            worker.work()
        except Exception as error:
            text = traceback.format_exc()
            said = {
                "event": "error",
                "time": time.time(),
                "kind": type(error).__name__,
                "text": str(error),
            }
            events.write(json.dumps(said) + "\n")
            sys.stderr.write(text)
            return 1
    # No barrier and no destroy: all results are on disk, and a rank that is gone must not hold up
    # the others.
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2]))
