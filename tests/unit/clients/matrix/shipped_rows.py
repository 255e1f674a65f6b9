"""Programs of accelerate and trl, unmodified, started by `accelerate launch` on rank 0.

What they take from the hub lies in folders (`stand_ins`).
"""

import functools
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate.test_utils.scripts
import torch
import trl
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import deepspeed
from deepspeed import comm as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from unit.clients.launching import environment
from unit.clients.matrix import stand_ins
from unit.clients.matrix.row import Row, main, scenario
from unit.common import get_master_port

ROWS: dict[str, Row] = {}
SCRIPTS = Path(accelerate.test_utils.scripts.__file__).parent
DEPS = SCRIPTS / "external_deps"
CLASSIFIED = ("--model_name_or_path", stand_ins.CLASSIFIER, "--output_dir", "out")
HOST = Path(__file__).parent / "host.py"
STEPS, LR = 16, 1e-2
# As accelerate's repository keeps them, for optimizers and schedules of the client's.
MODEL_ONLY = {"bf16": {"enabled": "auto"}, "gradient_accumulation_steps": 1}
MODEL_ONLY |= dict.fromkeys(("gradient_clipping", "train_batch_size"), "auto")


def shipped(*stages: int) -> Callable[[Callable[[Path, int], None]], None]:
    """A scenario of rank 0; the other ranks wait until the next."""

    def add(run: Callable[[Path, int], None]) -> None:
        @functools.wraps(run)
        def only(folder: Path, stage: int) -> None:
            if dist.get_rank() == 0:
                stand_ins.write_models(folder)
                stand_ins.write_data(folder)
                run(folder, stage)

        scenario(ROWS, *stages)(only)

    return add


def launch(folder: Path, settings: list[str], program: Path, *words: str) -> str:
    """Start ``program`` on two ranks in ``folder``, the stand-ins'; returns what it printed."""
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--num_processes", "2", "--num_machines", "1", "--dynamo_backend", "no"),
        *("--main_process_port", str(get_master_port()), *settings),
        *(str(HOST), str(program), *words),
    ]
    caches = {"HF_HOME": str(folder / "hub")}
    given = {**environment(), **caches}
    ended = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True)
    # The launcher's own report comes last, and says less.
    said = ended.stderr.partition("torch/distributed/elastic")[0]
    assert ended.returncode == 0, ended.stdout[-2000:] + said[-5000:]
    return ended.stdout


def plugin(stage: int, *more: str) -> list[str]:
    """Settings of accelerate's plugin."""
    return [
        *("--use_deepspeed", "--zero_stage", str(stage), "--mixed_precision", "no"),
        *("--gradient_accumulation_steps", "1", "--zero3_save_16bit_model", "true", *more),
    ]


@shipped(0, 1, 2, 3)
def accelerate_test_performance(folder: Path, stage: int) -> None:
    """It checks the schedule's rates, and that the model was saved."""
    (folder / "out").mkdir()
    bound = ("--performance_lower_bound", "0.95", "--num_epochs", "2")
    launch(folder, plugin(stage), DEPS / "test_performance.py", *CLASSIFIED, *bound)
    found = json.loads((folder / "out" / "all_results.json").read_text())
    assert found["epoch-0"] < 0.95 < found["epoch-1"], found  # it has learned
    saved = load_file(folder / "out" / "model.safetensors")
    start = load_file(folder / stand_ins.CLASSIFIER / "model.safetensors")
    assert saved.keys() == start.keys()
    assert all(saved[name].shape == start[name].shape for name in saved)
    assert not torch.equal(saved["score.weight"], start["score.weight"])


@shipped(1, 2, 3)
def accelerate_test_checkpointing(folder: Path, stage: int) -> None:
    """The second run checks accuracy and rates against what the first wrote."""
    (folder / "out").mkdir()
    given = (folder, plugin(stage), DEPS / "test_checkpointing.py", *CLASSIFIED)
    launch(*given, "--partial_train_epoch", "1")
    said = launch(*given, "--resume_from_checkpoint", "out/epoch_0")
    state = json.loads((folder / "out" / "state_0.json").read_text())
    assert f"resumed checkpoint performance: {state['accuracy']}" in said, said
    assert 0 < state["lr"] < 2e-5, state


@shipped(3)
def accelerate_test_ds_multiple_model(folder: Path, stage: int) -> None:
    """A stage 2 engine beside one of stage 3 that is asked, then both trained. The program checks
    that each gets better after 16 steps, which forget what is wrong; it looks for configurations
    in its repository.
    """
    stand_ins.teach_wrong(folder, steps=10)
    place = folder / "src" / "accelerate" / "test_utils" / "scripts" / "external_deps"
    place.mkdir(parents=True)
    program = Path(shutil.copy(DEPS / "test_ds_multiple_model.py", place))
    plans = folder / "tests" / "deepspeed"
    plans.mkdir(parents=True)
    for number, micro in ((2, "auto"), (3, 1)):
        plan: dict[str, Any] = {**MODEL_ONLY, "train_micro_batch_size_per_gpu": micro}
        plan["zero_optimization"] = {"stage": number}
        (plans / f"ds_config_zero{number}_model_only.json").write_text(json.dumps(plan))
    said = launch(folder, plugin(stage), program, "--model_name_or_path", stand_ins.CLASSIFIER)
    assert said.count("epoch 2:") == 2, said


