"""Accumulation: what does not depend on it, and how it is controlled."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.utils.logging import _log_once
from unit.common import DistributedTest
from unit.models import seeded, tokens
from unit.v1.looping import each
from unit.v1.zero import usage
from unit.v1.zero.usage import (
    ROWS,
    STAGES,
    TOLERANCE,
    Warnings,
    assert_close,
    check,
    data,
    loss_at,
    loss_of,
    make_engine,
    make_net,
    params_of,
)

WORLD = 2
SAMPLES_PER_RANK = 32
LENGTH = 12
VOCABULARY = 32
WIDTH = 32
STEPS = 5


class TinyGPT(nn.Module):
    """Two causal blocks with a tied output projection; forward returns the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, 2, nn.LayerNorm(WIDTH), False)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Loss of predicting each next token of `[rows, length + 1]`."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        hidden = self.tokens(inputs) + self.places.weight
        hidden = self.blocks(hidden, self.mask.to(hidden.dtype), is_causal=True)
        logits = F.linear(hidden, self.tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def batch_of(step: int, rank: int) -> torch.Tensor:
    """This rank's 32 sequences of the step, which count up from a random start."""
    start = tokens(97 * step + rank, VOCABULARY, SAMPLES_PER_RANK, 1)
    stride = 1 + tokens(97 * step + rank + 50, 3, SAMPLES_PER_RANK, 1)
    return (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY


class Curve(NamedTuple):
    """What one run showed, per step."""

    losses: list[float]
    norms: list[float]
    # Largest difference of the accumulator between the ranks, relative to its largest element.
    spreads: list[float]


def config_of(micro_batch: int, **bf16: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": SAMPLES_PER_RANK // micro_batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True, **bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }


def spread_of(accumulators: list[torch.Tensor]) -> float:
    """How far the ranks' accumulators are apart."""
    flat = torch.cat([flat.reshape(-1) for flat in accumulators])
    copies = [torch.empty_like(flat) for _ in range(WORLD)]
    dist.all_gather(copies, flat)
    if not flat.abs().max() > 0:
        raise AssertionError("the accumulator is empty after the boundary micro-batch")
    return float((copies[0] - copies[1]).abs().max() / flat.abs().max())


def train(micro_batch: int, **bf16: Any) -> Curve:
    """Steps over the same global batches."""
    config = config_of(micro_batch, **bf16)
    engine = deepspeed.initialize(model=seeded(TinyGPT), config=config)[0]
    curve = Curve([], [], [])
    for step in range(STEPS):
        loss_sum = torch.zeros(())
        pieces = batch_of(step, dist.get_rank()).split(micro_batch)
        for index, piece in enumerate(pieces):
            loss = engine(piece)
            engine.backward(loss)
            loss_sum += loss.detach().float() / len(pieces)
            if index == len(pieces) - 1:
                curve.spreads.append(spread_of(engine.optimizer.fp32_groups_gradients_flat))
            engine.step()
        dist.all_reduce(loss_sum)
        curve.losses.append(loss_sum.item() / WORLD)
        curve.norms.append(float(engine.get_global_grad_norm()))
    engine.destroy()
    return curve


class TestAccumulationInvariance(DistributedTest):
    """8 x 4 and 2 x 16 samples per rank."""

    world_size = WORLD

    def test_micro_batch_8_and_2(self) -> None:
        # Kills: the boundary micro-batch added after the all-reduce (fix 4: it then weighs N-fold
        # and differs between ranks), a missing 1/accumulation, summing micro-batches in bf16
        # (sixteen of them lose what is below 1/256 of the sum).
        wide, narrow = train(8), train(2)
        losses = zip(wide.losses, narrow.losses, strict=True)
        assert max(abs(a - b) for a, b in losses) <= 3e-4, (wide.losses, narrow.losses)
        norms = zip(wide.norms, narrow.norms, strict=True)
        assert max(abs(a / b - 1) for a, b in norms) <= 0.02, (wide.norms, narrow.norms)
        assert max(wide.spreads + narrow.spreads) <= 1e-6, (wide.spreads, narrow.spreads)
        # Kills: a run in which nothing is learned and all curves agree because they stand still.
        assert wide.losses[-1] < wide.losses[0] - 0.01
        # Kills: a gradient that joins the accumulator twice, or not at all, when it does so from
        # its hook.
        assert train(8, immediate_grad_update=True) == wide
        assert train(2, immediate_grad_update=True) == narrow


class TestAccumulationControl(DistributedTest):
    """Who says what the boundary is."""

    world_size = 2

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
    def test_other_boundaries(self, stage: int) -> None:
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

    @each(stage=STAGES)
    def test_the_optimizer_is_stepped_by_itself(self, stage: int) -> None:
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

    @each(stage=(*STAGES, 3), precision=("fp32", "bf16", "bf16+fp32", "fp16"))
    def test_a_step_without_a_backward(self, stage: int, precision: str) -> None:
        # Kills: the last step's gradient once more; a step that is counted without a word, or told
        # at each.
        engine = make_engine(stage, 1, precision)
        _log_once.cache_clear()
        with Warnings() as said:
            usage.train(engine, [0])
            assert not said.texts
            for _ in range(2):
                engine.step()
            (own,) = (text for text in said.texts if "without a backward" in text)
            where = f"since the last step, on rank {dist.get_rank()}"
            assert f"engine.step() without a backward {where}" in own, said.texts
            assert (engine.global_steps, engine.global_samples) == (3, 3 * ROWS * self.world_size)
            check(engine, [[0]], precision)
            usage.train(engine, [1])
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

    @each(stage=STAGES)
    def test_a_step_without_a_backward_on_one_rank(self, stage: int) -> None:
        # Kills: a rank that counts or reduces otherwise than those that have a gradient.
        engine = make_engine(stage)
        _log_once.cache_clear()
        with Warnings() as said:
            if dist.get_rank() == 0:
                engine.backward(loss_at(engine, 0))
            engine.step()
        assert len(said.texts) == dist.get_rank() and engine.global_steps == 1
        one = usage.OneProcess(make_net(), usage.LR, lambda net, x: loss_of(net(x)) / WORLD)
        one.step([data(0, 0)])
        assert_close(engine, one.params(), TOLERANCE["fp32"])

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
