"""Elastic batch sizes: upstream's numbers, and what the block does to a configuration.

`upstream_results.json` has 200 random blocks and 30 calls, recorded from upstream 0.19.6 as a black
box. Where this project decides otherwise, the four reasons are `differs`.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from deepspeed.elasticity import compute_elastic_config, elasticity_enabled
from deepspeed.elasticity import elasticity as numbers
from deepspeed.elasticity import ensure_immutable_elastic_config as ensure_immutable
from deepspeed.elasticity.cli import main as ds_elastic
from deepspeed.elasticity.config import ElasticityConfigError, ElasticityError
from deepspeed.elasticity.config import ElasticityIncompatibleWorldSize as WrongWorldSize
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

RECORDED = json.loads(Path(__file__).with_name("upstream_results.json").read_text())
BLOCK = {
    **{"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]},
    **{"min_gpus": 1, "max_gpus": 20, "version": 0.1},
}
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def computed(block: dict[str, Any], *rest: Any, **how: Any) -> Any:
    """What is computed for this version."""
    return compute_elastic_config({"elasticity": block}, "0.6.0", *rest, **how)


def outcome(block: dict[str, Any], world_size: int, return_microbatch: bool) -> Any:
    """The result as JSON has it, or the name of the error."""
    try:
        return list(computed(block, world_size, return_microbatch))
    except (ElasticityError, ValueError) as error:
        return type(error).__name__


def differs(block: dict[str, Any], world_size: int, ours: Any, theirs: Any) -> bool:
    """Whether a difference is one of the documented ones (docs/elasticity.md)."""
    parallel = block.get("model_parallel_size", 1)
    refused = ours == "ElasticityIncompatibleWorldSize"
    empty = isinstance(theirs, list) and theirs[0] == 0
    split = parallel > 1 and (not refused or world_size % parallel)
    is_both = (ours, theirs) == ("ElasticityConfigError", "ValueError")
    none = isinstance(theirs, list) and theirs[1] is None and ours[1] == []
    return any((empty, split, is_both, none))


def test_numbers_are_upstreams() -> None:
    same = 0
    for block, world_size, return_microbatch, theirs in RECORDED["compute_elastic_config"]:
        ours = outcome(block, world_size, return_microbatch)
        same += ours == theirs
        said = (block, world_size, ours, theirs)
        assert ours == theirs or differs(*said), said
    assert same >= 0.75 * len(RECORDED["compute_elastic_config"])


def test_small_functions_are_upstreams() -> None:
    for micros, limit, low, high, candidates, valid, best in RECORDED["functions"]:
        assert numbers.get_candidate_batch_sizes(micros, limit) == sorted(candidates)
        assert [numbers.get_valid_gpus(batch, micros, low, high) for batch in candidates] == valid
        asked = (candidates, micros, low, high)
        assert [
            list(numbers.get_best_candidates(*asked, larger)) for larger in (True, False)
        ] == best


def test_highly_composite_numbers_are_that() -> None:
    """Each has more divisors than all before it."""
    small = [number for number in numbers.HCN_LIST if number < 20000]
    divisors = [sum(number % low == 0 for low in range(1, number + 1)) for number in small]
    assert divisors == sorted(set(divisors)) and numbers.HCN_LIST == sorted(numbers.HCN_LIST)


@pytest.mark.parametrize("version", [0.1, 0.2])
def test_batch_and_shares_fit_together(version: float) -> None:
    # Kills: a micro-batch that does not divide its rank's share.
    block = {**BLOCK, "version": version, "max_gpus": 100}
    batch, valid = computed(block, world_size=1)[:2]
    for ranks in valid:
        again, _, micro = computed(block, world_size=ranks)
        assert again == batch <= 2000 and micro in (2, 4, 6) and batch % (micro * ranks) == 0


def test_model_parallel_groups_are_counted_once() -> None:
    block = {**BLOCK, "version": 0.2, "num_gpus_per_node": 8, "model_parallel_size": 2}
    block.update(max_gpus=100, max_train_batch_size=100)
    batch, valid, micro = computed(block, world_size=16)
    assert 8 in valid and batch % (8 * micro) == 0
    # Six of eight ranks of a node: three replicas; upstream compares 6 with [3] and refuses.
    assert computed(block, world_size=6)[1:] in (([3], 2), ([3], 4), ([3], 6))
    with pytest.raises(WrongWorldSize, match=r"7.*model_parallel_size \(2\)"):
        computed(block, world_size=7)
    with pytest.raises(ElasticityError, match="divisible by model parallel size 3"):
        computed({**block, "model_parallel_size": 3}, world_size=6)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"enabled": False}, ElasticityConfigError, "disabled"),
        ({"micro_batch_sizes": [0]}, ElasticityConfigError, r"positive integers.*\[0\]"),
        ({"micro_batch_sizes": []}, ElasticityConfigError, "at least one"),
        ({"micro_batch_sizes": 3}, ElasticityConfigError, "list of micro batches"),
        ({"micro_batch_sizes": [3000]}, ValueError, "equal to max_acceptable_batch_size: 2000"),
        ({"min_gpus": 0}, ElasticityConfigError, "min_gpus: 0"),
        ({"min_gpus": 30}, ElasticityConfigError, "min_gpus: 30, max_gpus: 20"),
        ({"min_time": -1}, ElasticityConfigError, "given -1"),
        ({"num_gpus_per_node": 0}, ElasticityConfigError, "per node: 0"),
        ({"model_parallel_size": 0}, ElasticityConfigError, "model-parallel size: 0"),
        ({"model_parallel_size": 2}, ElasticityConfigError, "does not support model-parallel"),
        ({"version": 0.3}, ElasticityConfigError, "elasticity version 0.3"),
        ({"version": 0.15}, NotImplementedError, "0.15"),
    ],
)
def test_mistakes_have_upstreams_errors(
    change: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        computed({**BLOCK, **change})


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for key in ("max_train_batch_size", "micro_batch_sizes"):
        with pytest.raises(ElasticityConfigError, match=f"missing {key}"):
            computed({name: value for name, value in BLOCK.items() if name != key})
    with pytest.raises(ElasticityConfigError, match="'elasticity' is missing"):
        compute_elastic_config({}, "0.6.0")
    with pytest.raises(ElasticityError, match="0.3.1"):
        compute_elastic_config({"elasticity": BLOCK}, "0.3.1")
    with pytest.raises(ValueError, match="dictionary"):
        compute_elastic_config("{}", "0.6.0")  # type: ignore[arg-type]
    with pytest.raises(ElasticityConfigError, match="WORLD_SIZE"):
        computed({**BLOCK, "version": 0.2})
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert computed(BLOCK, return_microbatch=True)[2] == 6
    assert len(computed({**BLOCK, "version": 0.2})) == 2
    assert not elasticity_enabled({}) and elasticity_enabled({"elasticity": BLOCK})


def test_scheduler_and_run_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(BLOCK))
    ensure_immutable({**BLOCK, "max_gpus": 3})
    for change in ({"max_train_batch_size": 100}, {"micro_batch_sizes": [2]}, {"version": 0.2}):
        with pytest.raises(ElasticityConfigError, match="resource scheduler does not match"):
            ensure_immutable({**BLOCK, **change})
    # Kills: a configuration that does not compare at all.
    with pytest.raises(ElasticityConfigError, match="resource scheduler"):
        DeepSpeedConfig({"elasticity": {**BLOCK, "max_train_batch_size": 100}})


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_configuration_takes_the_batch_for_its_ranks(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    config = DeepSpeedConfig({"elasticity": BLOCK})
    sizes = tuple(getattr(config, key) for key in SIZES)
    assert sizes == (1440, 6, 240 // world_size) and config.elasticity_enabled


def test_batch_keys_beside_it_are_refused_or_overridden(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for key in SIZES:
        with pytest.raises(ElasticityConfigError, match=f"{key}: 8"):
            DeepSpeedConfig({"elasticity": BLOCK, key: 8})
    logger = logging.getLogger("DeepSpeed")
    monkeypatch.setattr(logger, "propagate", True)
    config = DeepSpeedConfig(
        {"elasticity": {**BLOCK, "ignore_non_elastic_batch_info": True}, "train_batch_size": 8}
    )
    assert config.train_batch_size == 1440
    assert "overrides train_batch_size: 8" in caplog.text


def test_a_world_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "7")
    with pytest.raises(WrongWorldSize, match=r"World size \(7\)"):
        DeepSpeedConfig({"elasticity": BLOCK})
    split = {**BLOCK, "version": 0.2, "model_parallel_size": 2, "num_gpus_per_node": 2}
    told = "elasticity.model_parallel_size: 2, but 7 ranks"
    with pytest.raises(ElasticityConfigError, match=told):
        DeepSpeedConfig({"elasticity": split})
    with pytest.raises(DeepSpeedConfigError, match="elasticity.min_gpus"):
        DeepSpeedConfig({"elasticity": {**BLOCK, "min_gpus": 0}})


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"elasticity": BLOCK}))
    assert ds_elastic(["-c", str(path), "-w", "4"]) == 0
    out = capsys.readouterr().out
    assert "final_batch_size .... 1440\nvalid_gpus .......... [1, 2, 3, 4, 5, 6, 8" in out
    assert "micro_batch_size .... 6" in out
    assert ds_elastic(["-c", str(path), "-w", "7"]) == 2
    assert capsys.readouterr().err.startswith("ds_elastic: error: World size (7)")
