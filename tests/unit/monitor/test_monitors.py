"""Each monitor by itself, all behind `MonitorMaster`, and what engines write after each step."""

import csv
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.pipe import PipelineModule
from deepspeed.utils.logging import logger
from unit.common import DistributedTest
from unit.models import config_of

EVENTS = [
    ("Train/Samples/loss", 0.5, 8),
    ("Train/Samples/loss", torch.tensor(0.25), 16),
    ("accuracy", 1, 16),
]


def master(**blocks: Any) -> MonitorMaster:
    enabled = {name: {"enabled": True, **block} for name, block in blocks.items()}
    return MonitorMaster(get_monitor_config(enabled))


def rows(path: Path) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))


def test_disabled_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monitors = MonitorMaster(get_monitor_config({}))
    monitors.write_events(EVENTS)
    assert not monitors.enabled and list(tmp_path.iterdir()) == []


def test_csv_has_a_file_per_name_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    # Kills: a second title line after a restart, one column for all names, folders made of slashes.
    for step in (0, 100):
        monitors = master(csv_monitor={"output_path": str(tmp_path), "job_name": "job"})
        monitors.write_events([(name, value, at + step) for name, value, at in EVENTS])
        monitors.close()
    title, *found = rows(tmp_path / "job" / "Train_Samples_loss.csv")
    assert title == ["step", "loss"]
    assert found == [["8", "0.5"], ["16", "0.25"], ["108", "0.5"], ["116", "0.25"]]
    assert rows(tmp_path / "job" / "accuracy.csv")[1:] == [["16", "1.0"], ["116", "1.0"]]


