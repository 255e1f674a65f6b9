"""Small models and loaders under the names and signatures that suites for upstream import."""

import argparse
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import deepspeed
from deepspeed.moe.layer import MoE
from unit.common import preferred_dtype


class SimpleModel(nn.Module):
    """Linear layers of one width and their cross entropy; `empty_grad`: one is not used."""

    def __init__(self, hidden_dim: int, empty_grad: bool = False, nlayers: int = 1) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(hidden_dim, hidden_dim) for _ in range(nlayers))
        if empty_grad:
            self.linear2 = nn.Linear(hidden_dim, hidden_dim)
        self.cross_entropy_loss = nn.CrossEntropyLoss()
        self.empty_grad = empty_grad

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of `x` `[rows, hidden_dim]` with classes `y` `[rows]`."""
        for linear in self.linears:
            x = linear(x)
        loss: torch.Tensor = self.cross_entropy_loss(x, y)
        return loss


class SimpleFrozenModel(SimpleModel):
    """Two layers, of which the first is frozen."""

    def __init__(self, hidden_dim: int, empty_grad: bool = False) -> None:
        super().__init__(hidden_dim, empty_grad, nlayers=2)
        self.linears[0].requires_grad_(False)


class UnusedParametersModel(SimpleModel):
    """A layer that is used, and four that are not."""

    def __init__(self, hidden_dim: int, empty_grad: bool = False) -> None:
        super().__init__(hidden_dim, empty_grad)
        for number in range(1, 5):
            self.add_module(f"unused_linear{number}", nn.Linear(hidden_dim, hidden_dim))


class SimpleMoEModel(nn.Module):
    """A linear layer and a layer of experts."""

    def __init__(
        self,
        hidden_dim: int,
        num_experts: int = 4,
        ep_size: int = 1,
        use_residual: bool = False,
        use_rts: bool = True,
    ) -> None:
        super().__init__()
        self.linear1 = nn.Linear(hidden_dim, hidden_dim)
        words = {"ep_size": ep_size, "use_residual": use_residual, "use_rts": use_rts}
        expert = nn.Linear(hidden_dim, hidden_dim)
        self.linear2 = MoE(hidden_dim, expert, num_experts=num_experts, k=1, **words)
        self.cross_entropy_loss = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of `x` `[rows, length, hidden_dim]`, averaged, and of the experts' load."""
        hidden = self.linear1(x)
        output, l_aux, _ = self.linear2(hidden)
        loss: torch.Tensor = self.cross_entropy_loss((hidden + output).mean(1), y) + l_aux
        return loss


class LinearStack(nn.Module):
    """Linear layers from one width to another; `forward(x, y)` is the cross entropy."""

    def __init__(
        self,
        input_dim: int = 128,
        hidden_dim: int = 128,
        output_dim: int = 128,
        num_layers: int = 4,
    ) -> None:
        super().__init__()
        self.input_dim, self.hidden_dim, self.output_dim = input_dim, hidden_dim, output_dim
        self.input_layer = nn.Linear(input_dim, hidden_dim)
        self.layers = nn.ModuleList(
            nn.Linear(hidden_dim, hidden_dim, bias=False) for _ in range(num_layers)
        )
        self.output_layer = nn.Linear(hidden_dim, output_dim)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of `x` `[rows, input_dim]` with classes `y` `[rows]`."""
        x = self.input_layer(x)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.output_layer(x), y)


class SimpleOptimizer(torch.optim.Optimizer):
    """Gradient descent without state, of a class that no list knows."""

    def __init__(self, params: Any, lr: float = 0.11072018) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"])
        return loss


def random_dataset(
    total_samples: int, hidden_dim: int, device: Any, dtype: torch.dtype | None = None
) -> TensorDataset:
    """Rows of random numbers, each with a random class."""
    data = torch.randn(total_samples, hidden_dim, device=device, dtype=dtype or preferred_dtype())
    labels = torch.randint(hidden_dim, (total_samples,), device=device)
    return TensorDataset(data, labels)


def random_dataloader(
    model: Any, total_samples: int, hidden_dim: int, device: Any, dtype: torch.dtype | None = None
) -> DataLoader[Any]:
    """`random_dataset` in micro-batches of an engine."""
    return _loader(model, random_dataset(total_samples, hidden_dim, device, dtype))


def sequence_dataloader(
    model: Any,
    total_samples: int,
    hidden_dim: int,
    device: Any,
    seq_len: int = 32,
    dtype: torch.dtype | None = None,
) -> DataLoader[Any]:
    """Random sequences, each with a random class, in micro-batches of an engine."""
    shape = (total_samples, seq_len, hidden_dim)
    data = torch.randn(shape, device=device, dtype=dtype or preferred_dtype())
    labels = torch.randint(hidden_dim, (total_samples,), device=device)
    return _loader(model, TensorDataset(data, labels))


def _loader(model: Any, dataset: TensorDataset) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=model.train_micro_batch_size_per_gpu())


def create_config_from_dict(tmpdir: Any, config_dict: Mapping[str, Any]) -> str:
    """Write a configuration to a file, and give its path. Every rank may: each has its own."""
    path = os.path.join(tmpdir, f"temp_config.{os.environ.get('RANK', '0')}.json")
    with open(path, "w") as file:
        json.dump(config_dict, file)
    return path


def create_deepspeed_args() -> argparse.Namespace:
    """Arguments as of a script that has added DeepSpeed's, on this rank."""
    args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args(["--deepspeed"])
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return args


def args_from_dict(tmpdir: Any, config_dict: Mapping[str, Any]) -> argparse.Namespace:
    """Arguments of a script that was given a file with this configuration."""
    args = create_deepspeed_args()
    args.deepspeed_config = create_config_from_dict(tmpdir, config_dict)
    return args


class Wide(nn.Module):
    """Square layers without bias: much state and next to no activations; the loss is their sum."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().sum()
