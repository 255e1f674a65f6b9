"""The systems that the benchmark compares, behind one call: a training step.

Each `build_*` takes the same model, batch and settings and returns a function that trains one step.
Runs in a worker process (`step_worker.py`), under this project's interpreter or upstream's; imports
torch, and deepspeed only for the systems that use it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, GPTConfig  # noqa: E402  the path above is where it lies

LEARNING_RATE = 1e-4
TINY_WIDTH = 16
SCALED_TO = 7e9
# Defaults in elements. A parameter of so few stays whole at stage 3, which are the vectors of large
# models; in these models they have less than `SCALED_THRESHOLD`, and matrices more.
BUCKET, PREFETCH, LIVE = 5e8, 5e7, 1e9
SCALED_THRESHOLD = 1000
Step = Callable[[], None]


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        model: "gpt" or "tiny".
        precision: "fp32" or "bf16".
        layers: Blocks of the GPT, or linear layers of the tiny model.
        micro_batch: Sequences (GPT) or rows (tiny) per rank and micro-batch.
        context: Bytes per sequence of the GPT.
        accumulation: Micro-batches per step.
        clip: Largest gradient norm; 0 for no clipping.
        wide_products: The GPT multiplies in fp32 though its weights are bf16 (see examples/gpt.py).
        width: Features per position of the GPT, in so many `heads` of attention.
        device: Type of the device that it is trained on; its index is the current device.
        scaled: Buckets and the sizes of stage 3 are to the model what the defaults of `deepspeed`
            are to one of `SCALED_TO` elements, in all systems; False: everybody's defaults.
        folder: Where `-offload` keeps the optimizer's state in files; empty: in host memory.
        params: Parameters are in files of that folder too.
    """

    model: str
    precision: str
    layers: int
    micro_batch: int
    context: int
    accumulation: int
    clip: float
    wide_products: bool
    width: int = 256
    device: str = "cpu"
    scaled: bool = False
    heads: int = 4
    folder: str = ""
    params: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that `precision` names."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


class TinyLayers(nn.Module):
    """Many small layers: what a step costs per parameter, not per element."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        linears = [nn.Linear(TINY_WIDTH, TINY_WIDTH) for _ in range(layers)]
        for layer in linears:
            # Orthogonal: signals and gradients pass hundreds of layers without shrinking into
            # denormals, which are slow.
            nn.init.orthogonal_(layer.weight)
        self.layers = nn.ModuleList(linears)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x [rows, 16]
        """Mean square of the last layer's output."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def build_model(work: Workload) -> nn.Module:
    """The model in fp32 on its device, with the same weights in every process."""
    torch.manual_seed(0)
    if work.model == "tiny":
        return TinyLayers(work.layers).to(work.device)
    size = GPTConfig(
        work.layers, work.width, work.heads, work.context, wide_products=work.wide_products
    )
    with torch.device(work.device):
        return GPT(size)


