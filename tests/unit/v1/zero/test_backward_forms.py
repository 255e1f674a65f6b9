"""Forms of initialize and of backward that are one and the same."""

import argparse
import itertools
import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_grad
from unit.common import DistributedTest
from unit.one_process import OneProcess
from unit.v1.looping import each, each_pair
from unit.v1.zero.usage import (
    LR,
    STAGES,
    TOLERANCE,
    assert_close,
    check,
    config_of,
    data,
    inputs,
    loss_at,
    loss_of,
    make_engine,
    make_net,
    params_of,
    reference_params,
    train,
    windows_of,
)


class TestBackwardForms(DistributedTest):
    """engine.backward, plain backward, and engine.scale."""

    world_size = 2

    @each_pair(
        stage=STAGES,
        accumulation=(1, 3),
        precision=("fp32", "bf16", "bf16+fp32"),
        form=("managed", "plain", "scale"),
    )
    def test_all_forms_train_alike(
        self, stage: int, accumulation: int, precision: str, form: str
    ) -> None:
        # Kills: a plain backward that isn't noticed (never reduced), divided twice or not at all by
        # the accumulation steps.
        engine = make_engine(stage, accumulation, precision)
        windows = windows_of(accumulation)
        if form == "scale":
            for index in itertools.chain(*windows):
                engine.scale(loss_at(engine, index)).backward()
                engine.step()
        else:
            train(engine, itertools.chain(*windows), plain=form == "plain")
        assert engine.global_steps == 2 and engine.micro_steps == 2 * accumulation
        check(engine, windows, precision)
        engine.destroy()

    @each_pair(
        stage=STAGES, accumulation=(1, 2), precision=("fp32", "bf16+fp32"), bucket=(20, 10**6)
    )
    def test_the_model_called_directly(
        self, stage: int, accumulation: int, precision: str, bucket: int
    ) -> None:
        # Kills: a sum over micro-batches where the mean is wanted, because no forward of the engine
        # noticed the backward.
        engine = make_engine(stage, accumulation, precision, zero={"reduce_bucket_size": bucket})
        windows = windows_of(accumulation)
        for index in itertools.chain(*windows):
            loss_of(engine.module(inputs(engine, index))).backward()
            engine.step()
        check(engine, windows, precision)
        engine.destroy()

    @each(stage=STAGES)
    def test_forms_that_are_refused(self, stage: int) -> None:
        # Kills: unscaled fp16 gradients that are divided by the loss scale afterwards, without a
        # word; a window whose micro-batches are divided by different numbers; an error that leaves
        # the engine unusable.
        needed = r"Loss scaling is required.*engine\.scale\(loss\)"
        engine = make_engine(stage, precision="fp16")
        with pytest.raises(RuntimeError, match=needed):
            loss_at(engine, 0).backward()
        engine.zero_grad()
        engine.scale(loss_at(engine, 0)).backward()
        engine.step()
        check(engine, [[0]], "fp16")
        with pytest.raises(RuntimeError, match=needed):
            loss_of(engine.module(inputs(engine, 0))).backward()
            engine.step()
        engine = make_engine(stage, accumulation=2)
        train(engine, [0])
        with pytest.raises(RuntimeError, match="gradient_accumulation_steps \\(2\\)"):
            loss_at(engine, 1).backward()
        engine.zero_grad()
        train(engine, [1])

    @each(stage=STAGES, precision=("fp32", "bf16+fp32"))
    def test_several_losses_and_backwards_per_step(self, stage: int, precision: str) -> None:
        # Kills: averaging the first backward's sum again with the second's (its share would shrink
        # with the world), and a second backward at the boundary that replaces the first.
        engine = make_engine(stage, precision=precision)
        for step in range(2):
            output = engine(inputs(engine, step))
            engine.backward(loss_of(output), retain_graph=True)
            engine.backward(output.float().mean())
            engine.backward(loss_at(engine, 10 + step))
            engine.step()

        def total(model: nn.Module, at: tuple[int, int]) -> torch.Tensor:
            output, more = model(data(*at)), model(data(10 + at[0], at[1]))
            return loss_of(output) + output.mean() + loss_of(more)

        one = OneProcess(make_net(), LR, total)
        assert_close(engine, one.train(lambda *at: at, 2), 4 * TOLERANCE[precision])

    @each(stage=STAGES, plain=(False, True))
    def test_a_module_used_twice(self, stage: int, plain: bool) -> None:
        # Kills: a plain backward that ends at the first output's gradient, and a parameter whose
        # second use is lost.
        def both(model: Any, rank: int) -> torch.Tensor:
            return loss_of(model(data(0, rank)) - 2 * model(data(1, rank)).square())

        engine = make_engine(stage)
        loss = both(engine, dist.get_rank())
        loss.backward() if plain else engine.backward(loss)
        engine.step()
        one = OneProcess(make_net(), LR, both)
        one.step(range(dist.get_world_size()))
        assert_close(engine, one.params())

    @each(stage=STAGES)
    def test_what_is_not_to_count(self, stage: int) -> None:
        # Kills: state of a broken backward (counts, buckets, the running flag) that leaks into the
        # next one.
        engine = make_engine(stage)
        for plain in (False, True):
            output = engine(data(7))

            def refuse(grad: torch.Tensor) -> torch.Tensor:
                raise KeyError("on purpose")

            hidden = engine.module.first(data(8)).tanh()
            hidden.register_hook(refuse)
            loss = loss_of(output) + loss_of(engine.module.third(hidden))
            with pytest.raises(KeyError, match="on purpose"):
                loss.backward() if plain else engine.backward(loss)
            engine.zero_grad()
        train(engine, range(2))
        check(engine, [[0], [1]])
        # Kills: gradients that lie in a shard or an accumulator and survive zero_grad.
        for precision in ("fp32", "bf16+fp32"):
            engine = make_engine(stage, precision=precision)
            engine.backward(loss_at(engine, 9))
            engine.zero_grad()
            train(engine, [0])
            check(engine, [[0]], precision)


