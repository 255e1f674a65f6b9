"""The resharding matrix: what one division of ranks saved goes on in every other, bit for bit.

The suite runs a pairwise share; the campaign `reshard-matrix` runs every combination and prints
how many held (`DS_RESHARD_MATRIX`: the file to which it writes them).
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.checkpoint.files import CheckpointError
from unit.common import DistributedFixture, DistributedTest

from .matrix import CASES, CUTS, Combination, Run, all_combinations, by_cut, pairwise
from .runs import differences

TABLE = os.environ.get("DS_RESHARD_MATRIX")
EVERY = all_combinations()
# Eight ranks are the campaign's alone.
COMBINATIONS = (
    EVERY if TABLE else pairwise([one for one in EVERY if max(one.saved.world, one.into.world) < 8])
)
WORLDS = sorted({cut.world for one in COMBINATIONS for cut in (one.saved, one.into)})
STEPS, AFTER = 2, 2
# Relative, of losses and norms. Other ranks add gradients in another order, in the model's dtype
# within a micro-batch, and activations of micro-batches of another size may be rounded otherwise:
# fp32 keeps 2**-24, bf16 2**-9, fp16 2**-12 of a value.
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2, "accumulate": 1e-2, "fp16": 2e-3}


def deviation(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    """The largest relative one of losses and norms."""
    pairs = [pair for steps in zip(found, wanted, strict=True) for pair in zip(*steps, strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def updated_otherwise(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Masters that are not where the saver's went: counting a step twice moves an update by a tenth
    of the rate of 1e-2; small gradients are rounded otherwise by other ranks.
    """
    return [
        f"{name} is off by {far:.1e} after {AFTER} updates"
        for name, value in wanted.items()
        if name.startswith("master.")
        and not (far := float((found[name] - value).abs().max())) <= 1e-4
    ]


class SavedCuts(DistributedFixture):
    """Every case in every cut, saved after two steps, with what it held and how it went on."""

    world_size = WORLDS
    exec_timeout = 1200 if TABLE else 120

    def run(self, class_tmpdir: Any) -> None:
        for case, cut, _ in by_cut(COMBINATIONS, "saved", dist.get_world_size()):
            # It has weights of its own, so that no other checkpoint is taken for it.
            run = Run(case, cut, seed=1 + CUTS.index(cut))
            run.train(STEPS)
            folder = f"{class_tmpdir}/{case}-{cut}"
            run.engine.save_checkpoint(folder)
            held = run.held()
            went_on = run.train(AFTER)
            later = run.held()
            if dist.get_rank() == 0:
                torch.save({"held": held, "went_on": went_on, "later": later}, f"{folder}.pt")
            run.engine.destroy()  # the next run's ranks are divided otherwise


class TestMatrix(DistributedTest):
    """Kills: shards, padding or steps taken for others', ties taken twice or from nowhere, moments
    or a loss scale that stay what they were.
    """

    world_size = WORLDS
    exec_timeout = 1200 if TABLE else 120

    def test_goes_on(self, SavedCuts: Any, class_tmpdir: Any) -> None:
        outcomes = []
        for case, cut, combinations in by_cut(COMBINATIONS, "into", dist.get_world_size()):
            run = Run(case, cut, seed=100)
            run.train(1)  # state that loading must replace
            outcomes += [
                self.load(run, one, f"{class_tmpdir}/{case}-{one.saved}") for one in combinations
            ]
            run.engine.destroy()
        if dist.get_rank() == 0:
            Path(f"{class_tmpdir}/outcomes-{dist.get_world_size()}.json").write_text(
                json.dumps(outcomes)
            )
        assert [f"{told}: {problem}" for told, problem, _ in outcomes if problem] == []

    def load(self, run: Run, one: Combination, folder: str) -> tuple[str, str, float]:
        """The combination, what is wrong if anything, and how far losses and norms are off."""
        told = f"{one.case}: {one.saved} -> {one.into}"
        wanted = torch.load(f"{folder}.pt", weights_only=False)
        try:
            run.engine.load_checkpoint(folder)
        except CheckpointError as error:  # on all ranks
            return told, str(error), math.inf
        found = differences(wanted["held"], run.held())
        went_on = run.train(AFTER)
        off = deviation(went_on, wanted["went_on"])
        if off > TOLERANCES[one.case.partition("-")[0]]:
            found.append(
                f"losses or norms are off by {off:.1e}: {went_on} instead of {wanted['went_on']}"
            )
        later = run.held()
        if later["steps"] != wanted["later"]["steps"]:
            found.append(f"{AFTER} steps later {later['steps']} were counted")
        if one.case.startswith("fp32"):  # other precisions round gradients of other micro-batches
            found += updated_otherwise(later, wanted["later"])
        return told, "; ".join(found[:3]), off

    @pytest.mark.world_size(1)
    def test_none_was_left_out(self, class_tmpdir: Any) -> None:
        """Kills: a matrix that is green because it is empty."""
        files = [Path(f"{class_tmpdir}/outcomes-{world}.json") for world in WORLDS]
        outcomes = [
            outcome for file in files if file.exists() for outcome in json.loads(file.read_text())
        ]
        if TABLE:
            lines = [
                self._line(case, [one for one in outcomes if one[0].startswith(f"{case}:")])
                for case in CASES
            ]
            held = sum(not problem for _, problem, _ in outcomes)
            Path(TABLE).write_text(
                "\n".join([*lines, f"{held} of {len(COMBINATIONS)} combinations"]) + "\n"
            )
        assert {told for told, *_ in outcomes} == {
            f"{case}: {saved} -> {into}" for case, saved, into in COMBINATIONS
        }

    @staticmethod
    def _line(case: str, outcomes: Sequence[Any]) -> str:
        held, worst = (
            sum(not problem for _, problem, _ in outcomes),
            max((off for *_, off in outcomes), default=math.nan),
        )
        return (
            f"{case}: {held} of {len(outcomes)} held, losses and norms within {worst:.1e} of the "
            "saver's"
        )
