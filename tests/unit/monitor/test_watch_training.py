"""What engines record for `ds_watch`, how little it makes them wait, and how a browser shows it."""

import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.monitor.watch.page import number
from deepspeed.monitor.watch.record import Line, RecordReader, records_in
from deepspeed.monitor.watch.run import PHASES
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.step_observers import step_figures
from deepspeed.utils.timer import MAX_UNREAD
from unit.common import DistributedTest
from unit.models import TokenModel, tokens

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ACCUMULATION, ROWS, LENGTH = 2, 2, 4
BAD_STEP = 3


def configuration(folder: Path, **keys: Any) -> dict[str, Any]:
    watch = {"enabled": True, "output_path": str(folder), "job_name": "job", "refresh_seconds": 0}
    warmup = {"warmup_num_steps": 8, "warmup_type": "linear"}
    return {
        **{"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": ACCUMULATION},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        "scheduler": {"type": "WarmupLR", "params": warmup},
        **{"watch": watch, **keys},
    }


def make_engine(folder: Path, **keys: Any) -> Any:
    model = TokenModel()
    groups: list[dict[str, Any]] = [{"params": [*model.head.parameters()], "name": "head"}]
    groups.append({"params": list(model.embedding.parameters())})
    config = configuration(folder, **keys)
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


def batch(number_of_batch: int) -> torch.Tensor:
    return tokens(10 * number_of_batch + dist.get_rank(), 16, ROWS, LENGTH)


def train(engine: Any, steps: int, bad_step: int | None = None) -> list[dict[str, Any]]:
    """What the engine says of each step when it is asked."""
    said = []
    for step in range(steps):
        losses = []
        rates = engine.get_lr()
        for micro in range(ACCUMULATION):
            x = batch(step * ACCUMULATION + micro).to(engine.device)
            loss = engine(x, math.inf if step == bad_step else 1.0)
            losses.append(loss.detach())
            engine.backward(loss)
            engine.step()
        norms = {
            "norm": engine.get_global_grad_norm(),
            "group_norms": engine.get_group_grad_norms(),
        }
        applied = engine.was_step_applied()
        said.append({**norms, "loss": torch.stack(losses).mean(), "lr": rates, "applied": applied})
    return said


def read(folder: Path) -> list[Line]:
    """All lines of the newest record."""
    return RecordReader(records_in(folder / "job")[-1]).new_lines()


def steps_in(lines: list[Line]) -> list[Line]:
    return [line for line in lines if "step" in line]


class TestRecord(DistributedTest):
    world_size = 2

    def test_is_what_the_engine_says(self, tmpdir: Any) -> None:
        # Kills: a loss, a norm or a rate of another step, scaled norms, rank 1's record, tokens of
        # one rank, phases that overlap, skips that are not marked.
        fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
        grows = {
            **{"enabled": True, "min_difficulty": 1, "max_difficulty": LENGTH},
            "schedule_type": "fixed_discrete",
            "schedule_config": {"difficulty": [1, LENGTH], "max_step": [3]},
        }
        for stage, keys in (
            (0, {"wall_clock_breakdown": True}),
            (2, {"fp16": fp16}),
            (3, {"bf16": {"enabled": True}, "curriculum_learning": grows}),
        ):
            folder = Path(str(tmpdir)) / str(stage)
            engine = make_engine(folder, zero_optimization={"stage": stage}, **keys)
            bad = BAD_STEP if "fp16" in keys else None
            said = train(engine, 5, bad)
            engine.monitor.write_events([("mine", 1.0, engine.global_samples)])
            engine.destroy()
            dist.barrier()
            lines = read(folder)
            assert len(records_in(folder / "job")) == 1 and "ended" in lines[-1]
            assert lines[0]["groups"] == ["head", "group 1"] and lines[0]["world_size"] == 2
            assert [line for line in lines if line.get("event") == "mine"]
            found = steps_in(lines)
            assert [line["step"] for line in found] == [1, 2, 3, 4, 5]
            for step, (line, truth) in enumerate(zip(found, said, strict=True)):
                is_grown = "curriculum_learning" in keys
                length = 1 if is_grown and step < 3 else LENGTH
                assert line["tokens"] == 2 * ACCUMULATION * ROWS * length
                assert line.get("difficulty") == (length if is_grown else None)
                assert line["samples"] == 2 * ACCUMULATION * ROWS
                assert line["lr"] == truth["lr"] and len(line["lr"]) == 2
                assert bool(line.get("skipped")) is (step == bad) is not truth["applied"]
                assert {*line["ms"]} == {*PHASES, "total"}
                assert sum(line["ms"][phase] for phase in PHASES) <= line["ms"]["total"] + 0.01
                after = 8.0 if step == BAD_STEP + 1 else 16.0
                assert line["loss_scale"] == (after if "fp16" in keys else 1.0)
                if step == bad:
                    assert line["loss"] == "inf" and line["norm"] in ("nan", "inf")
                    continue
                assert line["norm"] == pytest.approx(float(truth["norm"]), rel=1e-6)
                assert line["group_norms"] == pytest.approx(truth["group_norms"], rel=1e-6)
                if dist.get_rank() == 0:
                    assert line["loss"] == float(truth["loss"])

    def test_of_a_pipeline_has_its_loss(self, tmpdir: Any) -> None:
        # Kills: steps recorded before the loss of the batch is known, a loss of the step before.
        folder = Path(str(tmpdir))
        layers = [nn.Embedding(16, 3), nn.Linear(3, 1)]
        module = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
        engine, *_ = deepspeed.initialize(model=module, config=configuration(folder))
        data = [(torch.ones(ROWS, 5, dtype=torch.long), torch.zeros(ROWS, 5, 1))] * ACCUMULATION
        losses = [float(engine.train_batch(iter(data))) for _ in range(3)]
        engine.destroy()
        dist.barrier()
        found = steps_in(read(folder))
        assert [line["loss"] for line in found] == losses
        assert [line["tokens"] for line in found] == [ACCUMULATION * ROWS * 5] * 3

    def test_makes_the_host_wait_nowhere(self, tmpdir: Any) -> None:
        # Kills: a loss, norm or time read as a step ends; pageable copies; steps that pile up.
        for checks, waits_per_step in ((True, 1), (False, 0)):
            folder = Path(str(tmpdir)) / str(waits_per_step)
            with simulate():
                bf16 = {"enabled": True, "check_grad_overflow": checks}
                keys = {"zero_optimization": {"stage": 2}, "scheduler": {"type": None}}
                engine = make_engine(folder, bf16=bf16, **keys)
                inputs = [batch(i).to(engine.device) for i in range(12)]
                with get_accelerator().count_host_waits() as waits:
                    seen = []
                    for i, x in enumerate(inputs):
                        engine.backward(engine(x))
                        engine.step()
                        if i % ACCUMULATION:
                            seen.append((waits.total, waits.pageable_copies.total()))
                    per_step = [b[0] - a[0] for a, b in zip(seen[1:], seen[2:], strict=False)]
                    assert per_step == [waits_per_step] * len(per_step), waits.by_place
                    assert seen[-1][1] == seen[1][1], waits.pageable_copies
                    assert not waits.inside("step_figures"), waits.by_place
                engine.destroy()
            dist.barrier()
            found = steps_in(read(folder))
            assert [line["step"] for line in found] == list(range(1, 7))
            assert all(math.isfinite(line["loss"]) and line["norm"] > 0 for line in found)


