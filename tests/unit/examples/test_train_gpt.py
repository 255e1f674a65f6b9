"""The examples as users run them; resumed or parallel, they are the run of one process."""

import json
import re
from pathlib import Path

import pytest
import torch
from gpt import GPT
from one_process import HALF_TOLERANCE, TOLERANCE, OneProcess, Step, verdict
from pipeline_gpt import GPTConfig, layer_specs, loss_of_scores, whole_model
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


def log(folder: Path) -> list[object]:
    """The numbers of a run."""
    content = json.loads((folder / "log.json").read_text())
    return [content["steps"], content["validation"]]


def text_in(folder: Path) -> str:
    """A small text."""
    (folder / "text.txt").write_text("def f(x):\n    return x + 1\n" * 200)
    return str(folder / "text.txt")


@pytest.mark.slow
def test_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    example = ROOT / "examples" / "train_gpt.py"
    early = tmp_path / "early.py"
    early.write_text(STOP_AT_2.format(examples=str(ROOT / "examples")))
    flags = ("--data", text_in(tmp_path), *FLAGS, "--out")
    whole = run_ranks(example, tmp_path, *flags, "whole", launcher="deepspeed")
    assert "validation loss 5.545 at step 0" in whole and "def " in whole
    assert "resumed from" not in whole
    assert (tmp_path / "whole" / "loss.png").stat().st_size > 5000
    stopped = run_ranks(early, tmp_path, *flags, "parts")
    assert "stopped at step 2, which is saved" in stopped and "validation loss" not in stopped
    resumed = run_ranks(example, tmp_path, *flags, "parts", "--resume")
    assert "global_step2: step 2, data at epoch 0, sequence 16" in resumed
    assert log(tmp_path / "whole") == log(tmp_path / "parts")
    kept = (tmp_path / "parts" / "checkpoints").glob("global_step*")
    assert [entry.name for entry in kept] == ["global_step4"]


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
    flags = "--stage 1 --precision fp16 --offload --accumulation 3 --lr 0.5 --clip 2"
    config = engine_config(parse_arguments([*flags.split(), "--micro-batch", "7"]), 600)
    assert config["zero_optimization"] == {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    assert config["fp16"] == {"enabled": True} and "bf16" not in config
    assert config["optimizer"]["params"]["lr"] == 0.5
    assert config["scheduler"]["params"]["total_num_steps"] == 600
    assert config["gradient_accumulation_steps"] == 3 and config["gradient_clipping"] == 2
    assert config["train_micro_batch_size_per_gpu"] == 7


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


SMALL = "--layers 2 --width 32 --context 16 --steps 5 --check 3".split()
EQUAL = "equal to one process to rounding"
# Run before an example: a fault that its own check must find.
OTHER_CLIPPING = """
import sys
sys.path.insert(0, {examples!r})
import one_process, {example}
utils = one_process.nn.utils
utils.clip_grad_norm_ = lambda params, limit, whole=utils.clip_grad_norm_: whole(params, 0.1)
{example}.main()
"""


def run(folder: Path, script: Path, *flags: str, launcher: str | None = "deepspeed") -> str:
    """Run a script with two processes on a small text."""
    return run_ranks(script, folder, "--data", text_in(folder), *SMALL, *flags, launcher=launcher)


OF_PIPELINE = ("rank 1: pipe 1 of 2, data 0 of 1", "part 1 on stage 1: ", "bubble fraction:")
PLAN = "stage 1  | .  F0 I0 F1 I1 W0"
OF_EXPERTS = "rank 1: experts [2, 3], gradients averaged with those of ranks [1]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("pipeline_gpt.py --schedule zero_bubble", (*OF_PIPELINE, PLAN)),
        ("moe_gpt.py", (OF_EXPERTS,)),
    ],
    ids=["pipeline", "experts"],
)
def test_in_parallel(tmp_path: Path, call: str, words: tuple[str, ...]) -> None:
    example, *flags = call.split()
    said = run(tmp_path, ROOT / "examples" / example, *flags)
    assert [shown for shown in (EQUAL, *words) if shown not in said] == [], said
    found = re.search(r"validation loss ([\d.]+) before, ([\d.]+) after 5 steps", said)
    assert found is not None, said
    assert float(found[1]) == 5.545 and float(found[2]) < 5.2


@pytest.mark.slow
def test_the_check_finds_a_difference(tmp_path: Path) -> None:
    # Kills a check that compares a run with itself, or whose failure is not the program's.
    script = tmp_path / "faulty.py"
    script.write_text(OTHER_CLIPPING.format(examples=str(ROOT / "examples"), example="moe_gpt"))
    config = str(ROOT / "examples" / "moe_config.json")
    with pytest.raises(pytest.fail.Exception, match="NOT equal to one process"):
        run(tmp_path, script, "--config", config, launcher=None)


def test_verdict() -> None:
    assert EQUAL in verdict(TOLERANCE, torch.float32)
    assert EQUAL in verdict(HALF_TOLERANCE, torch.bfloat16)
    wrong = [(2 * TOLERANCE, torch.float32), (2 * HALF_TOLERANCE, torch.float16)]
    for difference, dtype in [*wrong, (float("inf"), torch.float32)]:
        with pytest.raises(SystemExit, match="NOT equal"):
            verdict(difference, dtype)


def test_difference_of_steps_notices_nan() -> None:
    # max() lets NaN pass, wherever it stands.
    assert Step(1.0, 2.0).difference(Step(1.0, 4.0)) == 0.5
    assert Step(1.0, float("nan")).difference(Step(1.0, 1.0)) == float("inf")
    assert Step(float("nan"), 1.0).difference(Step(1.0, 1.0)) == float("inf")


def test_difference_of_weights_is_in_units_of_their_way() -> None:
    # Kills a difference relative to the weights themselves, under which wrong small updates would
    # count as rounding.
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.constant_(model.weight, 100.0)
    config = {"optimizer": {"params": {"lr": 0.01, "weight_decay": 0.0}}, "gradient_clipping": 1.0}
    alone = OneProcess(model, config)
    alone.step([torch.ones(1, 4)], lambda batch: model(batch).sum())
    assert alone.difference({"weight": model.weight.detach().clone()}) == 0
    assert alone.difference({"weight": alone.first["weight"]}) == pytest.approx(1.0)
    assert alone.difference({"weight": alone.first["weight"] * float("nan")}) == float("inf")


def test_layers_make_the_model_of_gpt() -> None:
    # The list of layers computes what gpt.GPT does: kills a layer left out or another shape.
    config = GPTConfig(layers=2, width=32, heads=1, context=16)
    whole, layers = GPT(config), whole_model(layer_specs(config), seed=0)
    with torch.no_grad():
        for param, value in zip(whole.parameters(), layers.parameters(), strict=True):
            param.normal_(std=0.1)
            value.copy_(param)
    text = torch.randint(256, (3, 17))
    assert loss_of_scores(layers(text[:, :-1]), text[:, 1:]) == whole(text)
