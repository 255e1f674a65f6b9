"""Training with experts equals one process that has all: losses, gradients, norm, parameters."""

import itertools
from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.comm.watch import intent
from deepspeed.moe import layer, sharded_moe
from deepspeed.runtime.gradients.ledger.gradient_ledger import GradientLedgerError
from deepspeed.runtime.gradients.reduce_rule import ReduceFactors, ReduceRule
from unit.common import DistributedTest
from unit.v1.contract.test_contract_bites import Mutation, instead_of
from unit.v1.moe.runner import Case, CaseRun

PRODUCT = list(itertools.product((1, 2, 3), (True, False), (0, 1, 2), ("fp32", "bf16")))


def cases_of(ep_size: int, share: int, world: int) -> list[Case]:
    """A sixth of the product for each size; sizes, residual and accumulation go round. Two ranks
    and four have one half of it each, and the other half in the next share; with experts over four
    ranks there is one world alone.
    """
    sixth = [
        Case(ep_size, *chosen, residual=index % 2 == 0, accumulation=1 + index // 2 % 2)
        for index, chosen in enumerate(PRODUCT)
        if (index + ep_size + index // 6 + share // 2) % 6 == 0
    ]
    half = (share + world // 2) % 2
    # In each half all of `k`, and tokens that are dropped and that are not.
    return [
        case for place, case in enumerate(sixth) if ep_size == 4 or (place + place // 2) % 2 == half
    ]


# Others are run by `make campaign NAME=contract`.
SHARES = [0, *(pytest.param(share, marks=pytest.mark.contract) for share in range(1, 12))]


def run_all(cases: list[Case]) -> None:
    failures = [failure for case in cases for failure in CaseRun(case).run()]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("ep_size", [1, 2, 4])
class TestProduct(DistributedTest):
    world_size = [2, 4]

    def test(self, ep_size: int, share: int) -> None:
        world = dist.get_world_size()
        if ep_size <= world:
            run_all(cases_of(ep_size, share, world))


def test_shares_make_up_the_product() -> None:
    # Kills: a case that no share runs in one of the worlds; a half of the share of each run that
    # lacks a number of experts for each token.
    for ep_size, world in ((1, 2), (1, 4), (2, 2), (2, 4), (4, 4)):
        shares = [cases_of(ep_size, share, world) for share in range(12)]
        assert len({case for share in shares for case in share}) == len(PRODUCT)
        first = shares[0]
        assert {case.k for case in first} == {1, 2, 3}
        assert {case.drop for case in first} == {True, False}
        assert {case.precision for case in first} == {"fp32", "bf16"}


class TestFourRanks(DistributedTest):
    world_size = 4

    def test_data_before_experts(self) -> None:
        run_all([Case(2, 2, True, stage, "fp32", data_first=True) for stage in (0, 2)])

    def test_ranks_agree_on_every_collective(self) -> None:
        # Most experts get no token in step 1: whoever skips an exchange then would be found here.
        intent.enable(timeout_s=20)
        try:
            cases = [Case(2, 1, True, 2, "bf16"), Case(4, 3, False, 1, "fp32")]
            run_all([*cases, Case(1, 2, True, 0, "fp32", residual=True)])
        finally:
            intent.disable()

    def test_stage_3(self) -> None:
        # Kills: an expert that is cut for all ranks, or gathered with dense parameters; a bucket
        # that is cut for as many ranks as the dense ones.
        cases = [Case(2, 2, False, 3, "fp32", residual=True), Case(2, 1, True, 3, "bf16")]
        accumulating = Case(1, 1, True, 3, "fp32", accumulation=2)
        run_all([accumulating, *cases, Case(4, 1, True, 3, "fp32")])


@instead_of(sharded_moe._AllToAll, "backward")
def scale_by_ep_size(original: Any, *args: Any) -> tuple[None, torch.Tensor]:
    """The all-to-all's gradient averaged instead of summed."""
    return None, original(*args)[1] / 2


@instead_of(ReduceRule, "factors")
def average_over_replicas_only(original: Any, *args: Any, **kwargs: Any) -> ReduceFactors:
    """Division by the ranks that hold the same expert, instead of by all that have a loss."""
    pre, post = original(*args, **kwargs)
    return ReduceFactors(pre, post * 2)


@instead_of(layer.MoE, "forward")
def forget_the_balancing_gradient(original: Any, *args: Any) -> Any:
    """The balancing loss is reported but does not train the gate."""
    output, l_aux, counts = original(*args)
    return output, l_aux.detach(), counts


@instead_of(sharded_moe, "combine")
def forget_the_weight_gradient(
    original: Any, slots: torch.Tensor, weights: torch.Tensor, moves: Any
) -> torch.Tensor:
    """The gate learns nothing from the experts' outputs."""
    return original(slots, weights.detach(), moves)


class TestBites(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(
        "mutation, parameter",
        [
            (scale_by_ep_size, "experts.0"),
            (average_over_replicas_only, "experts.0"),
            (forget_the_balancing_gradient, "wg"),
            (forget_the_weight_gradient, "wg"),
        ],
    )
    def test_finds(self, mutation: Mutation, parameter: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            mutation(patch)
            failures = CaseRun(Case(2, 2, True, 1, "fp32"), ledger=False).run()
        assert any(f"gradient {parameter}" in failure for failure in failures), failures

    def test_ledger_finds_wrong_gradients_of_experts(self) -> None:
        # Kills: a ledger that counts other ranks' experts as contributions to its own, or looks
        # away.
        with pytest.MonkeyPatch.context() as patch:
            average_over_replicas_only(patch)
            told = r"counted twice.*deepspeed_experts\.0"
            with pytest.raises(GradientLedgerError, match=told) as raised:
                CaseRun(Case(2, 2, True, 1, "fp32")).run()
        # Twice the gradient, of dense parameters and experts alike, is one finding.
        assert [finding.kind for finding in raised.value.findings] == ["doubled"]
