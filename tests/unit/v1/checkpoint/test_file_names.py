"""Names of checkpoint files: upstream's, read back as made, by one module only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import deepspeed
from deepspeed.checkpoint import file_names

PACKAGE = Path(deepspeed.__file__).parent
MAY_WRITE_NAMES = ("checkpoint/constants.py", "checkpoint/file_names.py")
# Keys of transformers' configurations and of ours.
OTHER_WORDS = ("layer_types", "layer_specs")
PARTS_OF_NAMES = (
    "mp_rank_",
    "zero_pp_rank_",
    "expp_rank_",
    "host_state_rank_",
    "window_rank_",
    "layer_",
    "_states.pt",
    ".dcp",
    ".distcp",
    ".saving",
    ".replaced",
    ".removed",
    ".converting",
    "manifest.json",
)


def test_names_are_upstreams() -> None:
    assert file_names.model_file(3) == "mp_rank_03_model_states.pt"
    assert file_names.stage3_model_file(12, 3) == "zero_pp_rank_12_mp_rank_03_model_states.pt"
    assert (
        file_names.optimizer_file(12, 3, bf16=False) == "zero_pp_rank_12_mp_rank_03_optim_states.pt"
    )
    assert (
        file_names.optimizer_file(0, 113, bf16=True)
        == "bf16_zero_pp_rank_0_mp_rank_113_optim_states.pt"
    )
    assert file_names.expert_optimizer_file(2, 0) == "expp_rank_2_mp_rank_00_optim_states.pt"
    assert file_names.expert_file(1, 12, 3) == "layer_1_expert_12_mp_rank_03_model_states.pt"
    layer = file_names.layer_id(7)
    assert file_names.layer_file(layer, "") == "layer_07-model_states.pt"
    assert file_names.layer_file(layer, "model_01") == "layer_07-model_01-model_states.pt"
    assert file_names.layer_file_glob(7) == "layer_07-*model_states.pt"
    assert file_names.host_file(11) == "host_state_rank_11.pt"
    assert file_names.window_file(11) == "window_rank_11.pt"
    assert file_names.state_file("exp_avg") == "exp_avg.pt"
    assert file_names.default_tag(1000) == "global_step1000"


@pytest.mark.parametrize("rank", [0, 7, 130])
@pytest.mark.parametrize("part", [0, 7, 130])
def test_names_are_read_back(rank: int, part: int) -> None:
    for bf16 in (False, True):
        name = file_names.optimizer_file(rank, part, bf16)
        assert file_names.parse_optimizer_file(name) == (rank, part)
    name = file_names.expert_optimizer_file(rank, part)
    assert file_names.parse_expert_optimizer_file(name) == (rank, part)
    name = file_names.expert_file(rank, part, rank + part)
    assert file_names.parse_expert_file(name) == (rank, part, rank + part)
    layer = file_names.layer_id(rank)
    assert file_names.parse_layer_file(file_names.layer_file(layer, "")) == (rank, 0)
    for coordinates in (f"model_{part:02d}", f"expert_01-model_{part:02d}"):
        name = file_names.layer_file(layer, coordinates)
        assert file_names.parse_layer_file(name) == (rank, part)
    assert file_names.parse_state_file(file_names.state_file("exp_avg")) == "exp_avg"


def test_every_kind_is_told_from_all_others() -> None:
    """A parser that is too generous would take one kind of file for another."""
    kinds = {
        file_names.model_file(0): "is_model_file",
        file_names.optimizer_file(0, 0, bf16=False): "parse_optimizer_file",
        file_names.optimizer_file(0, 0, bf16=True): "parse_optimizer_file",
        file_names.expert_optimizer_file(0, 0): "parse_expert_optimizer_file",
        file_names.expert_file(0, 0, 0): "parse_expert_file",
        file_names.layer_file(file_names.layer_id(0), "model_00"): "parse_layer_file",
        file_names.host_file(0): "is_host_file",
    }
    for name, own in kinds.items():
        found = {kind for kind in kinds.values() if getattr(file_names, kind)(name)}
        assert found == {own}, name
        assert not any(getattr(file_names, kind)(f"{name}.copy") for kind in kinds.values())
    assert not file_names.is_model_file(file_names.stage3_model_file(0, 0))


def literals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of all strings that are no docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings:
                yield node.lineno, node.value


def test_only_one_module_makes_names() -> None:
    """Kills: a second format or pattern of a name, which a change of the first one would miss."""
    found = []
    for folder in ("checkpoint", "runtime", "utils"):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            name = path.relative_to(PACKAGE).as_posix()
            for line, text in literals(ast.parse(path.read_text())):
                if name in MAY_WRITE_NAMES or text in OTHER_WORDS:
                    continue
                if any(text.startswith(part) or text.endswith(part) for part in PARTS_OF_NAMES):
                    found.append(f"{name}:{line}: {text!r}")
    assert found == []
