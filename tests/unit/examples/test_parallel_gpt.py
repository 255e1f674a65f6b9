"""The pipeline and the expert example by one command: they equal one process and tell more."""

import re
from pathlib import Path

import pytest
import torch
from gpt import GPT
from one_process import HALF_TOLERANCE, TOLERANCE, OneProcess, Step, verdict
from pipeline_gpt import GPTConfig, layer_specs, loss_of_scores, whole_model
from unit.clients.launching import run_ranks

ROOT = Path(__file__).resolve().parents[3]
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
    text = folder / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 200)
    return run_ranks(script, folder, "--data", str(text), *SMALL, *flags, launcher=launcher)


def losses(output: str) -> tuple[float, float]:
    """Validation loss before and after."""
    found = re.search(r"validation loss ([\d.]+) before, ([\d.]+) after 5 steps", output)
    assert found is not None, output
    return float(found[1]), float(found[2])


@pytest.mark.slow
def test_pipeline(tmp_path: Path) -> None:
    said = run(tmp_path, ROOT / "examples" / "pipeline_gpt.py", "--schedule", "zero_bubble")
    assert EQUAL in said, said
    for shown in (
        "rank 1: pipe 1 of 2, data 0 of 1",
        "part 1 on stage 1: ",
        "stage 1  | .  F0 I0 F1 I1 W0",
        "bubble fraction:",
    ):
        assert shown in said, shown
    before, after = losses(said)
    assert before == 5.545 and after < 5.2


@pytest.mark.slow
def test_experts(tmp_path: Path) -> None:
    said = run(tmp_path, ROOT / "examples" / "moe_gpt.py")
    assert EQUAL in said, said
    assert "rank 1: experts [2, 3], gradients averaged with those of ranks [1]" in said
    before, after = losses(said)
    assert before == 5.545 and after < 5.2


@pytest.mark.slow
def test_the_check_finds_a_difference(tmp_path: Path) -> None:
    # Kills a check that compares a run with itself, or whose failure is not the program's.
    script = tmp_path / "faulty.py"
    script.write_text(OTHER_CLIPPING.format(examples=str(ROOT / "examples"), example="moe_gpt"))
    config = str(ROOT / "examples" / "moe_config.json")
    with pytest.raises(pytest.fail.Exception, match="NOT equal to one process"):
        run(tmp_path, script, "--config", config, launcher=None)


def test_verdict() -> None:
    assert EQUAL in verdict(TOLERANCE, torch.float32) and EQUAL in verdict(
        HALF_TOLERANCE, torch.bfloat16
    )
    for difference, dtype in (
        (2 * TOLERANCE, torch.float32),
        (2 * HALF_TOLERANCE, torch.float16),
        (float("inf"), torch.float32),
    ):
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
