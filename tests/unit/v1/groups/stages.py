"""Pipeline stages without a pipeline: each rank trains a model of its own, and an mpu says that
these are parts of one.

What stages share is what can go wrong between them: one norm, one decision to skip, one order of
collectives. The reference trains the models of all stages in one process and clips by their common
norm.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm.watch.observation import CollectiveCall
from deepspeed.utils import safe_get_full_fp32_param
from unit.models import config_of, drawn
from unit.one_process import OneProcess, mean_square, placed
from unit.v1.gathering import noted

WIDTH, ROWS, LR, CLIP = 5, 3, 0.1, 0.3
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


def world_collectives() -> AbstractContextManager[list[tuple[str, int, torch.dtype]]]:
    """Note name, elements and dtype of each operation over all ranks inside."""

    def of(call: CollectiveCall) -> Iterator[tuple[str, int, torch.dtype]]:
        group = call.group or dist.get_world_group()
        if dist.get_world_size(group=group) == dist.get_world_size():
            payload = call.reads or call.writes
            yield call.name, sum(tensor.numel() for tensor in payload), payload[0].dtype

    return noted(of)


class Stages(SimpleNamespace):
    """An mpu of pipeline stages: rank = stage * data-parallel size + data rank."""

    def __init__(self, count: int) -> None:
        ranks = torch.arange(dist.get_world_size()).view(count, -1)
        data = [dist.new_group(row) for row in ranks.tolist()]
        pipe = [dist.new_group(column) for column in ranks.t().tolist()]
        self.data_size = ranks.shape[1]
        self.stage, self.data_rank = divmod(dist.get_rank(), self.data_size)
        self.pipe_group = pipe[self.data_rank]
        super().__init__(
            get_data_parallel_group=lambda: data[self.stage],
            get_data_parallel_rank=lambda: self.data_rank,
            get_data_parallel_world_size=lambda: self.data_size,
            get_model_parallel_group=lambda: self.pipe_group,
            get_model_parallel_rank=lambda: self.stage,
            get_model_parallel_world_size=lambda: count,
            get_slice_parallel_rank=lambda: 0,
            get_slice_parallel_world_size=lambda: 1,
        )


def make_layers(stage: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(40 + stage)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2))


def batch(step: int, stage: int, data_rank: int) -> torch.Tensor:
    return drawn(10_000 * stage + 100 * step + data_rank, ROWS, WIDTH)


Groups = list[dict[str, Any]]


def one_group(layers: nn.Sequential) -> Groups:
    return [{"params": list(layers.parameters())}]


def three_groups(layers: nn.Sequential) -> Groups:
    groups = [{"params": list(layer.parameters())} for layer in layers]
    return [{**group, "weight_decay": 0.1 * index} for index, group in enumerate(groups)]


def first_group_empty(layers: nn.Sequential) -> Groups:
    return [{"params": []}, {"params": list(layers.parameters()), "weight_decay": 0.1}]


def frozen(layers: nn.Sequential) -> Groups:
    return one_group(layers.requires_grad_(False))


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


def engine_of(model: nn.Module, groups: Any, mpu: Any = None, **config: Any) -> Any:
    config = config_of(0, ROWS, **{"gradient_clipping": CLIP, **config})
    optimizer = torch.optim.SGD(groups, lr=LR)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)[0]


def start(mpu: Stages, system: str, grouped: Callable[[nn.Sequential], Groups]) -> Any:
    layers = make_layers(mpu.stage)
    return engine_of(layers, grouped(layers), mpu, **SYSTEMS[system])


def train_step(engine: Any, mpu: Stages, step: int) -> None:
    """A stage whose parameters are all frozen has no backward, as in a pipeline."""
    if any(param.requires_grad for param in engine.module.parameters()):
        x = placed(engine, batch(step, mpu.stage, mpu.data_rank))
        engine.backward(mean_square(engine, x))
    engine.step()


def master(param: nn.Parameter) -> torch.Tensor:
    value = safe_get_full_fp32_param(param) if param.requires_grad else None
    return param.detach().float() if value is None else value


def inputs_of_all(steps: Sequence[int], data_size: int) -> list[torch.Tensor]:
    """What all data ranks see in these steps, for each stage."""
    ranks = range(data_size)
    return [torch.cat([batch(s, stage, r) for s in steps for r in ranks]) for stage in range(2)]


def loss_of_all(stages: nn.ModuleList, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(map(mean_square, stages, inputs))).sum()


class Reference:
    """All stages in one process, plain torch."""

    def __init__(self, cut: str, dtype: torch.dtype) -> None:
        self.stages = nn.ModuleList(make_layers(stage).to(dtype).float() for stage in range(2))
        groups = [grouped(layers) for grouped, layers in zip(CUTS[cut], self.stages, strict=True)]
        self.aligned = [
            [p for group in groups if i < len(group) for p in group[i]["params"]]
            for i in range(max(map(len, groups)))
        ]
        trained = [group for of_stage in groups for group in of_stage if group["params"]]
        optimizer = torch.optim.SGD(trained, lr=LR)
        self.one = OneProcess(self.stages, optimizer, loss_of_all, CLIP)

    def step(self, step: int, data_size: int) -> tuple[float, list[float]]:
        """Train; returns the norm, and the norms over the stages' groups of the same position."""
        self.one.backward([inputs_of_all([step], data_size)])
        squares = [
            sum(p.grad.double().square().sum().item() for p in ps if p.grad is not None)
            for ps in self.aligned
        ]
        self.one.update()
        return math.sqrt(sum(squares)), [math.sqrt(square) for square in squares]
