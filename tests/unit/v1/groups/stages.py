"""Pipeline stages without a pipeline: each rank trains a model of its own, and an mpu says that
these are parts of one.

What stages share is what can go wrong between them: one norm, one decision to skip, one order of
collectives. The reference trains the models of all stages in one process and clips by their common
norm.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm.watch.observation import CollectiveCall, add_observer, remove_observer
from deepspeed.utils import safe_get_full_fp32_param

WIDTH = 5
ROWS = 3
LR = 0.1
CLIP = 0.3
SYSTEMS: dict[str, dict[str, Any]] = {
    "stage 0": {},
    "stage 0, fp16": {"fp16": {"enabled": True, "loss_scale": 16.0}},
    "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 2": {"zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 8}},
    "stage 2, offload": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "BF16_Optimizer": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
}
# Half precision rounds activations and gradients of a few layers; what is looked for are norms
# without a stage or with one twice.
TOLERANCE = {name: 1e-5 if "16" not in name else 0.03 for name in SYSTEMS}


class WorldCollectives:
    """Operations over all ranks: name, elements and dtype of each."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, torch.dtype]] = []

    def run(self, call: CollectiveCall, proceed: Callable[[], Any]) -> Any:
        """Called for every operation."""
        group = call.group or dist.get_world_group()
        if dist.get_world_size(group=group) == dist.get_world_size():
            payload = call.reads or call.writes
            self.calls.append(
                (call.name, sum(tensor.numel() for tensor in payload), payload[0].dtype)
            )
        return proceed()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, operations are seen."""
        add_observer(self)
        try:
            yield
        finally:
            remove_observer(self)


class Stages:
    """An mpu of pipeline stages: rank = stage * data-parallel size + data rank."""

    def __init__(self, count: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.count, self.data_size = count, world // count
        self.stage, self.data_rank = divmod(rank, self.data_size)
        data = [
            dist.new_group(list(range(s * self.data_size, (s + 1) * self.data_size)))
            for s in range(count)
        ]
        pipe = [
            dist.new_group(list(range(d, world, self.data_size))) for d in range(self.data_size)
        ]
        self._data, self.pipe_group = data[self.stage], pipe[self.data_rank]

    def get_data_parallel_group(self) -> Any:
        return self._data

    def get_data_parallel_rank(self) -> int:
        return self.data_rank

    def get_data_parallel_world_size(self) -> int:
        return self.data_size

    def get_model_parallel_group(self) -> Any:
        return self.pipe_group

    def get_model_parallel_rank(self) -> int:
        return self.stage

    def get_model_parallel_world_size(self) -> int:
        return self.count

    def get_slice_parallel_rank(self) -> int:
        return 0

    def get_slice_parallel_world_size(self) -> int:
        return 1


def make_layers(stage: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(40 + stage)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2))


def batch(step: int, stage: int, data_rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * stage + 100 * step + data_rank)
    return torch.randn(ROWS, WIDTH, generator=generator)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


Groups = list[dict[str, Any]]


def one_group(layers: nn.Sequential) -> Groups:
    return [{"params": list(layers.parameters())}]


def three_groups(layers: nn.Sequential) -> Groups:
    return [
        {"params": list(layer.parameters()), "weight_decay": 0.1 * index}
        for index, layer in enumerate(layers)
    ]


def first_group_empty(layers: nn.Sequential) -> Groups:
    return [{"params": []}, {"params": list(layers.parameters()), "weight_decay": 0.1}]


def frozen(layers: nn.Sequential) -> Groups:
    layers.requires_grad_(False)
    return one_group(layers)


def nothing(layers: nn.Sequential) -> Groups:
    layers.requires_grad_(False)
    return [{"params": []}]


def partly_frozen(layers: nn.Sequential) -> Groups:
    layers[0].requires_grad_(False)
    return three_groups(layers)


# What the two stages give to their optimizers.
CUTS = {
    "1 and 3 groups": (one_group, three_groups),
    "3 and 1 groups": (three_groups, one_group),
    "an empty group": (first_group_empty, one_group),
    "a frozen stage": (three_groups, frozen),
    "a stage with nothing": (nothing, first_group_empty),
    "a frozen group": (partly_frozen, three_groups),
}


def start(
    mpu: Stages,
    system: str,
    grouped: Callable[[nn.Sequential], Groups],
    clip: float = CLIP,
    **more: Any,
) -> Any:
    layers = make_layers(mpu.stage)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": clip,
        "zero_force_ds_cpu_optimizer": False,
        **SYSTEMS[system],
        **more,
    }
    optimizer = torch.optim.SGD(grouped(layers), lr=LR)
    engine, _, _, _ = deepspeed.initialize(
        model=layers, optimizer=optimizer, config=config, mpu=mpu
    )
    return engine


def train_step(engine: Any, mpu: Stages, step: int) -> None:
    """A stage whose parameters are all frozen has no backward, as in a pipeline."""
    if any(param.requires_grad for param in engine.module.parameters()):
        engine.backward(
            loss_of(engine, batch(step, mpu.stage, mpu.data_rank).to(engine.model_dtype))
        )
    engine.step()


def master(param: nn.Parameter) -> torch.Tensor:
    value = safe_get_full_fp32_param(param) if param.requires_grad else None
    return param.detach().float() if value is None else value


class Reference:
    """All stages in one process, plain torch."""

    def __init__(self, cut: str, dtype: torch.dtype, clip: float = CLIP) -> None:
        self.stages = [make_layers(stage).to(dtype).float() for stage in range(2)]
        groups = [grouped(layers) for grouped, layers in zip(CUTS[cut], self.stages, strict=True)]
        self.aligned = [
            [p for g in groups if i < len(g) for p in g[i]["params"]]
            for i in range(max(map(len, groups)))
        ]
        self.optimizer = torch.optim.SGD(
            [group for of_stage in groups for group in of_stage if group["params"]], lr=LR
        )
        self.clip = clip

    def step(self, step: int, data_size: int) -> tuple[float, list[float]]:
        """Train; returns the norm, and the norms over the stages' groups of the same position."""
        self.optimizer.zero_grad()
        for stage, layers in enumerate(self.stages):
            x = torch.cat([batch(step, stage, rank) for rank in range(data_size)])
            loss = loss_of(layers, x)
            if loss.requires_grad:
                loss.backward()
        squares = [
            sum(p.grad.double().square().sum().item() for p in ps if p.grad is not None)
            for ps in self.aligned
        ]
        torch.nn.utils.clip_grad_norm_([p for ps in self.aligned for p in ps], self.clip)
        self.optimizer.step()
        return math.sqrt(sum(squares)), [math.sqrt(square) for square in squares]
