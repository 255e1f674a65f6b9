"""Fix 3, norm half: one small collective gives the global norm, however many parameter groups a
rank has.

See docs/fixes/fix3.md. Uses only names that upstream DeepSpeed has too, so it runs unmodified
against an installed one.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import deepspeed
import deepspeed.comm as dist
from unit.common import DistributedTest
from unit.models import drawn, seeded
from unit.one_process import mean_square
from unit.v1.looping import each, each_pair

WIDTH = 6
LAYERS = 5
MICRO_BATCH = 4
LR = 0.01


class ScalarCollectives(TorchDispatchMode):
    """Counts collectives of one float, or one per parameter group: the norm's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            leaves = torch.utils._pytree.tree_leaves(args[:1])
            floats = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
            # No bucket and no gathered shard of these models is as small.
            self.seen += [tensor.dtype for tensor in floats if tensor.numel() <= LAYERS][:1]
        return func(*args, **(kwargs or {}))


def seen_in(step: Callable[[], Any]) -> list[torch.dtype]:
    with ScalarCollectives() as counter:
        step()
    return counter.seen


def make_model() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))


def grouped(model: nn.Sequential, num_groups: int) -> list[dict[str, Any]]:
    """The layers, dealt to parameter groups in turn."""
    layers = list(model)
    return [
        {"params": [p for layer in layers[i::num_groups] for p in layer.parameters()]}
        for i in range(num_groups)
    ]


def config(stage: int, offload: bool, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": False}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        **more,
    }


def start(
    model: nn.Module, groups: list[dict[str, Any]], configuration: dict[str, Any], mpu: Any = None
) -> Any:
    optimizer = torch.optim.SGD(groups, lr=LR)
    keys = {"optimizer": optimizer, "config": configuration, "mpu": mpu}
    return deepspeed.initialize(model=model, **keys)[0]


def norm_of_one_process(data: torch.Tensor) -> float:
    """With the batches of all ranks, shape [world, micro-batch, width]."""
    model = make_model()
    mean_square(model, data.reshape(-1, WIDTH)).backward()
    return math.sqrt(sum(float(param.grad.double().square().sum()) for param in model.parameters()))


def batches() -> torch.Tensor:
    return drawn(29, dist.get_world_size(), MICRO_BATCH, WIDTH)


class TestOneCollective(DistributedTest):
    """The number of scalar collectives in a step, and what they compute, in fp32."""

    world_size = 2

    @each_pair(stage=(1, 2), num_groups=(1, 3, 5), offload=(False, True))
    def test_count_and_value(self, stage: int, num_groups: int, offload: bool) -> None:
        """One, in fp32, for every number of groups; the norm is that of one process."""
        model = make_model()
        engine = start(model, grouped(model, num_groups), config(stage, offload))
        data = batches()
        engine.backward(mean_square(engine, data[dist.get_rank()]))
        seen = seen_in(engine.step)
        assert seen == [torch.float32], f"{seen} for {num_groups} parameter groups"
        norm = norm_of_one_process(data)
        assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=1e-5)

    @each(offload=(False, True))
    def test_clipping_uses_the_same_norm(self, offload: bool) -> None:
        """Clipping adds no collective, and scales by the global norm."""
        model = make_model()
        before = [param.detach().clone() for param in model.parameters()]
        max_norm = 1e-3
        engine = start(model, grouped(model, 3), config(1, offload, gradient_clipping=max_norm))
        engine.backward(mean_square(engine, batches()[dist.get_rank()]))
        seen = seen_in(engine.step)
        assert len(seen) == 1
        pairs = zip(before, model.parameters(), strict=True)
        moved = math.sqrt(sum(float((a - b.detach()).double().square().sum()) for a, b in pairs))
        assert moved == pytest.approx(LR * max_norm, rel=1e-2)

    @each(stage=(1, 2))
    def test_bf16_norm_is_not_rounded_to_bf16(self, stage: int) -> None:
        """The norm of n gradients of 1 is sqrt(n), which eight mantissa bits cannot hold."""
        numel = 40_401  # 201 squared: 201 rounds to 201 in bf16, its square and partial sums do not
        model = nn.ParameterDict(
            {"weight": nn.Parameter(torch.zeros(numel)), "bias": nn.Parameter(torch.zeros(601))}
        )
        groups = [{"params": [model["weight"]]}, {"params": [model["bias"]]}]
        engine = start(model, groups, config(stage, False, bf16={"enabled": True}))
        engine.backward(sum(param.float().sum() for param in engine.module.parameters()))
        seen = seen_in(engine.step)
        assert seen == [torch.float32]
        norm = math.sqrt(numel + 601)
        assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=1e-5)


def stages() -> Any:
    """An mpu whose every rank is a pipeline stage, data parallel alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([other]) for other in range(world)][rank]
    answers = {
        "model_parallel_rank": rank,
        "model_parallel_world_size": world,
        "model_parallel_group": dist.new_group(list(range(world))),
        "data_parallel_rank": 0,
        "data_parallel_world_size": 1,
        "data_parallel_group": alone,
        "sequence_data_parallel_group": alone,
    }
    return SimpleNamespace(
        **{f"get_{name}": lambda answer=answer: answer for name, answer in answers.items()}
    )


class TestStagesWithDifferentGroups(DistributedTest):
    """Ranks hold different parts of a model, with different numbers of parameter groups."""

    world_size = 2
    exec_timeout = 30

    @each(offload=(False, True))
    def test_no_deadlock_and_the_norm_of_the_whole(self, offload: bool) -> None:
        """One group on rank 0, three on 1: a collective for each would never end."""
        rank = dist.get_rank()
        model = make_model()
        for param in model.parameters():
            param.model_parallel = True  # this rank's own part: every rank counts its parameters
        engine = start(model, grouped(model, (1, 3)[rank]), config(1, offload), mpu=stages())
        data = batches()
        engine.backward(mean_square(engine, data[rank]))
        seen = seen_in(engine.step)
        squares = [norm_of_one_process(part[None]) ** 2 for part in data]
        norm = math.sqrt(sum(squares))
        assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=1e-5)
        assert len(seen) == 1, f"{len(seen)} scalar collectives"
