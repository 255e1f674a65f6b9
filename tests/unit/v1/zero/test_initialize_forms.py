"""What `deepspeed.initialize` may be given, and by how many ranks."""

import argparse
import itertools
import json
from typing import Any

import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_grad
from unit.common import DistributedTest
from unit.v1.looping import each
from unit.v1.zero.usage import (
    LR,
    STAGES,
    TOLERANCE,
    assert_close,
    config_of,
    data,
    inputs,
    loss_of,
    make_engine,
    make_net,
    params_of,
    reference_params,
)


class TestInitializeForms(DistributedTest):
    """The ways to say what is to be trained, by what, and how fast."""

    world_size = 2

    @each(stage=STAGES)
    def test_optimizer_and_scheduler_as_callables(self, stage: int) -> None:
        # Kills: a callable that is taken for an optimizer, gets no parameters, or a schedule on
        # groups that nobody reads.
        seen: list[int] = []

        def optimizer(params: Any) -> torch.optim.Optimizer:
            params = list(params)
            seen.append(len(params))
            return torch.optim.SGD(params, lr=1.0)

        def schedule(basic: torch.optim.Optimizer) -> Any:
            return torch.optim.lr_scheduler.LambdaLR(basic, lambda step: LR if step == 0 else 0.0)

        engine, wrapped, _, made = deepspeed.initialize(
            model=make_net(), optimizer=optimizer, lr_scheduler=schedule, config=config_of(stage)
        )
        assert seen == [6] and made is engine.lr_scheduler
        for index in range(2):  # the second step has learning rate 0
            engine.backward(loss_of(engine(data(index))))
            engine.step()
        assert engine.get_lr() == [0.0] == [group["lr"] for group in wrapped.param_groups]
        assert_close(engine, reference_params([[0]]))

    @each(stage=STAGES)
    def test_model_parameters_as_generator_and_groups(self, stage: int) -> None:
        # Kills: a generator that is consumed twice, and groups that are flattened (the second one
        # has learning rate 0).
        sgd = {"optimizer": {"type": "SGD", "params": {"lr": LR}}}
        model = make_net()
        config = config_of(stage, **sgd)
        engine = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )[0]
        engine.backward(loss_of(engine(data(0))))
        engine.step()
        assert_close(engine, reference_params([[0]]))
        model = make_net()
        groups = [
            {"params": list(model.first.parameters())},
            {"params": list(model.third.parameters()), "lr": 0.0},
        ]
        engine = deepspeed.initialize(
            model=model, model_parameters=groups, config=config_of(stage, **sgd)
        )[0]
        engine.backward(loss_of(engine(data(0))))
        engine.step()
        wanted, initial = reference_params([[0]]), dict(make_net().named_parameters())
        for name, param in engine.module.named_parameters():
            moved = wanted[name] if name.startswith("first") else initial[name].detach()
            torch.testing.assert_close(param.detach(), moved, rtol=2e-6, atol=1e-7)

    def test_args_namespace(self, tmp_path) -> None:
        # Kills: ignoring --deepspeed_config, and taking it silently when config= is given too.
        path = tmp_path / f"config{dist.get_rank()}.json"
        path.write_text(json.dumps(config_of(1, optimizer={"type": "SGD", "params": {"lr": LR}})))
        parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
        parser.add_argument("--local_rank", type=int, default=-1)
        args = parser.parse_args(
            ["--deepspeed", "--deepspeed_config", str(path), "--local_rank", str(dist.get_rank())]
        )
        engine = deepspeed.initialize(args=args, model=make_net())[0]
        assert engine.zero_optimization_stage() == 1 and engine.local_rank == dist.get_rank()
        engine.backward(loss_of(engine(data(0))))
        engine.step()
        assert_close(engine, reference_params([[0]]))

    def test_ranks_start_from_rank_zero(self) -> None:
        # Kills: ranks that keep their own initial weights.
        engine = make_engine(1, model=make_net(seed=100 + dist.get_rank()))
        initial = dict(make_net(seed=100).named_parameters())
        assert all(torch.equal(value, initial[name]) for name, value in params_of(engine))


class TestOneRank(DistributedTest):
    """World 1 runs the same code."""

    world_size = 1

    @each(stage=STAGES, precision=("fp32", "bf16", "bf16+fp32", "fp16"), accumulation=(1, 2))
    def test_world_of_one(self, stage: int, precision: str, accumulation: int) -> None:
        # Kills: a path that is only taken with several ranks and leaves gradients unaccumulated or
        # unscaled here.
        engine = make_engine(stage, accumulation, precision)
        windows = [
            [step * accumulation + micro for micro in range(accumulation)] for step in range(2)
        ]
        for index in itertools.chain(*windows):
            engine.backward(loss_of(engine(inputs(engine, index))))
            engine.step()
        assert_close(engine, reference_params(windows), TOLERANCE[precision])

    @each(stage=STAGES)
    def test_gradient_is_readable_before_the_step(self, stage: int) -> None:
        # Kills: a plain backward whose gradient can't be read, or isn't divided, before the step.
        for plain in (False, True):
            engine = make_engine(stage, 2)
            for index in range(2):
                loss = loss_of(engine(data(index)))
                loss.backward() if plain else engine.backward(loss)
                if index == 1:
                    grad = safe_get_full_grad(engine.module.third.bias).clone()
                engine.step()
            moved = make_net().third.bias.detach() - LR * grad
            torch.testing.assert_close(
                engine.module.third.bias.detach(), moved, rtol=1e-6, atol=1e-7
            )
