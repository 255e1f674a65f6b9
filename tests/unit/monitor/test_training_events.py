"""What engines write after each step."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.pipe import PipelineModule
from unit.common import DistributedTest


def series(folder: Path, name: str) -> list[tuple[int, float]]:
    with open(folder / "job" / f"Train_Samples_{name}.csv", newline="") as file:
        return [(int(step), float(value)) for step, value in list(csv.reader(file))[1:]]


def configuration(folder: Path, **keys: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "job"},
        **keys,
    }


class TestEngine(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("divided_by", ["engine", "caller", "scale"])
    def test_values_and_steps(self, divided_by: str, tmpdir: Any) -> None:
        # Kills: the last micro-batch's loss as the step's, the divided or scaled loss, rank 1's,
        # steps counted in steps.
        folder = Path(str(tmpdir))
        model = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        engine, *_ = deepspeed.initialize(
            model=model, config=configuration(folder, zero_optimization={"stage": 1})
        )
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
            assert not list(folder.glob("job/*elapsed*")) and not list(
                folder.glob("job/*loss_scale*")
            )

    def test_fp16_and_phases(self, tmpdir: Any) -> None:
        # Kills: phases written on steps that were not logged, a loss scale that is not the step's.
        folder = Path(str(tmpdir))
        keys = {
            "wall_clock_breakdown": True,
            "steps_per_print": 2,
            "fp16": {"enabled": True, "initial_scale_power": 4},
        }
        engine, *_ = deepspeed.initialize(
            model=torch.nn.Linear(3, 1), config=configuration(folder, **keys)
        )
        for _ in range(2 * 4):
            engine.backward(engine(torch.ones(2, 3, dtype=torch.float16)).mean())
            engine.step()
        engine.destroy()
        if dist.get_rank() == 0:
            assert series(folder, "loss_scale") == [(8, 16.0), (16, 16.0), (24, 16.0), (32, 16.0)]
            phases = {
                name: series(folder, f"elapsed_time_ms_{name}")
                for name in ("forward", "backward", "backward_inner", "step")
            }
            assert all([step for step, _ in points] == [16, 32] for points in phases.values())
            assert all(value > 0 for points in phases.values() for _, value in points)
            assert all(
                inner <= whole
                for (_, inner), (_, whole) in zip(
                    phases["backward_inner"], phases["backward"], strict=True
                )
            )

    def test_scripts_write_too(self, tmpdir: Any) -> None:
        folder = Path(str(tmpdir))
        engine, *_ = deepspeed.initialize(model=torch.nn.Linear(3, 1), config=configuration(folder))
        engine.monitor.write_events([("Train/Samples/mine", float(dist.get_rank()), 3)])
        engine.destroy()
        dist.barrier()
        assert engine.monitor.enabled and series(folder, "mine") == [(3, 0.0)]

    def test_pipeline_writes_the_mean_of_all_ranks(self, tmpdir: Any) -> None:
        # Kills: a pipeline whose rank 0, which has no loss, writes none; a loss of the step before.
        folder = Path(str(tmpdir))
        module = PipelineModule(
            [torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)],
            num_stages=2,
            loss_fn=lambda out, label: (out - label).square().mean(),
        )
        keys = {"wall_clock_breakdown": True, "steps_per_print": 2}
        engine, *_ = deepspeed.initialize(model=module, config=configuration(folder, **keys))
        data = [(torch.ones(2, 3), torch.zeros(2, 1)), (torch.zeros(2, 3), torch.ones(2, 1))]
        losses = [float(engine.train_batch(iter(data))) for _ in range(2)]
        engine.destroy()
        if dist.get_rank() == 0:
            assert series(folder, "train_loss") == list(zip([4, 8], losses, strict=True))
            assert [step for step, _ in series(folder, "lr")] == [4, 8]
            for phase in ("forward", "backward", "backward_inner", "step"):
                assert [
                    step for step, value in series(folder, f"elapsed_time_ms_{phase}") if value > 0
                ] == [8]
