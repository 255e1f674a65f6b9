"""The example as users run it: two processes; resumed, it is the run that never stopped."""

import json
from pathlib import Path

import pytest
from train_gpt import engine_config, parse_arguments, saved_step, total_steps
from unit.clients.launching import run_ranks

ROOT = Path(__file__).resolve().parents[3]
MODEL = "--layers 1 --width 32 --context 16".split()
FLAGS = [*MODEL, *"--micro-batch 2 --steps 4 --save-every 2 --validate-every 2".split()]
# Ctrl-C in the second step, on one rank first: both stop after the same step.
STOP_AT_2 = """
import os, signal, sys
sys.path.insert(0, {examples!r})
import train_gpt
whole = train_gpt.train_step
def train_step(engine, batches):
    loss = whole(engine, batches)
    if engine.global_steps == 2 and engine.global_rank == 1:
        os.kill(os.getpid(), signal.SIGINT)
    return loss
train_gpt.train_step = train_step
train_gpt.main()
"""


def log(folder: Path) -> dict[str, object]:
    """The numbers of a run."""
    content = json.loads((folder / "log.json").read_text())
    return {"steps": content["steps"], "validation": content["validation"]}


@pytest.mark.slow
def test_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 200)
    example = ROOT / "examples" / "train_gpt.py"
    early = tmp_path / "early.py"
    early.write_text(STOP_AT_2.format(examples=str(ROOT / "examples")))
    flags = ("--data", str(text), *FLAGS, "--out")
    whole = run_ranks(example, tmp_path, *flags, "whole", launcher="deepspeed")
    assert "validation loss 5.545 at step 0" in whole and "def " in whole
    assert "resumed from" not in whole
    assert (tmp_path / "whole" / "loss.png").stat().st_size > 5000
    stopped = run_ranks(early, tmp_path, *flags, "parts")
    assert "stopped at step 2, which is saved" in stopped and "validation loss" not in stopped
    resumed = run_ranks(example, tmp_path, *flags, "parts", "--resume")
    assert "global_step2: step 2, data at epoch 0, sequence 16" in resumed
    assert log(tmp_path / "whole") == log(tmp_path / "parts")
    assert [entry.name for entry in (tmp_path / "parts" / "checkpoints").glob("global_step*")] == [
        "global_step4"
    ]


def test_run_ends_at_the_next_multiple() -> None:
    assert [total_steps(done, 300) for done in (0, 150, 299, 300, 450)] == [300, 300, 300, 600, 600]


def test_saved_step(tmp_path: Path) -> None:
    assert saved_step(tmp_path) == 0
    (tmp_path / "latest").write_text("global_step12\n")
    assert saved_step(tmp_path) == 12
    (tmp_path / "latest").write_text("best")
    with pytest.raises(ValueError, match="names no checkpoint of this example"):
        saved_step(tmp_path)


def test_flags_reach_the_configuration() -> None:
    arguments = parse_arguments(
        "--stage 1 --precision fp16 --offload --accumulation 3 --lr 0.5 --clip 2 --micro-batch "
        "7".split()
    )
    config = engine_config(arguments, 600)
    assert config["zero_optimization"] == {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    assert config["fp16"] == {"enabled": True} and "bf16" not in config
    assert (
        config["optimizer"]["params"]["lr"] == 0.5
        and config["scheduler"]["params"]["total_num_steps"] == 600
    )
    assert (config["gradient_accumulation_steps"], config["train_micro_batch_size_per_gpu"]) == (
        3,
        7,
    )
    assert config["gradient_clipping"] == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--stage 0 --offload", "--offload needs --stage 1, 2 or 3"),
        ("--fresh --resume", "--fresh and --resume contradict"),
        ("--width 40", "--width must be a multiple of 32"),
        ("--micro-batch 0", "--micro-batch must be at least 1, got 0"),
    ],
)
def test_flags_that_cannot_be(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(flags.split())
    assert message in capsys.readouterr().err