def test_tensorboard_files_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitors = master(tensorboard={"output_path": str(tmp_path), "job_name": "job"})
    monitors.write_events(EVENTS)
    # Read before closing: a run that is killed must leave what it wrote.
    reader = EventAccumulator(str(tmp_path / "job"))
    reader.Reload()
    assert sorted(reader.Tags()["scalars"]) == ["Train/Samples/loss", "accuracy"]
    found = [(event.step, event.value) for event in reader.Scalars("Train/Samples/loss")]
    assert found == [(8, 0.5), (16, 0.25)]
    monitors.close()


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand-ins for wandb and comet_ml that write down their calls."""
    calls: list[Any] = []
    module = types.ModuleType("wandb")
    run = types.SimpleNamespace(
        log=lambda data, step=None, commit=None: calls.append(("log", step, data)),
        finish=lambda: calls.append("finish"),
    )
    module.run = None  # type: ignore[attr-defined]
    module.init = lambda **given: calls.append(("init", given)) or run  # type: ignore[attr-defined]
    experiment = types.SimpleNamespace(
        log_metric=lambda name, value, step=None: calls.append((name, value, step)),
        set_name=lambda name: calls.append(("name", name)),
        end=lambda: calls.append("end"),
    )
    comet = types.ModuleType("comet_ml")
    comet.start = lambda **given: calls.append(("start", given)) or experiment  # type: ignore[attr-defined]
    for name, fake in (("wandb", module), ("comet_ml", comet)):
        fake.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]  # find_spec reads it
        monkeypatch.setitem(sys.modules, name, fake)
    return calls


def test_wandb_gets_one_call_per_step(fakes: list[Any]) -> None:
    monitors = master(wandb={"project": "p", "team": "t", "group": "g"})
    monitors.write_events(EVENTS)
    monitors.close()
    assert fakes == [
        ("init", {"project": "p", "group": "g", "entity": "t"}),
        ("log", 8, {"Train/Samples/loss": 0.5}),
        ("log", 16, {"Train/Samples/loss": 0.25, "accuracy": 1.0}),
        "finish",
    ]


def test_wandb_joins_the_scripts_run_and_leaves_it_open(fakes: list[Any]) -> None:
    # Kills: a second run beside the script's one, a script's run that ends with the engine.
    own: list[Any] = []
    run = types.SimpleNamespace(log=lambda data, step=None, commit=None: own.append(step))
    sys.modules["wandb"].run = run  # type: ignore[attr-defined]
    monitors = master(wandb={})
    monitors.write_events(EVENTS)
    monitors.close()
    assert own == [8, 16] and fakes == []


def test_comet_thins_out_each_name_by_itself(fakes: list[Any]) -> None:
    # Kills: an interval one name uses up, or of calls, not samples; nulls for comet_ml.start.
    monitors = master(comet={"samples_log_interval": 10, "project": "p", "experiment_name": "e"})
    events = [("a", 1.0, 0), ("b", 2.0, 5), ("a", 3.0, 9), ("a", 4.0, 10), ("a", 5.0, 4)]
    monitors.write_events(events)
    monitors.close()
    assert fakes[:2] == [("start", {"project": "p"}), ("name", "e")]
    assert fakes[2:] == [("a", 1.0, 0), ("b", 2.0, 5), ("a", 4.0, 10), ("a", 5.0, 4), "end"]


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "comet-ml"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    block = package.removesuffix("-ml")
    with pytest.raises(ImportError, match=f'{block}.enabled: true .*"pip install {package}"'):
        master(**{block: {}})


def test_a_monitor_that_fails_does_not_end_the_training(
    fakes: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kills: a full disk that ends the run or silences other monitors, a warning every step.
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *args: said.append(text % args))
    own = {"output_path": str(tmp_path), "job_name": "job"}
    monitors = master(csv_monitor=own, comet={"samples_log_interval": 1})
    (tmp_path / "job" / "accuracy.csv").mkdir()  # cannot be opened as a file
    for step in (1, 2):
        monitors.write_events([("accuracy", 1.0, step)])
    assert fakes[1:] == [("accuracy", 1.0, 1), ("accuracy", 1.0, 2)]
    assert len(said) == 1 and "csvMonitor" in said[0] and "accuracy.csv" in said[0]


@pytest.mark.parametrize(
    "event", [("a", "high", 1), ("a", 1.0), ("a", torch.ones(2), 1), ("a", 1.0, None)]
)
def test_a_wrong_event_is_an_error(event: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an event is"):
        master(csv_monitor={"output_path": str(tmp_path)}).write_events([event])


def series(folder: Path, name: str) -> list[tuple[int, float]]:
    found = rows(folder / "job" / f"Train_Samples_{name}.csv")[1:]
    return [(int(step), float(value)) for step, value in found]


def start(model: Any, folder: Path, stage: int = 0, **keys: Any) -> Any:
    csv_monitor = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    optimizer = {"type": "SGD", "params": {"lr": 0.5}}
    config = config_of(stage, 2, 2, csv_monitor=csv_monitor, optimizer=optimizer, **keys)
    return deepspeed.initialize(model=model, config=config)[0]


PHASES = ("forward", "backward", "backward_inner", "step")


class TestEngine(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("divided_by", ["engine", "caller", "scale"])
    def test_values_and_steps(self, divided_by: str, tmpdir: Any) -> None:
        # Kills: the last micro-batch's, divided, scaled or rank 1's loss; steps counted in steps.
        folder = Path(str(tmpdir))
        model = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        engine = start(model, folder, 1)
        expected = []
        for step in range(2):
            losses = []
            for micro_batch in range(2):
                x = torch.full((2, 3), float(1 + step + 3 * micro_batch + 100 * dist.get_rank()))
                loss = engine(x).mean()
                losses.append(loss.item())
                if divided_by == "engine":
                    engine.backward(loss)
                elif divided_by == "caller":
                    engine.backward(loss / 2, scale_wrt_gas=False)
                else:
                    engine.scale(loss).backward()
                engine.step()
            expected.append(sum(losses) / 2)
        norm = engine.get_global_grad_norm()
        engine.destroy()
        if dist.get_rank() == 0:
            # Global batch 2 micro-batches x 2 samples x 2 ranks.
            assert series(folder, "train_loss") == list(zip([8, 16], expected, strict=True))
            assert series(folder, "lr") == [(8, 0.5), (16, 0.5)]
            assert series(folder, "grad_norm")[1] == (16, pytest.approx(float(norm), rel=1e-6))
            assert not list(folder.glob("job/*elapsed*"))
            assert not list(folder.glob("job/*loss_scale*"))

    def test_fp16_and_phases(self, tmpdir: Any) -> None:
        # Kills: phases written on steps that were not logged, a loss scale that is not the step's.
        folder = Path(str(tmpdir))
        fp16 = {"enabled": True, "initial_scale_power": 4}
        keys: dict[str, Any] = {"wall_clock_breakdown": True, "steps_per_print": 2, "fp16": fp16}
        engine = start(torch.nn.Linear(3, 1), folder, **keys)
        for _ in range(2 * 4):
            engine.backward(engine(torch.ones(2, 3, dtype=torch.float16)).mean())
            engine.step()
        engine.destroy()
        if dist.get_rank() == 0:
            assert series(folder, "loss_scale") == [(8, 16.0), (16, 16.0), (24, 16.0), (32, 16.0)]
            phases = {name: series(folder, f"elapsed_time_ms_{name}") for name in PHASES}
            assert all([step for step, _ in points] == [16, 32] for points in phases.values())
            assert all(value > 0 for points in phases.values() for _, value in points)
            both = zip(phases["backward_inner"], phases["backward"], strict=True)
            assert all(inner <= whole for (_, inner), (_, whole) in both)

    def test_scripts_write_too(self, tmpdir: Any) -> None:
        folder = Path(str(tmpdir))
        engine = start(torch.nn.Linear(3, 1), folder)
        engine.monitor.write_events([("Train/Samples/mine", float(dist.get_rank()), 3)])
        engine.destroy()
        dist.barrier()
        assert engine.monitor.enabled and series(folder, "mine") == [(3, 0.0)]

    def test_pipeline_writes_the_mean_of_all_ranks(self, tmpdir: Any) -> None:
        # Kills: a pipeline whose rank 0, which has no loss, writes none; a loss of the step before.
        folder = Path(str(tmpdir))
        layers = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)]
        module = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
        engine = start(module, folder, wall_clock_breakdown=True, steps_per_print=2)
        data = [(torch.ones(2, 3), torch.zeros(2, 1)), (torch.zeros(2, 3), torch.ones(2, 1))]
        losses = [float(engine.train_batch(iter(data))) for _ in range(2)]
        engine.destroy()
        if dist.get_rank() == 0:
            assert series(folder, "train_loss") == list(zip([4, 8], losses, strict=True))
            assert [step for step, _ in series(folder, "lr")] == [4, 8]
            for phase in PHASES:
                times = series(folder, f"elapsed_time_ms_{phase}")
                assert [step for step, value in times if value > 0] == [8]