@shipped(3)
def accelerate_test_zero3_integration(folder: Path, stage: int) -> None:
    """A process group of the program's own, and a model that is loaded in shards."""
    launch(folder, plugin(stage), DEPS / "test_zero3_integration.py")


def losses_of_pieces(folder: Path) -> list[float]:
    """What plain torch makes of the program's split samples. It leaves the model in `eval()`, where
    each half of a sequence sees itself: accelerate registers whole attention in training alone.
    """
    model = AutoModelForCausalLM.from_pretrained(folder / stand_ins.HUB_LLAMA)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    tokens = torch.arange(1, 32 * 4 + 1).view(-1, 1, 32) + 100
    positions = torch.arange(32 * 4).view(-1, 1, 32)
    losses = []
    for sample, places in zip(tokens, positions, strict=True):
        optimizer.zero_grad()
        halves = zip(sample.chunk(2, 1), places.chunk(2, 1), strict=True)
        logits = [model(input_ids=half, position_ids=where).logits for half, where in halves]
        wanted = sample[0, 1:]  # the last word of the first half has the second half's first
        loss = torch.nn.functional.cross_entropy(torch.cat(logits, 1)[0, :-1], wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@shipped(2, 3)
def accelerate_test_ds_alst_ulysses_sp(folder: Path, stage: int) -> None:
    """Its losses, each of which it prints; `sequences_over_ranks` has attention in it."""
    said = launch(folder, plugin(stage), DEPS / "test_ds_alst_ulysses_sp.py")
    found = [float(word) for word in re.findall(r"^\d: loss=tensor\(([\d.]+)", said, re.MULTILINE)]
    wanted = losses_of_pieces(folder)
    assert len(found) == len(wanted) == 4, said
    worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
    assert worst < 1e-4, (found, wanted)  # four digits are printed


@shipped(2, 3)
def accelerate_test_script_and_test_ops(folder: Path, stage: int) -> None:
    """Loaders, samplers, processes and collectives under DeepSpeed."""
    for name in ("test_script", "test_ops"):
        launch(folder, plugin(stage), SCRIPTS / f"{name}.py")


def train_with_script(folder: Path, stage: int, name: str, *words: str) -> list[float]:
    """Run trl's script in bf16 with its own configuration of this stage; returns the losses."""
    package = Path(trl.__file__).parent
    settings = ["--config_file", str(package / "accelerate_configs" / f"zero{stage}.yaml")]
    data = stand_ins.TEXTS if name == "sft" else stand_ins.PAIRS
    launch(
        folder,
        settings,
        package / "scripts" / f"{name}.py",
        *("--model_name_or_path", stand_ins.CAUSAL, "--dataset_name", data, "--output_dir", "out"),
        *("--max_steps", str(STEPS), "--learning_rate", str(LR), "--max_length", "16"),
        *("--per_device_train_batch_size", "2", "--logging_steps", "1", "--report_to", "none"),
        *("--save_strategy", "steps", "--save_steps", str(STEPS), *words),
    )
    last = folder / "out" / f"checkpoint-{STEPS}"
    assert (last / "latest").read_text().strip() == f"global_step{STEPS}"
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses) == STEPS and all(map(math.isfinite, losses)), losses
    return losses


@shipped(1, 2, 3)
def trl_sft_script(folder: Path, stage: int) -> None:
    losses = train_with_script(folder, stage, "sft")
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4]), losses
    masters = get_fp32_state_dict_from_zero_checkpoint(folder / "out" / f"checkpoint-{STEPS}")
    saved = load_file(folder / "out" / "model.safetensors")
    assert saved.keys() == masters.keys()
    assert all(torch.equal(saved[name], masters[name].bfloat16()) for name in saved)
    # Stages sum the norm that clips in another order, which flips a bit of bf16 now and then.
    told = folder.parent / "losses"
    if told.exists():
        before = json.loads(told.read_text())
        worst = max(abs(a - b) for a, b in zip(before, losses, strict=True))
        assert worst < 5e-3, f"losses differ from an earlier stage's by {worst}"
    told.write_text(json.dumps(losses))


@shipped(3)
def trl_sft_script_with_adapters(folder: Path, stage: int) -> None:
    words = "--use_peft --lora_r 4 --lora_target_modules q_proj v_proj down_proj"
    losses = train_with_script(folder, stage, "sft", *words.split())
    assert losses[-1] < losses[0], losses
    saved = load_file(folder / "out" / "adapter_model.safetensors")
    assert saved and all(min(value.shape) > 0 and value.dim() == 2 for value in saved.values())
    assert any(value.abs().max() > 0 for name, value in saved.items() if "lora_B" in name)


@shipped(2)
def trl_reward_script(folder: Path, stage: int) -> None:
    losses = train_with_script(folder, stage, "reward")
    assert losses[-1] < losses[0], losses


@shipped(3)
def trl_dpo_script(folder: Path, stage: int) -> None:
    losses = train_with_script(folder, stage, "dpo")
    assert abs(losses[0] - math.log(2)) < 0.01, losses  # both models are the same
    assert sum(losses[STEPS // 2 :]) < sum(losses[: STEPS // 2]), losses


def begin() -> None:
    """The process group by which ranks wait."""
    deepspeed.init_distributed("gloo")


if __name__ == "__main__":
    main(ROWS, begin, lambda: None)
