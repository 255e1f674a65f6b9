"""A loss of one engine that runs through another's model: a GAN, and what else scripts do."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from unit.common import DistributedTest
from unit.models import config_of, drawn, sgd
from unit.v1.zero.usage import Warnings

STEPS = 3
STAGES = [0, 1, 2, 3]
LR = 0.05


class Generator(nn.Sequential):
    """Noise to a sample."""


class Discriminator(nn.Sequential):
    """A sample to a logit."""


def gan() -> tuple[Generator, Discriminator]:
    torch.manual_seed(0)
    generator = Generator(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
    return generator, Discriminator(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def data(index: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Noise and real samples: others on each rank."""
    return drawn(10 * index + rank, 2, 10).split((4, 6), dim=1)


def discriminator_loss(g: Any, d: Any, noise: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (d(real) - 1).square().mean() + d(g(noise).detach()).square().mean()
    return loss


def generator_loss(g: Any, d: Any, noise: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (d(g(noise)) - 1).square().mean()
    return loss


def plain_torch(steps: int, accumulation: int) -> list[torch.Tensor]:
    """Weights after training on the batches of all ranks in one process."""
    g, d = gan()
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in (g, d)]
    ranks = range(dist.get_world_size())
    for micro in range(steps * accumulation):
        is_last = (micro + 1) % accumulation == 0
        batches = [data(micro, rank) for rank in ranks]
        d.requires_grad_(True)
        for batch in batches:
            (discriminator_loss(g, d, *batch) / len(ranks) / accumulation).backward()
        if is_last:
            optimizers[1].step()
        d.requires_grad_(False)
        for noise, _ in batches:
            (generator_loss(g, d, noise) / len(ranks) / accumulation).backward()
        if is_last:
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    return [param.detach().clone() for model in (g, d) for param in model.parameters()]


def engine_of(model: nn.Module, stage: int, accumulation: int = 1, **options: Any) -> Any:
    # Several buckets, so that hooks send them.
    zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 20}
    config = config_of(stage, 2, accumulation, optimizer=sgd(LR), zero_optimization=zero)
    config |= {"zero_allow_untested_optimizer": True, **options}
    return deepspeed.initialize(model=model, config=config)[0]


def weights(*models: nn.Module) -> list[torch.Tensor]:
    params = [param for model in models for param in model.parameters()]
    with deepspeed.zero.GatheredParameters(params):
        return [param.detach().clone() for param in params]


def off_by(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=True))


class TestGan(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage", STAGES)
    def test_as_accelerate_has_it(self, stage: int) -> None:
        # Its `backward` steps too, and `zero_grad()` and `step()` of its optimizers do nothing.
        # Kills: a step on the generator's gradients in silence; a word for each step or rank.
        accelerate = pytest.importorskip("accelerate")
        wrapped = accelerate.utils.DeepSpeedEngineWrapper
        models = gan()
        g, d = (engine_of(model, stage) for model in models)
        with Warnings() as said:
            for step in range(STEPS):
                noise, real = data(step, dist.get_rank())
                wrapped(d).backward(discriminator_loss(g, d, noise, real))
                wrapped(g).backward(generator_loss(g, d, noise))
        assert off_by(weights(*models), plain_torch(STEPS, 1)) > 1e-2
        told = said.about("the backward of")
        assert len(told) == (1 if dist.get_rank() == 0 else 0), told
        for text in told:
            assert "Discriminator: a step adds gradients that the backward of Generator" in text
            assert "0.weight" in text and "zero_grad()" in text

    @pytest.mark.parametrize("stage", STAGES)
    def test_what_the_page_says(self, stage: int) -> None:
        # Both ways out end at the weights of plain torch, and nothing is told.
        rank = dist.get_rank()
        for accumulation, freezes in ((1, False), (1, True), (2, True)):
            models = gan()
            g, d = (engine_of(model, stage, accumulation) for model in models)
            with Warnings() as said:
                for micro in range(STEPS * accumulation):
                    noise, real = data(micro, rank)
                    if freezes:
                        d.requires_grad_(True)
                    else:
                        d.zero_grad()
                    d.backward(discriminator_loss(g, d, noise, real))
                    d.step()
                    if freezes:
                        d.requires_grad_(False)
                    g.backward(generator_loss(g, d, noise))
                    g.step()
            assert not said.about("the backward of")
            assert off_by(weights(*models), plain_torch(STEPS, accumulation)) < 1e-6
            g.destroy()
            d.destroy()

    def test_refused(self) -> None:
        # Kills: words about a plain loss.backward() that the script does not have.
        def train(**options: Any) -> None:
            g, d = (engine_of(model, 2, **options) for model in gan())
            noise, real = (part.to(g.model_dtype) for part in data(0, dist.get_rank()))
            d.backward(discriminator_loss(g, d, noise, real))
            d.step()
            g.backward(generator_loss(g, d, noise))

        for options, why in (
            ({"accumulation": 2}, "accumulation window has backwards of its own"),
            ({"fp16": {"enabled": True}}, "would carry another loss scale"),
        ):
            text = rf"backward of Generator reaches Discriminator, .*{why}.*freeze Discriminator"
            with pytest.raises(RuntimeError, match=text):
                train(**options)


class TestLegal(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_nothing_is_told(self, stage: int) -> None:
        # Kills: gradients that are wanted, taken for a GAN's.
        first, second = (engine_of(nn.Linear(4, 4), stage) for _ in range(2))
        x = torch.ones(2, 4)

        def loss(*engines: Any) -> torch.Tensor:
            value = x
            for engine in engines:
                value = engine(value)
            return value.square().mean()

        def step(*engines: Any) -> None:
            for engine in engines:
                engine.step()

        with Warnings() as said:
            for _ in range(2):
                # A model in two engines, which one of them runs backward.
                second.backward(loss(first, second))
                step(second, first)
                second.scale(loss(first, second)).backward()
                step(second, first)
                # Losses of both, before either steps.
                second.backward(loss(first, second))
                first.backward(loss(first))
                step(second, first)
                # Several losses of one, of one graph.
                value = loss(first)
                first.backward(value, retain_graph=True)
                first.backward(2 * value)
                step(first)
                # Nobody but the script runs it.
                loss(first, second).backward()
                step(second)
                first.zero_grad()
                loss(first).backward()
                step(first)
        assert not said.about("the backward of")

    def test_slower_steps(self) -> None:
        # One that steps on several backwards of the other has none of its own.
        slow = engine_of(nn.Linear(4, 4), 2, managed_gradient_accumulation=False)
        fast = engine_of(nn.Linear(4, 4), 2)
        with Warnings() as said:
            for step in range(4):
                fast.backward(fast(slow(torch.ones(2, 4))).square().mean())
                fast.step()
                if step % 2:
                    slow.step()
        assert not said.about("the backward of")

    def test_frozen_parameters(self) -> None:
        # Kills: a backward that nobody notices since the parameter that was looked at was frozen.
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        reference = copy.deepcopy(model)
        optimizer = torch.optim.SGD(reference.parameters(), lr=LR)
        engine = engine_of(model, 1, accumulation=2)
        x = torch.ones(2, 4)
        for frozen in (0, 1, 0):
            for parts in (model, reference):
                parts.requires_grad_(True)
                parts[frozen].requires_grad_(False)
            for _ in range(2):
                engine(x).square().mean().backward()
                engine.step()
            reference(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert off_by(weights(model), weights(reference)) < 1e-6
