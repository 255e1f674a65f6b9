"""Forms of initialize and of backward that are one and the same, and who says what a step is."""

import argparse
import itertools
import json
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_grad
from deepspeed.utils.logging import _log_once
from unit.common import DistributedTest
from unit.one_process import OneProcess
from unit.v1.looping import each, each_pair
from unit.v1.zero.usage import (
    LR,
    ROWS,
    STAGES,
    TOLERANCE,
    Warnings,
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


class TestForms(DistributedTest):
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
    def test_forms_that_are_refused_and_what_is_not_to_count(self, stage: int) -> None:
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

    @each(stage=STAGES, precision=("fp32", "bf16+fp32"))
    def test_no_sync(self, stage: int, precision: str) -> None:
        # Kills: a collective inside no_sync, a gradient of the block that the next reduction drops
        # or averages twice.
        engine = make_engine(stage, 3, precision)
        for index in range(6):
            if index % 3 == 2:
                engine.backward(loss_at(engine, index))
            else:
                before = params_of(engine)
                with engine.no_sync():
                    engine.backward(loss_at(engine, index))
                    with pytest.raises(RuntimeError, match="no_sync"):
                        engine.step()
                assert all(map(torch.equal, before.values(), params_of(engine).values()))
            engine.step()
        check(engine, [[0, 1, 2], [3, 4, 5]], precision)

    @each(stage=STAGES, precision=("fp32", "bf16", "bf16+fp32"))
    def test_boundary_set_from_outside(self, stage: int, precision: str) -> None:
        # Kills: a second count of micro-batches beside the caller's; dividing although the caller
        # did (accelerate's way).
        engine = make_engine(stage, 1, precision)
        for index in range(6):
            last = index % 3 == 2
            engine.set_gradient_accumulation_boundary(last)
            assert engine.is_gradient_accumulation_boundary() is last
            engine.backward(loss_at(engine, index) / 3, scale_wrt_gas=False)
            if last:
                engine.step()
        assert engine.global_steps == 2
        check(engine, [[0, 1, 2], [3, 4, 5]], precision)

    @each(stage=STAGES)
    def test_other_boundaries_and_steps(self, stage: int) -> None:
        # Kills: dividing or counting by gradient_accumulation_steps when the caller said that it
        # does so; a block that forgets to reduce at its end, or does so for each backward.
        own = {"zero": {"overlap_comm": stage == 2}, "managed_gradient_accumulation": False}
        engine = make_engine(stage, 4, **own)
        for window in ((0, 1), (2, 3)):
            for index in window:
                engine.backward(loss_at(engine, index) / 2)
            engine.step()
        assert engine.global_steps == 2
        check(engine, [[0, 1], [2, 3]])
        # Kills: a whole configured batch for each step; the backwards of steps before again.
        engine = make_engine(stage, 4, **own)
        seen = []
        for backwards in (2, 5, 3) if stage == 2 else ():
            for index in range(backwards):
                with engine.no_sync() if index == 0 else nullcontext():
                    engine.backward(loss_at(engine, index))
            engine.step()
            seen.append(engine.global_samples // (ROWS * self.world_size))
        assert seen == ([2, 7, 10] if stage == 2 else [])
        engine = make_engine(stage)
        with engine.coalesce_grad_reduction():
            engine.backward(loss_at(engine, 0) / 2)
            engine.backward(loss_at(engine, 1) / 2)
        engine.step()
        check(engine, [[0, 1]])
        # Kills: weights that go apart without a word where gradients wait for a boundary that only
        # engine.step() reaches (Fabric calls the optimizer's step).
        precision = "fp32" if stage else "bf16+fp32"
        for accumulation in (1, 2):
            engine = make_engine(stage, accumulation, precision)
            for index in range(2):
                engine.backward(loss_at(engine, index) * accumulation / 2)
            if accumulation == 2 and stage < 2:
                with pytest.raises(RuntimeError, match=r"call engine\.step\(\) after"):
                    engine.optimizer.step()
                continue
            engine.optimizer.step()
            check(engine, [[0, 1]], precision)
        # Kills: a rank that counts or reduces otherwise than those that have a gradient.
        engine = make_engine(stage)
        _log_once.cache_clear()
        with Warnings() as said:
            if dist.get_rank() == 0:
                engine.backward(loss_at(engine, 0))
            engine.step()
        assert len(said.texts) == dist.get_rank() and engine.global_steps == 1
        one = OneProcess(make_net(), LR, lambda net, x: loss_of(net(x)) / dist.get_world_size())
        one.step([data(0, 0)])
        assert_close(engine, one.params(), TOLERANCE["fp32"])

    @each(stage=(*STAGES, 3), precision=("fp32", "bf16", "bf16+fp32", "fp16"))
    def test_a_step_without_a_backward(self, stage: int, precision: str) -> None:
        # Kills: the last step's gradient once more; a step that is counted without a word, or told
        # at each.
        engine = make_engine(stage, 1, precision)
        _log_once.cache_clear()
        with Warnings() as said:
            train(engine, [0])
            assert not said.texts
            for _ in range(2):
                engine.step()
            (own,) = (text for text in said.texts if "without a backward" in text)
            where = f"since the last step, on rank {dist.get_rank()}"
            assert f"engine.step() without a backward {where}" in own, said.texts
            assert (engine.global_steps, engine.global_samples) == (3, 3 * ROWS * self.world_size)
            check(engine, [[0]], precision)
            train(engine, [1])
            if (stage, precision) != (0, "fp32"):  # there it is the client's own
                engine.backward(loss_at(engine, 2))
                engine.optimizer.step()
                assert len(said.texts) == 1, said.texts
                engine.optimizer.step()
                assert len(said.texts) == 2 and said.texts[1].startswith("optimizer.step() without")
                engine.step()
                engine.backward(loss_at(engine, 3))
                engine.optimizer.zero_grad()
                engine.step()
                check(engine, [[0], [1], [2]], precision)

    def test_calls_that_mean_nothing(self) -> None:
        # Kills: a loss that starts no gradient, a boundary that nobody looks at. Upstream asserts.
        engine = make_engine(0)
        output = engine(data(0))
        for wrong in (output, 1.0, torch.tensor(1.0), output.mean().detach()):
            with pytest.raises(AssertionError, match=r"engine\.scale\(loss\): expected a scalar"):
                engine.scale(wrong)
        for wrong in (output, 1.0):
            with pytest.raises(AssertionError, match=r"backward\(loss\): expected a scalar"):
                engine.backward(wrong)
        engine.backward(loss_of(output))
        engine.step()
        check(engine, [[0]])
        own = make_engine(0, zero={"overlap_comm": False}, managed_gradient_accumulation=False)
        with pytest.raises(AssertionError, match="managed_gradient_accumulation: false"):
            own.set_gradient_accumulation_boundary(True)
        with pytest.raises(AssertionError, match="managed_gradient_accumulation: false"):
            own.coalesce_grad_reduction().__enter__()
        for stage in (0, 1):
            with pytest.raises(AssertionError, match="overlap_comm only with ZeRO stage 2"):
                make_engine(stage, managed_gradient_accumulation=False)


class TestOneRank(DistributedTest):
    world_size = 1

    @each_pair(stage=STAGES, precision=("fp32", "bf16", "bf16+fp32", "fp16"), accumulation=(1, 2))
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