class TestOneRank(DistributedTest):
    world_size = 1

    def test_of_a_slow_device(self, tmpdir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: steps that are kept until the end of a run whose numbers never arrive.
        folder = Path(str(tmpdir))
        monkeypatch.setattr(step_figures._UnreadStep, "is_there", lambda step: False)
        engine = make_engine(folder, gradient_accumulation_steps=1)
        for _ in range(MAX_UNREAD + 4):
            engine.backward(engine(batch(0)))
            engine.step()
        assert len(steps_in(read(folder))) == 4
        engine.destroy()
        assert len(steps_in(read(folder))) == MAX_UNREAD + 4

    def test_in_a_browser(self, tmpdir: Any) -> None:
        # Kills: a failing script, curves not drawn, numbers not the recorded ones, unmarked skips.
        browser = next(filter(None, map(shutil.which, BROWSERS)), None)
        if browser is None:
            pytest.skip(f"no browser to open the page with: none of {', '.join(BROWSERS)}")
        folder = Path(str(tmpdir))
        watch = {**configuration(folder)["watch"], "refresh_seconds": 0.01}
        for lr in (0.5, 0.25):
            optimizer = {"type": "AdamW", "params": {"lr": lr}}
            fp16 = {"enabled": True, "hysteresis": 1}
            engine = make_engine(folder, watch=watch, optimizer=optimizer, fp16=fp16)
            train(engine, 6, BAD_STEP)
            engine.monitor.write_events([("Eval/accuracy", 0.8125, 24)])
            engine.destroy()
        page = folder / "job" / "watch.html"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000"]
        flags += [f"--user-data-dir={folder / 'profile'}", "--window-size=500,900", "--dump-dom"]
        command = [browser, *flags, page.as_uri()]
        dom = subprocess.check_output(command, text=True, timeout=120)
        records = [RecordReader(path).new_lines() for path in records_in(folder / "job")]
        before, last = (steps_in(lines)[-1] for lines in records)
        charts = {
            title: (re.findall("<em>(.*?)</em>", rest), rest)
            for title, rest in re.findall(r'<figure data-chart="(.*?)">(.*?)</figure>', dom, re.S)
        }
        shown = {title: values for title, (values, _) in charts.items()}
        assert shown["loss"] == [number(last["loss"]), number(before["loss"])]
        norms = [last["norm"], *last["group_norms"], before["norm"]]
        assert shown["gradient norm"] == [number(norm) for norm in norms]
        assert shown["learning rate"] == [number(last["lr"][0]), number(before["lr"][0])]
        times = [last["ms"][phase] for phase in PHASES]
        times += [last["ms"]["total"] - sum(times), before["ms"]["total"]]
        for text, value in zip(shown["step time"], times, strict=True):
            assert float(text.removesuffix(" ms").replace(",", "")) == pytest.approx(value, 1e-3)
        assert shown["Eval/accuracy"] == ["0.8125", "0.8125"]
        assert {"tokens/s", "memory of rank 0", "loss scale"} <= charts.keys()
        for title, (_, rest) in charts.items():
            paths = re.findall(r'<path[^>]* d="(M[^"]*)"|<circle', rest)
            assert paths and not re.search("NaN|Infinity|undefined", rest), title
        assert charts["loss"][1].count('class="skip"') == 1
        assert re.search(r'id="state" class="state ended"', dom)
