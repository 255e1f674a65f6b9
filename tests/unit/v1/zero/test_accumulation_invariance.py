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
from unit.v1.looping import each
from unit.v1.zero.usage import (
    LR,
    ROWS,
    STAGES,
    TOLERANCE,
    Warnings,
    assert_close,
    data,
    inputs,
    loss_of,
    make_engine,
    make_net,
    params_of,
    reference_params,
)

WORLD = 2
SAMPLES_PER_RANK = 32
LENGTH = 12
VOCABULARY = 32
WIDTH = 32
STEPS = 5


class Block(nn.Module):
    """Causal attention and an MLP, each with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape `[rows, length, width]` in and out."""
        rows, length, _ = hidden.shape
        parts = self.qkv(self.before_attention(hidden)).view(rows, length, 3, 4, WIDTH // 4)
        query, key, value = (parts[:, :, i].transpose(1, 2) for i in range(3))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.mix(attended.transpose(1, 2).reshape(rows, length, WIDTH))
        return hidden + self.mlp(hidden)


class TinyGPT(nn.Module):
    """Two blocks with a tied output projection; forward returns the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Loss of predicting each next token of `[rows, length + 1]`."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        hidden = self.tokens(inputs) + self.places.weight
        logits = F.linear(self.last(self.blocks(hidden)), self.tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def batch_of(step: int, rank: int) -> torch.Tensor:
    """This rank's 32 sequences of the step, which count up from a random start."""
    generator = torch.Generator().manual_seed(97 * step + rank)
    start = torch.randint(VOCABULARY, (SAMPLES_PER_RANK, 1), generator=generator)
    stride = torch.randint(1, 4, (SAMPLES_PER_RANK, 1), generator=generator)
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
    torch.manual_seed(0)
    engine, _, _, _ = deepspeed.initialize(model=TinyGPT(), config=config_of(micro_batch, **bf16))
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
        assert max(abs(a - b) for a, b in zip(wide.losses, narrow.losses, strict=True)) <= 3e-4, (
            wide.losses,
            narrow.losses,
        )
        assert max(abs(a / b - 1) for a, b in zip(wide.norms, narrow.norms, strict=True)) <= 0.02, (
            wide.norms,
            narrow.norms,
        )
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
                engine.backward(loss_of(engine(inputs(engine, index))))
            else:
                before = dict(params_of(engine))
                with engine.no_sync():
                    engine.backward(loss_of(engine(inputs(engine, index))))
                    with pytest.raises(RuntimeError, match="no_sync"):
                        engine.step()
                assert all(
                    torch.equal(value, dict(params_of(engine))[name])
                    for name, value in before.items()
                )
            engine.step()
        assert_close(engine, reference_params([[0, 1, 2], [3, 4, 5]]), TOLERANCE[precision])

    @each(stage=STAGES, precision=("fp32", "bf16", "bf16+fp32"))
    def test_boundary_set_from_outside(self, stage: int, precision: str) -> None:
        # Kills: a second count of micro-batches beside the caller's; dividing although the caller
        # did (accelerate's way).
        engine = make_engine(stage, 1, precision)
        for index in range(6):
            last = index % 3 == 2
            engine.set_gradient_accumulation_boundary(last)
            assert engine.is_gradient_accumulation_boundary() is last
            engine.backward(loss_of(engine(inputs(engine, index))) / 3, scale_wrt_gas=False)
            if last:
                engine.step()
        assert engine.global_steps == 2
        assert_close(engine, reference_params([[0, 1, 2], [3, 4, 5]]), TOLERANCE[precision])

    @each(stage=STAGES)
    def test_unmanaged_accumulation(self, stage: int) -> None:
        # Kills: dividing or counting by gradient_accumulation_steps when the caller said that it
        # does so.
        engine = make_engine(
            stage, 4, zero={"overlap_comm": stage == 2}, managed_gradient_accumulation=False
        )
        for step in range(2):
            for index in range(2):
                engine.backward(loss_of(engine(data(2 * step + index))) / 2)
            engine.step()
        assert engine.global_steps == 2
        assert_close(engine, reference_params([[0, 1], [2, 3]]))

    def test_unmanaged_accumulation_counts_the_samples_that_were_seen(self) -> None:
        # Kills: a whole configured batch for each step; the backwards of steps before again.
        engine = make_engine(2, 4, managed_gradient_accumulation=False)
        seen = []
        for backwards in (2, 5, 3):
            for index in range(backwards):
                with engine.no_sync() if index == 0 else nullcontext():
                    engine.backward(loss_of(engine(data(index))))
            engine.step()
            seen.append(engine.global_samples // (ROWS * self.world_size))
        assert seen == [2, 7, 10]

    @each(stage=STAGES)
    def test_the_optimizer_is_stepped_by_itself(self, stage: int) -> None:
        # Kills: weights that go apart without a word where gradients wait for a boundary that only
        # engine.step() reaches (Fabric calls the optimizer's step).
        for accumulation in (1, 2):
            engine = make_engine(stage, accumulation, "bf16+fp32" if stage == 0 else "fp32")
            for index in range(2):
                loss = loss_of(engine(inputs(engine, index)))
                engine.backward(loss / 2 if accumulation == 1 else loss)
            if accumulation == 2 and stage < 2:
                with pytest.raises(RuntimeError, match=r"call engine\.step\(\) after"):
                    engine.optimizer.step()
                continue
            engine.optimizer.step()
            assert_close(
                engine, reference_params([[0, 1]]), TOLERANCE["bf16+fp32" if stage == 0 else "fp32"]
            )

    @each(stage=(*STAGES, 3), precision=("fp32", "bf16", "bf16+fp32", "fp16"))
    def test_a_step_without_a_backward(self, stage: int, precision: str) -> None:
        # Kills: the last step's gradient once more; a step that is counted without a word, or told
        # at each.
        engine = make_engine(stage, 1, precision)
        _log_once.cache_clear()
        with Warnings() as said:
            engine.backward(loss_of(engine(inputs(engine, 0))))
            engine.step()
            assert not said.texts
            for _ in range(2):
                engine.step()
            own = [text for text in said.texts if "without a backward" in text]
            assert (
                len(own) == 1
                and f"engine.step() without a backward since the last step, on "
                f"rank {dist.get_rank()}"
                in own[0]
            ), said.texts
            assert (engine.global_steps, engine.global_samples) == (3, 3 * ROWS * self.world_size)
            assert_close(engine, reference_params([[0]]), TOLERANCE[precision])
            engine.backward(loss_of(engine(inputs(engine, 1))))
            engine.step()
            if (stage, precision) != (0, "fp32"):  # there it is the client's own
                engine.backward(loss_of(engine(inputs(engine, 2))))
                engine.optimizer.step()
                assert len(said.texts) == 1, said.texts
                engine.optimizer.step()
                assert len(said.texts) == 2 and said.texts[1].startswith("optimizer.step() without")
                engine.step()
                engine.backward(loss_of(engine(inputs(engine, 3))))
                engine.optimizer.zero_grad()
                engine.step()
                assert_close(engine, reference_params([[0], [1], [2]]), TOLERANCE[precision])

    @each(stage=STAGES)
    def test_a_step_without_a_backward_on_one_rank(self, stage: int) -> None:
        # Kills: a rank that counts or reduces otherwise than those that have a gradient.
        engine, model = make_engine(stage), make_net()
        _log_once.cache_clear()
        with Warnings() as said:
            if dist.get_rank() == 0:
                engine.backward(loss_of(engine(data(0))))
            engine.step()
        assert len(said.texts) == dist.get_rank() and engine.global_steps == 1
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        (loss_of(model(data(0, 0))) / self.world_size).backward()
        optimizer.step()
        assert_close(engine, {name: param.detach() for name, param in model.named_parameters()})

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
        assert_close(engine, reference_params([[0]]))
        own = make_engine(0, zero={"overlap_comm": False}, managed_gradient_accumulation=False)
        with pytest.raises(AssertionError, match="managed_gradient_accumulation: false"):
            own.set_gradient_accumulation_boundary(True)
        with (
            pytest.raises(AssertionError, match="managed_gradient_accumulation: false"),
            own.coalesce_grad_reduction(),
        ):
            pass
        for stage in (0, 1):
            with pytest.raises(AssertionError, match="overlap_comm only with ZeRO stage 2"):
                make_engine(stage, managed_gradient_accumulation=False)

    @each(stage=STAGES)
    def test_coalesced_reduction(self, stage: int) -> None:
        # Kills: a block that forgets to reduce at its end, or does so for each backward.
        engine = make_engine(stage)
        with engine.coalesce_grad_reduction():
            engine.backward(loss_of(engine(data(0))) / 2)
            engine.backward(loss_of(engine(data(1))) / 2)
        engine.step()
        assert_close(engine, reference_params([[0, 1]]))
