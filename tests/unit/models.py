"""Small models, batches and configurations for tests."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

T = TypeVar("T")


def seeded(make: Callable[..., T], *args: Any, seed: int = 0, **kwargs: Any) -> T:
    """What `make` gives when torch's generator starts at `seed`."""
    torch.manual_seed(seed)
    return make(*args, **kwargs)


def linears(count: int, width: int, seed: int = 0, bias: bool = True) -> nn.Sequential:
    """Square linear layers, one after another."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width, bias=bias) for _ in range(count)))


class TokenModel(nn.Module):
    """The loss of tokens, times a factor, up to a length, which it writes down."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)
        self.lengths: list[int | None] = []

    def forward(
        self, tokens: torch.Tensor, factor: float = 1.0, curriculum_seqlen: int | None = None
    ) -> torch.Tensor:
        self.lengths.append(curriculum_seqlen)
        tokens = tokens[:, :curriculum_seqlen]
        scores = self.head(self.embedding(tokens))
        loss = nn.functional.cross_entropy(scores.flatten(0, 1).float(), tokens.flatten())
        return loss * factor


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Normal numbers that depend on `seed` alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int, vocabulary: int, *shape: int) -> torch.Tensor:
    """Integers below `vocabulary` that depend on `seed` alone."""
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def sgd(lr: float) -> dict[str, Any]:
    """The section `optimizer` of a configuration."""
    return {"type": "SGD", "params": {"lr": lr}}


def config_of(
    stage: int, rows: int, accumulation: int = 1, precision: str = "fp32", **more: Any
) -> dict[str, Any]:
    """A configuration that doesn't clip: a factor that differs in its last bit would hide what is
    bit-equal. ``rows`` are a micro-batch's; of ``more``, `zero_optimization` has no stage.
    """
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_force_ds_cpu_optimizer": False,
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
        **more,
        "zero_optimization": {"stage": stage, **more.get("zero_optimization", {})},
    }
