"""The contract with `reproducibility`: tolerance zero, against plain torch that sums the same tree.

Leaves are what autograd gives one process for each micro-batch, sums and updates torch's on whole
tensors; no deepspeed but the norm by which both clip.
"""

from typing import Any

import torch

from deepspeed import comm as dist
from unit.common import DistributedTest
from unit.v1.contract import reference
from unit.v1.contract.matrix import Case, all_pairs, of_world, pairs_of, pairwise
from unit.v1.contract.model import micro_batch
from unit.v1.contract.reference import Expected, Tensors, trainable
from unit.v1.contract.runner import CaseRun, run_cases
from unit.v1.contract.test_stage3 import Stage3Case, Stage3Run

FACTORS: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2),
    "precision": ("fp32", "bf16", "fp16"),
    "accumulation": (1, 3),
    "clip": (False, True),
    "overlap": (False, True),
    "offload": (False, True),
    "bucket": ("tiny", "huge"),
    "world": (1, 2, 3),
}


def tree_cases() -> list[Case]:
    """All pairs of values below stage 3, and two of that."""
    cases = [Case(**row, reduce_scatter=True) for row in pairwise(FACTORS, [25])]
    three = (3, "bf16", 3, True, True, True, False, "tiny", 3)
    two = (3, "fp32", 3, False, False, True, True, "huge", 2)
    return [*cases, Stage3Case(*three, persistence=0), Stage3Case(*two, host="both")]


def tree(leaves: list[torch.Tensor]) -> torch.Tensor:
    """Neighbours first: the longest run of a power of two, and what is left of it."""
    if len(leaves) == 1:
        return leaves[0].float()
    first = 1 << (len(leaves) - 1).bit_length() - 1
    return tree(leaves[:first]) + tree(leaves[first:])


class TreeRun(CaseRun):
    """One case with the canonical sum."""

    is_plain = False  # owners have masters, at stage 0 too

    def _config(self) -> dict[str, Any]:
        return {**super()._config(), "reproducibility": {"world_size_invariant": True}}

    def _expected(self, step: int, start: Tensors) -> Expected:
        case = self.case
        model = reference.half_template(case.precision)
        scale = reference.LOSS_SCALE if case.precision == "fp16" else 1.0
        with torch.no_grad():
            for name, param in trainable(model).items():
                param.copy_(start[name])
        places = [(m, r) for m in range(case.accumulation) for r in range(case.world)]
        batches = [micro_batch(step, rank, micro, case.world) for micro, rank in places]
        leaves = [reference.gradients(model, batch, scale) for batch in batches]
        grads = {
            name: tree([leaf[name] for leaf in leaves]) / len(leaves) / scale for name in start
        }
        norm = float(self.engine.get_global_grad_norm())
        factor = reference.clip_factor(norm, case.clip)
        params = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
        for name, param in params.items():
            param.grad = grads[name] * factor
        torch.optim.SGD(
            [{"params": [p], "weight_decay": self.weight_decay[n]} for n, p in params.items()],
            lr=reference.LEARNING_RATE,
        ).step()
        exact = dict.fromkeys(start, 0.0)
        wanted = reference.global_norm(grads)
        after = {name: param.detach() for name, param in params.items()}
        return Expected(grads, wanted, after, exact, 2.0**-22 * wanted, exact)


class Stage3TreeRun(TreeRun, Stage3Run):
    """The same at stage 3."""


def run_of(case: Case) -> TreeRun:
    return Stage3TreeRun(case) if isinstance(case, Stage3Case) else TreeRun(case)


class TestPairs(DistributedTest):
    world_size = [1, 2, 3]

    def test(self) -> None:
        # Kills: whatever the bounds of the contract allow: a sum in another order, in another
        # dtype or divided before; an update that is rounded otherwise.
        run_cases(of_world(tree_cases(), dist.get_world_size()), run_of)


def test_pairs_are_covered() -> None:
    found = [vars(case) for case in tree_cases()]
    assert set().union(*(pairs_of(row, FACTORS) for row in found)) >= all_pairs(FACTORS)
