"""transformers.Trainer, unmodified, trains, evaluates, saves and resumes as on DeepSpeed."""

import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from .launching import (
    assert_alike,
    need,
    on_each_number_of_ranks,
    straight_and_resumed,
)

STEPS, SAVED_AT = 4, 2
# Whose optimizer and schedule, and the stage: the DeepSpeed configuration's, or the Trainer's own,
# with activation checkpointing, or as Adafactor, which needs whole parameters. `make campaign
# NAME=clients` has the others.
RUNS = ["config-1", "config-2", "config-3", "client-3", "adafactor-2"]
OPTIMIZERS = {"1": "DeepSpeedZeroOptimizer", "2": "DeepSpeedZeroOptimizer"}
OPTIMIZERS["3"] = "DeepSpeedZeroOptimizer_Stage3"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs of four steps, and such as go on from the second in new processes."""
    need("transformers", "accelerate")
    out = tmp_path_factory.mktemp("trainer")
    return {"out": out, **straight_and_resumed("train_with_trainer.py", out, RUNS)}


@pytest.mark.parametrize("name", RUNS)
def test_it_trains_through_this_engine(runs: dict[str, Any], name: str) -> None:
    run, stage = runs["straight"][name], name[-1]
    assert run["engine"] == "deepspeed.runtime.engine"
    assert run["optimizer"] == OPTIMIZERS[stage]
    assert (run["stage"], run["world"], run["dtype"]) == (int(stage), 2, "torch.bfloat16")
    assert sorted(map(int, run["loss"])) == list(range(1, STEPS + 1))
    assert run["loss"][str(STEPS)] < run["loss"]["1"]
    assert run["eval_loss"][str(STEPS)] < run["eval_loss"][str(SAVED_AT)]
    assert all(math.isfinite(norm) and norm > 0 for norm in run["grad_norm"].values())
    rates = [run["learning_rate"][str(step)] for step in range(1, STEPS + 1)]
    assert rates[0] < rates[1] and rates[-1] < max(rates)  # warms up, then decays


@pytest.mark.parametrize("name", RUNS)
def test_it_goes_on_as_if_it_had_not_stopped(runs: dict[str, Any], name: str) -> None:
    straight, resumed = runs["straight"][name], runs["resumed"][name]
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss", "weights"):
        assert resumed[key] == straight[key], key


def test_all_stages_train_alike(runs: dict[str, Any]) -> None:
    assert_alike(STEPS, *(runs["straight"][f"config-{stage}"] for stage in (1, 2, 3)))


@pytest.mark.parametrize("name", RUNS)
def test_the_files_lie_where_the_trainer_looks_for_them(runs: dict[str, Any], name: str) -> None:
    folder: Path = runs["out"] / name / f"checkpoint-{SAVED_AT}"
    assert (folder / "latest").read_text() == f"global_step{SAVED_AT}"
    names = {path.name for path in (folder / f"global_step{SAVED_AT}").iterdir()}
    shards = {f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)}
    states = {f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2)}
    assert shards | (states if name.endswith("3") else {"mp_rank_00_model_states.pt"}) <= names
    # With stage 3 gathered for the file, because the configuration says so: every weight is whole.
    places = (runs["out"] / "pretrained", folder)
    own, saved = (load_file(place / "model.safetensors") for place in places)
    shapes = {name: value.shape for name, value in own.items()}
    assert {name: value.shape for name, value in saved.items()} == shapes


def test_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    # Kills: a loader that deals samples, a loss whose divisor is left in the gradients.
    need("transformers", "accelerate")
    equal = ("grad_norm", "learning_rate", "weights", "digest")
    runs = ("bits-2", "bits-3", "bits-1")
    one, *others = on_each_number_of_ranks("train_with_trainer.py", tmp_path, runs, equal)
    for other in others:  # the Trainer's own mean over ranks
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
