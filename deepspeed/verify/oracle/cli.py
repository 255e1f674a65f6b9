"""The command `ds_verify`: arguments, progress, table, files, exit code."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from deepspeed import comm as dist
from deepspeed.elasticity.config import ElasticityError
from deepspeed.runtime.config_models.source import load_config
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.verify.oracle import UsageError
from deepspeed.verify.oracle.batches import GlobalBatches, Shape
from deepspeed.verify.oracle.picture import require_plotting, write_report
from deepspeed.verify.oracle.plan import (
    NO_BACKEND,
    TRACED_BACKEND,
    Plan,
    Settings,
    in_small_groups,
    make_plan,
    precision_of,
    read_config,
    shape_of,
)
from deepspeed.verify.oracle.ranks import run_plan
from deepspeed.verify.oracle.reference import uncuttable
from deepspeed.verify.oracle.report import Report, render
from deepspeed.verify.oracle.verdicts import make_report
from deepspeed.verify.oracle.workload import (
    HUGGING_FACE,
    Batch,
    Workload,
    load_workload,
    seed_everything,
)

FAILED, MISUSED, INCOMPLETE = 1, 2, 3
DEFAULT_BACKEND = "inductor"
EPILOG = """\
FUNCTION takes no argument and returns a module, (module, batches) or (module, batches, loss).
Batches may also be a function batch(rank, step) beside it, or drawn by shapes; see
docs/ds_verify.md.

  ds_verify --config ds_config.json --model train.py:make_model
  ds_verify --config ds_config.json --model train.py:make_model --data 'float32[8,16]'
  ds_verify --config ds_config.json --model 'hf:gpt2?n_layer=4&n_embd=64&n_head=4&vocab_size=256'
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="ds_verify",
        description=(
            "Check that a model trains under a DeepSpeed configuration as one process with the "
            "whole batch does."
        ),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--config", required=True, help="DeepSpeed configuration (JSON or hjson file)")
    text = "module:FUNCTION, file.py:FUNCTION or hf:CONFIG_OR_PATH[?key=value&...]"
    add("--model", required=True, help=text)
    text = (
        "shapes to draw, such as 'x=float32[8,16], y=int64[8]:0..9', module:FUNCTION, "
        "file.py:FUNCTION or a file of tensors; instead of the model's own"
    )
    add("--data", help=text)
    text = "local ranks (default: two that hold the same of the model)"
    add("--world-size", type=int, help=text)
    add("--steps", type=int, default=4, help="optimizer steps of a training run (default: 4)")
    text = "orders tried on the simulated device; 0 for none (default: 8)"
    add("--schedules", type=int, default=8, help=text)
    add(
        "--compile",
        nargs="?",
        const=DEFAULT_BACKEND,
        default=TRACED_BACKEND,
        metavar="BACKEND",
        help=f"how torch.compile compiles the model for one of the checks; {NO_BACKEND} for none "
        f"(default: {TRACED_BACKEND}, which traces and needs no compiler; without BACKEND "
        f"{DEFAULT_BACKEND})",
    )
    text = "compare ranks with one process by equality alone, which is otherwise one row of many"
    add("--exact", action="store_true", help=text)
    text = "save half of a run in FOLDER, and train the rest from there on other ranks"
    add("--checkpoint", metavar="FOLDER", help=text)
    add("--json", metavar="FILE", help="write everything as JSON")
    text = "write FILE.html with table and curves, or FILE.png with the curves"
    add("--report", metavar="FILE", help=text)
    add("--seed", type=int, default=0, help="for weights, data and schedules (default: 0)")
    text = "seconds without progress after which ranks hang (default: 300)"
    add("--timeout", type=float, default=300.0, help=text)
    return made


def verify(settings: Settings, visible: bool = False) -> Report:
    """Check a model under a configuration; what the command does, without its output."""
    for name, least in (("world_size", 1), ("steps", 1), ("schedules", 0), ("seed", 0)):
        if (value := getattr(settings, name)) is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    if settings.timeout <= 0:
        raise UsageError(f"--timeout {settings.timeout:g}: must be more than 0 seconds")
    known = (TRACED_BACKEND, DEFAULT_BACKEND, NO_BACKEND)  # torch takes a second to be asked
    backend, list_backends = settings.compile, torch._dynamo.list_backends
    if backend not in known and backend not in list_backends(exclude_tags=()):
        backends = ", ".join(list_backends())
        raise UsageError(f"--compile {backend}: torch.compile knows {backends}")
    config, folder = load_config(settings.config), settings.checkpoint
    if settings.world_size is None:
        config = in_small_groups(config)
    can_stop = settings.steps > 1 and config.get("optimizer") is not None
    if folder is not None and (not can_stop or Path(folder).exists()):
        needs = "needs a folder that does not exist yet, an optimizer in --config and 2 --steps"
        raise UsageError(f"--checkpoint {folder}: {needs}")
    is_alone, rows = not dist.is_initialized(), 0
    if settings.model.startswith(HUGGING_FACE):
        rows = shape_of(config, settings.world_size)[1].rows
    workload = load_workload(settings.model, settings.data, settings.seed, rows)
    ranks, shape = shape_of(config, settings.world_size, workload.parts)
    found = _try_model(settings, config, shape, workload)
    if is_alone and dist.is_initialized():  # a model's
        dist.destroy_process_group()
    plan = make_plan(settings, config, ranks, shape, *found, workload.parts)
    started = time.monotonic()
    progress = _Progress(plan, visible)
    with progress.bar:
        session = run_plan(plan, settings.timeout, progress.event)
    seconds = round(time.monotonic() - started, 1)
    shown = {**vars(settings), "config": config, "torch": torch.__version__, "seconds": seconds}
    return make_report(plan, session, shown)


