"""How a run divided its model is read from its files, also from those that do not say all of it."""

from typing import Any

import pytest

from deepspeed.checkpoint.resharding.cuts import ParallelDegrees


@pytest.mark.parametrize(
    ("model", "degrees"),
    [
        ({}, (1, 1, 1)),
        ({"module": {}, "mp_world_size": 1}, (1, 1, 1)),
        (
            {
                "module": {},
                "mp_world_size": 4,
                "checkpoint_parallel_dimensions": {"pp_degree": 2, "tp_degree": 2},
            },
            (2, 2, 4),
        ),
        (
            {"mp_world_size": 2, "checkpoint_parallel_dimensions": {"tp_degree": 2}},
            (1, 2, 2),
        ),
        ({"module": {}, "mp_world_size": 2}, (1, 2, 2)),
        ({"module": None, "mp_world_size": 2}, (2, 1, 2)),
        (
            {"module": None, "mp_world_size": 2, "checkpoint_parallel_dimensions": None},
            (2, 1, 2),
        ),
    ],
)
def test_of_a_file(model: dict[str, Any], degrees: tuple[int, int, int]) -> None:
    assert ParallelDegrees.of_file(model) == degrees


def test_ranks_of_a_slice() -> None:
    degrees = ParallelDegrees(stages=3, tensor=2, parts=6)
    assert [list(degrees.ranks_of_slice(rank)) for rank in range(2)] == [[0, 2, 4], [1, 3, 5]]


def test_fields_are_those_of_files() -> None:
    """The manifest and the files of processes hold them by these names."""
    assert ParallelDegrees._fields == ("stages", "tensor", "parts")
