"""A loop with accelerate, unmodified, trains, accumulates, clips, saves and goes on."""

from pathlib import Path
from typing import Any

import pytest

from .launching import (
    assert_alike,
    need,
    on_each_number_of_ranks,
    straight_and_resumed,
)

STEPS, SAVED_AT = 4, 2
# The stage, and what the plugin is made from. `make campaign NAME=clients` has the others.
CASES = ["1-arguments", "2-arguments", "3-arguments", "1-offload", "3-offload", "3-config"]
# The client's optimizer is the one that steps.
OPTIMIZERS = {"arguments": "AdamW", "offload": "DeepSpeedCPUAdam", "config": "FusedAdam"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases straight through, and again from their middle in new processes."""
    need("accelerate", "transformers")
    out = tmp_path_factory.mktemp("accelerate")
    return straight_and_resumed("train_with_accelerate.py", out, CASES)


@pytest.mark.parametrize("case", CASES)
def test_the_loop_trains(runs: dict[str, Any], case: str) -> None:
    run = runs["straight"][case]
    assert run["engine"] == "deepspeed.runtime.engine.DeepSpeedEngine"
    assert run["distributed_type"] == "DistributedType.DEEPSPEED"
    assert run["boundaries"] == [False, True] * STEPS
    assert sum(run["loss"][str(STEPS)]) < sum(run["loss"]["1"])
    assert all(norm > 0 for norm in run["grad_norm"].values())
    # A schedule that acts on the client's own groups, or the configuration's: either way the rate
    # that is used moves.
    assert len(set(run["learning_rate"].values())) >= 3
    assert run["inner"] == OPTIMIZERS[case.split("-")[1]]
    assert run["unwrapped"] == "GPT2LMHeadModel"
    assert run["state_dict_is_the_model"] and run["state_dict_is_a_copy"]


@pytest.mark.parametrize("case", CASES)
def test_save_state_and_load_state_lose_nothing(runs: dict[str, Any], case: str) -> None:
    straight, resumed = runs["straight"][case], runs["resumed"][case]
    for step in map(str, range(SAVED_AT + 1, STEPS + 1)):
        for key in ("loss", "grad_norm", "learning_rate"):
            assert resumed[key][step] == straight[key][step], (key, step)
    assert resumed["weights"] == straight["weights"]


def test_all_stages_train_alike(runs: dict[str, Any]) -> None:
    assert_alike(STEPS, *(runs["straight"][f"{stage}-arguments"] for stage in (1, 2, 3)))


def test_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    # Kills: a loader that deals samples, a division by steps that are others on other ranks.
    need("accelerate", "transformers")
    equal = ("loss", "grad_norm", "learning_rate", "digest")
    runs = ("2-bits", "3-bits", "1-bits")
    on_each_number_of_ranks("train_with_accelerate.py", tmp_path, runs, equal)