def build_batches(work: Workload, rank: int) -> list[torch.Tensor]:
    """The micro-batches of one step, different on each rank; every step uses the same."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if work.model == "tiny":
        shape = (work.micro_batch, TINY_WIDTH)
        return [torch.randn(shape, generator=generator) for _ in range(work.accumulation)]
    shape = (work.micro_batch, work.context + 1)
    return [torch.randint(256, shape, generator=generator) for _ in range(work.accumulation)]


def _inputs(work: Workload, rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [
        batch.to(work.device, dtype if batch.is_floating_point() else batch.dtype)
        for batch in build_batches(work, rank)
    ]


# torch's own


def build_torch(work: Workload, variant: str) -> Step:
    """torch alone (`torch`) or DistributedDataParallel (`ddp`), as its tutorial has it.

    AdamW with default arguments over the parameters, which in bf16 are bf16 themselves, without
    master weights. `-fused`: AdamW(fused=True). `-autocast`: fp32 parameters, forward under bf16
    autocast.
    """
    name, *options = variant.split("-")
    autocast = "autocast" in options
    dtype = torch.float32 if autocast else work.dtype
    model = build_model(work).to(dtype)
    if name == "ddp":
        size = {"bucket_cap_mb": _scaled(model, BUCKET) * dtype.itemsize / 2**20}
        model = nn.parallel.DistributedDataParallel(model, **(size if work.scaled else {}))
    optimizer = _adamw(model, options)
    batches = _inputs(work, dist.get_rank(), dtype)

    def forward(batch: torch.Tensor) -> torch.Tensor:
        context: AbstractContextManager[Any] = (
            torch.autocast(work.device, dtype=torch.bfloat16) if autocast else nullcontext()
        )
        with context:
            loss: torch.Tensor = model(batch)
            return loss

    def no_sync() -> AbstractContextManager[Any]:
        return model.no_sync() if name == "ddp" else nullcontext()

    def step() -> None:
        for batch in batches[:-1]:
            with no_sync():
                (forward(batch) / len(batches)).backward()
        (forward(batches[-1]) / len(batches)).backward()
        if work.clip:
            nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _scaled(model: nn.Module, default: float) -> int:
    """What is to `model` as `default` is to one of `SCALED_TO` elements; a multiple of 16."""
    numel = sum(param.numel() for param in model.parameters())
    return 16 * int(numel * default / SCALED_TO / 16)


def _adamw(model: nn.Module, options: Iterable[str]) -> torch.optim.Optimizer:
    fused = True if "fused" in options else None
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)


def build_fsdp2(work: Workload, variant: str) -> Step:
    """fully_shard: every block of the GPT and the rest, or all tiny layers as one; fp32 masters
    under a bf16 policy. `-fused` as in `build_torch`; `-layers`: each tiny layer by itself.
    """
    # optional: only this system needs them
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build_model(work)
    mesh = init_device_mesh(work.device, (dist.get_world_size(),))
    narrow = work.dtype if work.dtype != torch.float32 else None
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=narrow)
    options = variant.split("-")
    blocks: Any = model.blocks if isinstance(model, GPT) else ()
    if isinstance(model, TinyLayers) and "layers" in options:
        blocks = model.layers
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    root: Any = fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = _adamw(model, options)
    batches = _inputs(work, dist.get_rank(), work.dtype)

    def step() -> None:
        for number, batch in enumerate(batches, start=1):
            if len(batches) > 1:
                root.set_requires_gradient_sync(number == len(batches))
            (root(batch) / len(batches)).backward()
        if work.clip:
            nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


# deepspeed, this project's or upstream's


def deepspeed_config(work: Workload, variant: str, torch_adam: bool) -> dict[str, Any]:
    """Configuration of `zero0` to `zero3`, `zero1-fp32acc` and their `-offload`, `-overlap`,
    `-sharded`, `-bits`, `-muon` and `-muon-standard` forms.

    Args:
        work: What is trained.
        variant: Name of the system.
        torch_adam: Ask for torch.optim.AdamW with default arguments instead of the fused one.
    """
    name, *options = variant.split("-")
    zero: dict[str, Any] = {"stage": int(name.removeprefix("zero"))}
    if "offload" in options:
        zero["offload_optimizer"] = {"device": "cpu"}
    if "offload" in options and work.folder:
        # Upstream's default is to move and update one after another.
        ahead = {"pipeline_read": True, "pipeline_write": True}
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": work.folder, **ahead}
        if work.params:
            # By default a billion elements stay in memory; upstream fails with its 5 buffers.
            places = {"device": "nvme", "nvme_path": work.folder, "max_in_cpu": 0}
            zero["offload_param"] = {**places, "buffer_count": 64, "buffer_size": 2_000_000}
    if "overlap" in options:
        zero["overlap_comm"] = True
    if "sharded" in options:
        zero["stage3_param_persistence_threshold"] = 0
    params: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": 0.01}
    if torch_adam or "torch" in options:
        params["torch_adam"] = True
    if "standard" in options:
        params["ns_method"] = "standard"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": work.accumulation,
        "gradient_clipping": work.clip,
        "optimizer": {"type": "Muon" if "muon" in options else "AdamW", "params": params},
        "zero_optimization": zero,
        "bf16": {"enabled": work.precision == "bf16"},
        # Upstream prints every 10 steps by default; nothing else here does.
        "steps_per_print": 1_000_000,
    }
    if "bits" in options:
        config["reproducibility"] = {"world_size_invariant": True}
    if "fp32acc" in options:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def build_engine(work: Workload, variant: str, torch_adam: bool) -> Any:
    """The engine of the system named `variant`. `torch_adam` as in `deepspeed_config`."""
    import deepspeed  # optional: torch's own systems are built without it

    model = build_model(work)
    config = deepspeed_config(work, variant, torch_adam)
    if work.scaled:
        config["zero_optimization"] |= {
            "reduce_bucket_size": _scaled(model, BUCKET),
            "allgather_bucket_size": _scaled(model, BUCKET),
            "stage3_prefetch_bucket_size": _scaled(model, PREFETCH),
            "stage3_max_live_parameters": _scaled(model, LIVE),
            "stage3_max_reuse_distance": _scaled(model, LIVE),
            "stage3_param_persistence_threshold": SCALED_THRESHOLD,
        }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def build_deepspeed(work: Workload, variant: str, torch_adam: bool) -> Step:
    """An engine trained by forward, backward, step. `torch_adam` as in `deepspeed_config`."""
    engine = build_engine(work, variant, torch_adam)
    batches = _inputs(work, dist.get_rank(), work.dtype)

    def step() -> None:
        for batch in batches:
            engine.backward(engine(batch))
            engine.step()

    return step


def build_offload(
    work: Workload, stage: int, vertical: bool
) -> dict[str, Callable[[], float | None]]:
    """Offload at a stage, in two cases: the whole training step, and the time of `engine.step()` at
    the boundary alone. With `vertical` the step is one call of `engine.train_batch`, and there is
    no second case.

    Systems differ in what of a gradient's way they leave to that call, so the second says less.
    """
    engine = build_engine(work, f"zero{stage}-offload", torch_adam=False)
    batches = _inputs(work, dist.get_rank(), work.dtype)
    if vertical:

        def at_once() -> None:
            engine.train_batch(iter(batches))

        return {"step": at_once}

    def update() -> float:
        for batch in batches:
            engine.backward(engine(batch))
            start = time.perf_counter()
            engine.step()
        return time.perf_counter() - start

    def step() -> None:
        update()

    return {"step": step, "update": update}


def build_step(work: Workload, variant: str, torch_adam: bool = False) -> Step:
    """The training step of the system named `variant`.

    Raises:
        ValueError: For an unknown name.
    """
    name, *options = variant.split("-")
    if name in ("torch", "ddp") and {"fused", "autocast"}.issuperset(options):
        return build_torch(work, variant)
    if name == "fsdp2" and {"fused", "layers"}.issuperset(options):
        return build_fsdp2(work, variant)
    if name.startswith("zero"):
        return build_deepspeed(work, variant, torch_adam)
    raise ValueError(f"system {variant!r} is unknown; use one of {', '.join(known_systems())}")


def known_systems() -> Iterable[str]:
    """Names that `build_step` takes, without their options.

    These are `-fused` and `-autocast` of torch's own, `-layers` of FSDP2, `-offload`, `-overlap`,
    `-torch` and `-bits` (the same ones on any number of ranks) of the zero ones, and `-sharded` of
    stage 3: no small parameter stays whole.
    """
    return ("torch", "ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3", "zero1-fp32acc")
