"""Model functions for `ds_verify`: a right one, and ones with bugs that users write."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

FEATURES = 8
ROWS = 4

Made = tuple[nn.Module, Callable[[int, int, int], Any], Callable[[Any, Any], torch.Tensor]]


def batch(step: int, micro_batch: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step * 100 + micro_batch * 10 + rank)
    x = torch.randn(ROWS, FEATURES, generator=drawn)
    return x, torch.randn(ROWS, 1, generator=drawn)


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch[1])


def staged_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    # `mse_loss` of older torch has no backward for a stage's bf16 beside labels in fp32.
    return (output - labels).square().mean()


def layers(middle: nn.Module | None = None) -> nn.Module:
    middle = middle or nn.Linear(16, 16)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), middle, nn.GELU(), nn.Linear(16, 1))


def right() -> Made:
    return layers(), batch, loss


def alike() -> Made:
    """Most of its layers have one size."""
    inner = (nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    return layers(nn.Sequential(*inner)), batch, loss


def half() -> Made:
    """In bf16 from the start."""
    return layers().bfloat16(), batch, loss


def with_dropout() -> Made:
    return layers(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))), batch, loss


def staged(chunks: int) -> tuple[nn.Module, Any]:
    """Two stages of a pipeline, whose first and last layers share a weight."""
    tied = partial(TiedLayerSpec, "in", nn.Linear, FEATURES, 16, bias=False)
    listed = [
        *(tied(), nn.GELU(), LayerSpec(nn.Linear, 16, 16), nn.GELU()),
        *(tied(forward_fn=lambda layer, x: x @ layer.weight), LayerSpec(nn.Linear, FEATURES, 1)),
    ]
    how = {"partition_method": "uniform", "num_model_chunks": chunks}
    return PipelineModule(listed, num_stages=2, loss_fn=staged_loss, **how), batch


def pipeline() -> tuple[nn.Module, Any]:
    return staged(1)


def interleaved() -> tuple[nn.Module, Any]:
    return staged(2)


class Routed(nn.Module):
    """Experts that are different ones from the start, and their load-balancing loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(FEATURES, 16)
        self.layer = MoE(16, nn.Linear(16, 16), 4, 2, k=1, use_rts=False, min_capacity=2)
        for expert in self.layer.deepspeed_moe.experts.deepspeed_experts:
            expert.reset_parameters()
        self.outlet = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, balance, _ = self.layer(self.inlet(x).tanh())
        return self.outlet(hidden), balance


def experts() -> Made:
    """Four experts over two ranks each."""
    return Routed(), batch, lambda output, pair: loss(output[0], pair) + 0.01 * output[1]


class Inside(nn.Module):
    """Experts as a layer of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.routed = MoE(16, nn.Linear(16, 16), 4, 2, k=1, use_rts=False, min_capacity=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.routed(x)[0]


def experts_in_stages() -> tuple[nn.Module, Any]:
    """Two stages with four experts over two ranks each."""
    ends = LayerSpec(nn.Linear, FEATURES, 16), LayerSpec(nn.Linear, 16, 1)
    listed = [ends[0], LayerSpec(Inside), LayerSpec(Inside), ends[1]]
    how = {"partition_method": "uniform", "loss_fn": staged_loss}
    return PipelineModule(listed, num_stages=2, **how), batch


class DropOnOdd(torch.autograd.Function):
    """Drops the gradient of every second backward."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        DropOnOdd.calls += 1
        return grad * (DropOnOdd.calls % 2)


class Forgetful(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, DropOnOdd.apply(self.weight), self.bias)


def forgetful() -> Made:
    """The planted bug: gradients of `2.weight` are dropped on odd micro-batches."""
    return layers(Forgetful(16, 16)), batch, loss


def sum_loss() -> Made:
    """A loss that is a sum, not a mean: it grows with the micro-batch."""
    add = partial(nn.functional.mse_loss, reduction="sum")
    return layers(), batch, lambda output, pair: add(output, pair[1])


class Noisy(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn_like(x))


def random_forward() -> Made:
    return layers(Noisy(16, 16)), batch, loss


def without_batches() -> nn.Module:
    return layers()


def frozen() -> Made:
    return layers().requires_grad_(False), batch, loss


def no_loss() -> tuple[nn.Module, Any]:
    return layers(), lambda *place: batch(*place)[0]


def too_few() -> tuple[nn.Module, Any, Any]:
    return layers(), [batch(0, 0, 0)], loss


def wrong_rows() -> Made:
    return layers(), lambda *place: tuple(part[:3] for part in batch(*place)), loss


def single_samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of a loader that does not make micro-batches of them."""
    return [tuple(part[0] for part in batch(n, 0, 0)) for n in range(16)]  # type: ignore[misc]  # two