def _try_model(
    settings: Settings, config: dict[str, Any], shape: Shape, workload: Workload
) -> tuple[list[int], str, str]:
    """Try it where a mistake is told at once; sizes, and why batches are not cut or joined."""
    batches = GlobalBatches(workload, shape, settings.steps)
    precision = precision_of(read_config(config, shape.world), workload.module)
    batch = batches.micro_batches(0)[0]
    sharing = config.get("sequence_parallel_size") or 1
    is_theirs = hasattr(workload.module, "loss_function") and workload.loss is None
    if sharing > 1 and not (is_theirs and isinstance(batch, dict) and "labels" in batch):
        raise UsageError(
            f"--model: sequences are shared by {sharing} ranks (sequence_parallel_size), which is "
            "for models of transformers with their own loss and batches of input_ids and labels"
        )
    losses = [_loss(workload, batch, precision.model, seed) for seed in (0, 1)]
    if not torch.equal(losses[0], losses[1]) and bool(torch.isfinite(losses[0]).all()):
        raise UsageError(
            f"--model {settings.model}: forward is random (losses {losses[0].item()!r} and "
            f"{losses[1].item()!r} for one batch), so no run equals another; switch off what draws "
            "random numbers in forward"
        )
    sizes = [param.numel() for param in workload.module.parameters() if param.requires_grad]
    return sizes, uncuttable(workload, batches), batches.whole_reason or ""


def _loss(workload: Workload, batch: Batch, dtype: torch.dtype, seed: int) -> torch.Tensor:
    module = workload.copy_module(dtype)
    seed_everything(seed)
    try:
        loss = workload.loss_of(module, batch, dtype)
        loss.backward()
    except UsageError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        text = f"--model: one micro-batch failed in {dtype} on one process: {what}"
        raise UsageError(text) from error
    return loss.detach()


class _Progress:
    """A bar over all steps; a line per run where there is no terminal."""

    def __init__(self, plan: Plan, visible: bool) -> None:
        total = sum(run.steps * (2 if run.kind.is_judged else 1) for run in plan.runs)
        is_terminal = sys.stderr.isatty()
        self._tells = visible and not is_terminal
        hidden = not (visible and is_terminal)
        self.bar = tqdm(total=total, unit="step", disable=hidden, dynamic_ncols=True, leave=False)
        self._started = time.monotonic()
        self._names = [run.name for run in plan.runs]
        self._tell(f"{len(plan.runs)} runs on {plan.ranks} ranks")

    def _tell(self, text: str) -> None:
        if self._tells:
            seconds = time.monotonic() - self._started
            sys.stderr.write(f"ds_verify: {seconds:6.1f} s: {text}\n")
            sys.stderr.flush()

    def event(self, event: str, values: dict[str, Any]) -> None:
        """Show one event of a rank."""
        if event in ("step", "judged"):
            self.bar.update()
        elif event == "begin":
            self.bar.set_postfix_str(values["run"])
            number = self._names.index(values["run"]) + 1
            self._tell(f"{number} of {len(self._names)}, {values['run']}")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = vars(parser().parse_args(argv))
    json_path, report_path = arguments.pop("json"), arguments.pop("report")
    try:
        if report_path is not None:
            require_plotting(report_path)
        if json_path is not None and not Path(json_path).resolve().parent.is_dir():
            folder = Path(json_path).resolve().parent
            raise UsageError(f"--json {json_path}: there is no folder {folder}")
        report = verify(Settings(**arguments), visible=True)
    except (UsageError, DeepSpeedConfigError, ElasticityError) as error:
        sys.stderr.write(f"ds_verify: {error}\n")
        return MISUSED
    sys.stdout.write(render(report) + "\n")
    if json_path is not None:
        Path(json_path).write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    if report_path is not None:
        write_report(report, report_path)
    if not report.passed:
        return FAILED
    return INCOMPLETE if report.left_out else 0


def command() -> None:
    """The installed command."""
    raise SystemExit(main())


if __name__ == "__main__":
    command()
