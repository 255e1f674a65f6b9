"""A change that a script makes while it trains counts as in plain torch, or raises by name."""

import pytest

from unit.common import DistributedTest
from unit.v1.contract.matrix import pairwise
from unit.v1.silent.changes import CHANGES, FACTORS, Case, product, run_case


@pytest.mark.parametrize("change", CHANGES)
class TestChanges(DistributedTest):
    world_size = 2

    def test_is_as_in_plain_torch(self, change: str) -> None:
        for row in pairwise(FACTORS, [0]):
            case = Case(change, **row)
            try:
                run_case(case)
            except Exception as error:
                raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error


@pytest.mark.contract
@pytest.mark.parametrize("change", CHANGES)
class TestProduct(DistributedTest):
    world_size = 2
    exec_timeout = 600

    def test_is_as_in_plain_torch(self, change: str) -> None:
        for case in product():
            if case.change == change:
                try:
                    run_case(case)
                except Exception as error:
                    raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
