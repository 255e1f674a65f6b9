"""The reference of most tests: one process that sees the batches of all ranks, in plain torch."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_grad

Loss = Callable[[Any, Any], torch.Tensor]


def own_loss(model: Any, batch: Any) -> torch.Tensor:
    """What a model gives that is its loss, or that of a model of transformers."""
    if isinstance(batch, dict):
        return model(**batch).loss
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def mean_square(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """The mean square of what a model gives, in fp32."""
    output: torch.Tensor = model(batch)
    return output.float().square().mean()


def placed(engine: Any, batch: torch.Tensor) -> torch.Tensor:
    """A batch as an engine's model takes it."""
    return batch.to(engine.device, engine.model_dtype)


class OneProcess:
    """A model, trained in place, and its optimizer, or the rate of SGD for all that is trained;
    gradients are clipped to the norm ``clip``, if not 0, and `norm` was the last step's before.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | float,
        loss: Loss = own_loss,
        clip: float = 0.0,
    ) -> None:
        self.model, self.loss, self.clip = model, loss, clip
        trained = [param for param in model.parameters() if param.requires_grad]
        is_rate = isinstance(optimizer, float | int)
        self.optimizer = torch.optim.SGD(trained, lr=optimizer) if is_rate else optimizer
        self.norm = torch.zeros(())

    def backward(self, batches: Iterable[Any]) -> float:
        """Leave the gradients of the mean of the losses of `batches`, which is returned."""
        self.optimizer.zero_grad()
        batches, total = list(batches), 0.0
        for batch in batches:
            loss = self.loss(self.model, batch) / len(batches)
            loss.backward()
            total += loss.item()
        return total

    def step(self, batches: Iterable[Any]) -> float:
        """One step on the mean of the losses of `batches`, which is returned."""
        loss = self.backward(batches)
        self.update()
        return loss

    def update(self) -> None:
        """Clip and step by the gradients that are there."""
        self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip or float("inf"))
        self.optimizer.step()

    def train(
        self, batch_of: Callable[[int, int], Any], steps: int, accumulation: int = 1
    ) -> dict[str, torch.Tensor]:
        """Steps on the micro-batches `batch_of(index, rank)` of all ranks; the parameters then."""
        for step in range(steps):
            self.step(of_all_ranks(batch_of, step, accumulation))
        return self.params()

    def params(self) -> dict[str, torch.Tensor]:
        """The parameters by name."""
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}

    def grads(self) -> dict[str, torch.Tensor]:
        """The gradients of what is trained by name, zeros where there is none."""
        return {
            name: torch.zeros_like(param) if param.grad is None else param.grad.clone()
            for name, param in self.model.named_parameters()
            if param.requires_grad
        }


def of_all_ranks(
    batch_of: Callable[[int, int], Any], step: int, accumulation: int = 1
) -> list[Any]:
    """The micro-batches of one step: their numbers go on over steps."""
    numbers = range(step * accumulation, (step + 1) * accumulation)
    return [batch_of(number, rank) for number in numbers for rank in range(dist.get_world_size())]


def go_through(
    engine: Any, batches: Iterable[Any], loss: Loss = own_loss, plain: bool = False
) -> list[torch.Tensor]:
    """Train on this rank's micro-batches as a script does, perhaps with a `plain`
    `loss.backward()`; their losses, for which nobody waits.
    """
    losses = []
    for batch in batches:
        value = loss(engine, batch)
        value.backward() if plain else engine.backward(value)
        engine.step()
        losses.append(value.detach())
    return losses


def train(engine: Any, batches: Iterable[Any], loss: Loss = own_loss) -> list[float]:
    """The same; the losses as numbers."""
    return [value.item() for value in go_through(engine, batches, loss)]


def assert_gradients(model: nn.Module, reference: nn.Module, tolerance: float) -> None:
    """Those of an engine's model are the reference's, each up to a part of its norm."""
    wanted = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        grad, found = wanted[name].grad, safe_get_full_grad(param)
        error = ((found - grad).norm() / grad.norm()).item()
        assert error <= tolerance, f"the gradient of {name} is off by {error:.2e}"