class SharedLayers(nn.Module):
    """Reentrant checkpoints over segments that share a layer: its hook fires once for each."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(5, 7)
        self.shared = nn.Linear(7, 7)
        self.own = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.after = nn.Linear(7, 3)

    def segment(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        return self.own[index](self.shared(hidden).tanh()).tanh()

    def forward(self, x: torch.Tensor, recompute: bool = True) -> torch.Tensor:
        hidden = self.before(x).tanh()
        for index in range(3):
            if recompute:
                hidden = checkpoint(self.segment, index, hidden, use_reentrant=True)
            else:
                hidden = self.segment(index, hidden)
        return self.after(hidden)


class TestCheckpointing(DistributedTest):
    """Gradients that come in several parts, after their bucket was thought complete."""

    world_size = 2

    @each_pair(stage=STAGES, overlap=(True, False), bucket=(1, 60, 10**6), plain=(False, True))
    def test_late_gradients_count_once(
        self, stage: int, overlap: bool, bucket: int, plain: bool
    ) -> None:
        # Kills: sending the shared layer after its first firing and dropping (or sending twice)
        # what comes later; a plain backward that is closed by an inner autograd task.
        zero = {"overlap_comm": overlap, "reduce_bucket_size": bucket}
        engine = make_engine(stage, 2, model=make_net(cls=SharedLayers), zero=zero)
        train(engine, range(4), plain)

        def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return loss_of(model(x, recompute=False))

        assert_close(engine, reference_params(windows_of(2), loss, make_net(cls=SharedLayers)))
        engine.destroy()


class TestInitializeForms(DistributedTest):
    """The ways to say what is to be trained, by what, and how fast."""

    world_size = 2

    @each(stage=STAGES)
    def test_optimizers_parameters_and_schedulers(self, stage: int) -> None:
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
        train(engine, range(2))  # the second step has learning rate 0
        assert engine.get_lr() == [0.0] == [group["lr"] for group in wrapped.param_groups]
        check(engine, [[0]])
        # Kills: a generator that is consumed twice, and groups that are flattened (the second one
        # has learning rate 0).
        config = config_of(stage, optimizer={"type": "SGD", "params": {"lr": LR}})
        model = make_net()
        params: Any = model.parameters()
        engine = deepspeed.initialize(model=model, model_parameters=params, config=config)[0]
        train(engine, [0])
        check(engine, [[0]])
        model = make_net()
        params = [
            {"params": list(model.first.parameters())},
            {"params": list(model.third.parameters()), "lr": 0.0},
        ]
        engine = deepspeed.initialize(model=model, model_parameters=params, config=config)[0]
        train(engine, [0])
        wanted, initial = reference_params([[0]]), dict(make_net().named_parameters())
        for name, param in engine.module.named_parameters():
            moved = wanted[name] if name.startswith("first") else initial[name].detach()
            torch.testing.assert_close(param.detach(), moved, rtol=2e-6, atol=1e-7)

    def test_arguments_and_initial_weights(self, tmp_path: Any) -> None:
        # Kills: ignoring --deepspeed_config, and taking it silently when config= is given too.
        path = tmp_path / f"config{dist.get_rank()}.json"
        path.write_text(json.dumps(config_of(1, optimizer={"type": "SGD", "params": {"lr": LR}})))
        parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
        parser.add_argument("--local_rank", type=int, default=-1)
        given = ["--deepspeed", "--deepspeed_config", str(path), "--local_rank"]
        args = parser.parse_args([*given, str(dist.get_rank())])
        engine = deepspeed.initialize(args=args, model=make_net())[0]
        assert engine.zero_optimization_stage() == 1 and engine.local_rank == dist.get_rank()
        train(engine, [0])
        check(engine, [[0]])
        # Kills: ranks that keep their own initial weights.
        engine = make_engine(1, model=make_net(seed=100 + dist.get_rank()))
        initial = dict(make_net(seed=100).named_parameters())
        assert all(torch.equal(value, initial[name]) for name, value in params_of(engine).items())


class TestOneRank(DistributedTest):
    """World 1 runs the same code."""

    world_size = 1

    @each(stage=STAGES, precision=("fp32", "bf16", "bf16+fp32", "fp16"), accumulation=(1, 2))
    def test_world_of_one(self, stage: int, precision: str, accumulation: int) -> None:
        # Kills: a path that is only taken with several ranks and leaves gradients unaccumulated or
        # unscaled here.
        engine = make_engine(stage, accumulation, precision)
        train(engine, range(2 * accumulation))
        check(engine, windows_of(accumulation), precision)

    @each(stage=STAGES)
    def test_gradient_is_readable_before_the_step(self, stage: int) -> None:
        # Kills: a plain backward whose gradient can't be read, or isn't divided, before the step.
        for plain in (False, True):
            engine = make_engine(stage, 2)
            train(engine, [0], plain)
            loss = loss_at(engine, 1)
            loss.backward() if plain else engine.backward(loss)
            bias = engine.module.third.bias
            grad = safe_get_full_grad(bias).clone()
            engine.step()
            moved = make_net().third.bias.detach() - LR * grad
            torch.testing.assert_close(bias.detach(), moved, rtol=1e-6, atol=1e-7)
