"""Trains the cases under this project's or upstream's deepspeed; `compare` starts it.

Runs jobs (JSON) from the file named first one after the other, each on two processes forked from
this one, which has imported everything. Uses nothing but names that both have.
"""

import faulthandler
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

# startup: the first optimizer asks for it, and every forked rank would import it anew; so it
# would the engine below.
import torch._dynamo
from torch import distributed, nn

import deepspeed
import deepspeed.runtime.engine
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule

WORLD = 2
STEPS, SAVED_AFTER = 8, 4
WIDTH, MICRO_BATCHES, ROWS = 16, 2, 4
TIMEOUT_S = 300.0  # upstream's first job compiles an op
TAG = "step4"

ADAM = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01, "torch_adam": True}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "steps_per_print": 1000000,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": ADAM},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4},
    },
}
BF16 = {"bf16": {"enabled": True}}
# The scale does not grow: on the step where it does, upstream divides gradients by the grown scale,
# and the sides part.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 1000}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}}


# Name -> model and further configuration.
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": BF16, "fp16": FP16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"zero{stage}_{name}": ("mlp", {**keys, **zero(stage)})
        for stage in (0, 1, 2)
        for name, keys in PRECISIONS.items()
    },
    "zero1_bf16_fp32acc": ("mlp", {**BF16, **FP32_SUMS, **zero(1)}),
    "pipe2_zero0_fp32": ("pipe", zero(0)),
    "pipe2_zero1_bf16": ("pipe", {**BF16, **zero(1)}),
    "experts_zero0_fp32": ("experts", zero(0)),
    "experts_zero1_bf16": ("experts", {**BF16, **zero(1)}),
    "experts_zero2_fp32": ("experts", zero(2)),
}


class Experts(nn.Module):
    """A layer of four experts, two on each rank, between two dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
        # No random choice of tokens: both sides must see the same routes.
        self.moe = MoE(
            WIDTH, expert, num_experts=4, ep_size=WORLD, k=1, capacity_factor=2.0, use_rts=False
        )
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: (batch, WIDTH)
        hidden = torch.tanh(self.first(x))
        return self.last(hidden + self.moe(hidden.unsqueeze(0))[0].squeeze(0))


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean squared error in fp32."""
    return ((outputs.float() - targets.float()) ** 2).mean()


def build(case: str) -> Any:
    """An engine over a fresh model: the same weights under every interpreter."""
    kind, keys = CASES[case]
    torch.manual_seed(7)
    # Upstream's accelerator says that the host has no fp16; torch computes in it, and files know no
    # device.
    get_accelerator().is_fp16_supported = lambda: True
    config = {**CONFIG, **keys}
    if kind == "pipe":
        outer = [LayerSpec(nn.Linear, *sizes) for sizes in ((WIDTH, 32), (32, WIDTH))]
        layers = [outer[0], LayerSpec(nn.GELU), outer[1]]
        model: nn.Module = PipelineModule(layers, num_stages=WORLD, loss_fn=squares)
    elif kind == "experts":
        model = Experts()
    else:
        model = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
    params: Any = list(model.parameters())
    if kind == "experts":
        params = split_params_into_different_moe_groups_for_optimizer(
            {"params": params, "name": "all"}
        )
    return deepspeed.initialize(model=model, model_parameters=params, config=config)[0]


def batches(
    step: int, rank: int, replicas: int, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of a step of one data-parallel rank, as in the shared recordings."""
    generator = torch.Generator().manual_seed(1000 + step * replicas + rank)
    for _ in range(MICRO_BATCHES):
        x, target = (torch.randn(ROWS, WIDTH, generator=generator).to(dtype) for _ in range(2))
        yield x, target


def train_step(engine: Any, step: int, is_pipeline: bool) -> tuple[float, float]:
    """Mean loss over micro-batches and ranks, and the gradient norm."""
    dtype = next(engine.module.parameters()).dtype
    if is_pipeline:
        loss = float(engine.train_batch(batches(step, 0, 1, dtype)))
        return loss, float(engine.get_global_grad_norm() or 0.0)
    losses = []
    for x, target in batches(step, distributed.get_rank(), WORLD, dtype):
        loss = squares(engine(x), target)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    mean = torch.stack(losses).mean()
    distributed.all_reduce(mean)
    return mean.item() / WORLD, float(engine.get_global_grad_norm() or 0.0)


def run(rank: int, job: dict[str, Any], store: str) -> None:
    """One rank of a job: train from the start or from a checkpoint, save, write what was seen."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)  # a rank that waits for ever says where
    os.environ.update({key: str(rank) for key in ("RANK", "LOCAL_RANK")})
    os.environ.update({key: str(WORLD) for key in ("WORLD_SIZE", "LOCAL_SIZE")})
    # Asked for by upstream; the store is a file.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29999")
    deepspeed.init_distributed(
        dist_backend="gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD
    )
    engine, is_pipeline = build(job["case"]), CASES[job["case"]][0] == "pipe"
    if "load" in job:
        path, _ = engine.load_checkpoint(job["load"])
        if path is None or engine.global_steps != SAVED_AFTER:
            raise SystemExit(f"{job['load']}: loaded {path}, at step {engine.global_steps}")
        engine.save_checkpoint(job["save"], tag=TAG)  # what it holds is compared file by file
    seen = []
    for step in range(engine.global_steps, STEPS):
        seen.append(train_step(engine, step, is_pipeline))
        if "load" not in job and step + 1 == SAVED_AFTER:
            engine.save_checkpoint(job["save"], tag=TAG)
    if rank == WORLD - 1:  # the last pipeline stage knows the loss
        Path(f"{job['save']}.json").write_text(json.dumps(seen))
    distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # exit handlers are the parent's


def run_on_ranks(job: dict[str, Any]) -> str:
    """What went wrong with a job; empty if nothing did."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=report, args=(rank, job, folder)) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(2 * TIMEOUT_S)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
            process.join()
        if codes == [0] * WORLD:
            return ""
        reasons = [path.read_text() for path in sorted(Path(folder).glob("problem.*"))]
        return reasons[0] if reasons else f"ranks ended with {codes}"


def report(rank: int, job: dict[str, Any], folder: str) -> None:
    """`run`, with what it raises written down."""
    try:
        run(rank, job, f"{folder}/store")
    except BaseException as error:
        first = str(error).splitlines()[0] if str(error) else ""
        Path(f"{folder}/problem.{rank}").write_text(f"{type(error).__name__}: {first}")
        raise


def main() -> None:
    """Run the jobs; write problems by the folder that the job saves to into the second file."""
    jobs = json.loads(Path(sys.argv[1]).read_text())
    problems = {job["save"]: run_on_ranks(job) for job in jobs}
    versions = {"version": deepspeed.__version__, "torch": torch.__version__}
    Path(sys.argv[2]).write_text(json.dumps({**versions, "problems": problems}))


if __name__ == "__main__":
    main()
