"""Pieces of work so small that a small model has several, and that no size is forgotten."""

import ast
import importlib
from pathlib import Path

import pytest

import deepspeed
from deepspeed.runtime.sharding import publisher
from deepspeed.runtime.streams import StagingBuffers
from deepspeed.verify import lowered_sizes
from deepspeed.verify.oracle.plan import RunKind
from deepspeed.verify.sizes import SIZES, piece_numel
from unit.common import DistributedTest
from unit.verify.oracle_runs import config_of, failures, plan_of, report_of

PACKAGE = Path(deepspeed.__file__).parent
# Constants of that kind which keep no path from a small model.
OTHERS = {
    ("runtime/zero/estimates/stages_1_and_2.py", "BUCKET_NUMEL"): "a formula's default",
    ("runtime/zero/parameters/own_draws.py", "KEPT_NUMEL"): "a limit, beyond which is an error",
}
LEAST = 1024


def sizes_in(path: Path) -> list[str]:
    """Module constants that count elements, by their names."""
    found = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name.isupper() and name.endswith(("_NUMEL", "_CHUNK")):
                found.append(name)
    return found


def test_every_size_of_the_training_path_is_lowered() -> None:
    # Kills: a constant that a later change adds, above every model of the tests.
    known = {(module.replace(".", "/") + ".py", name) for module, name in SIZES}
    found = {
        (f"deepspeed/{path.relative_to(PACKAGE).as_posix()}", name)
        for part in ("runtime", "ops", "moe", "sequence", "comm")
        for path in (PACKAGE / part).rglob("*.py")
        for name in sizes_in(path)
    }
    others = {(f"deepspeed/{path}", name) for path, name in OTHERS}
    assert found - others == known


def test_sizes_are_lowered_and_put_back() -> None:
    before = [getattr(importlib.import_module(module), name) for module, name in SIZES]
    assert all(size >= LEAST for size in before)
    with pytest.raises(ZeroDivisionError), lowered_sizes(100):
        assert publisher.UPDATE_NUMEL == 100
        raise ZeroDivisionError
    assert before == [getattr(importlib.import_module(module), name) for module, name in SIZES]
    with pytest.raises(ValueError, match="numel=0"), lowered_sizes(0):
        pass
    assert piece_numel(1600, 2) == 100 and piece_numel(3, 2) == 1


class TestOracle(DistributedTest):
    world_size = 2

    def test_reused_staging_buffers_are_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a simulated run in which no buffer is used twice, or without the optimizer that
        # fills them.
        config = config_of(1, "bf16")
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        plan = plan_of(config, "right", (RunKind.SIM,), steps=2, schedules=2)
        assert failures(report_of(plan)) == []

        take = StagingBuffers.take

        def forgetful(self: StagingBuffers, *args: object) -> object:
            self._free = type(self._free)((memory, None) for memory, _ in self._free)
            return take(self, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(StagingBuffers, "take", forgetful)
        failed = failures(report_of(plan))
        assert any("the host never waits" in row for row in failed), failed
