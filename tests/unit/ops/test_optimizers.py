"""The optimizers under DeepSpeed's names against torch's own or published formulas in fp64."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.muon import MuonWithAuxAdam
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.optimizer_factory import build_basic_optimizer

STEPS = 4
# Muon came with torch 2.9; Adam and AdamW became one class with a switch in 2.7.
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
ADAM_HAS_SWITCH = issubclass(torch.optim.AdamW, torch.optim.Adam)


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(2)
    return [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(7))]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)]


def run(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[torch.Tensor]:
    params = parameters()
    optimizer = make(params)
    for step in range(STEPS):
        for param, grad in zip(params, gradients(step), strict=True):
            param.grad = grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in params]


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_torchs(decoupled: bool) -> None:
    # Kills: the weight decay of the other Adam.
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
    torchs = torch.optim.AdamW if decoupled else torch.optim.Adam
    wanted = run(lambda p: torchs(p, **options))
    if decoupled or ADAM_HAS_SWITCH:
        assert_same(run(lambda p: FusedAdam(p, adam_w_mode=decoupled, **options)), wanted)
    else:
        with pytest.raises(ValueError, match=r"needs torch 2\.7 or newer; use torch\.optim\.Adam"):
            FusedAdam(parameters(), adam_w_mode=False, **options)
    assert_same(run(lambda p: DeepSpeedCPUAdam(p, adamw_mode=decoupled, **options)), wanted)


def test_host_adam_keeps_the_clients_groups() -> None:
    # Kills: copied group dictionaries, to which a client's schedule would write in vain.
    groups = [{"params": parameters(), "lr": 0.5}]
    assert DeepSpeedCPUAdam(groups).param_groups[0] is groups[0]


@pytest.mark.parametrize("cls", [FusedLion, DeepSpeedCPULion])
def test_lion(cls: Any) -> None:
    # Kills: exchanged betas, weight decay added to the gradient.
    lr, (beta1, beta2), decay = 0.1, (0.9, 0.6), 0.2
    wanted = []
    for index, start in enumerate(parameters()):
        value, momentum = start.detach().double(), torch.zeros_like(start).double()
        for step in range(STEPS):
            grad = gradients(step)[index].double()
            value = value * (1 - lr * decay) - lr * torch.sign(
                beta1 * momentum + (1 - beta1) * grad
            )
            momentum = beta2 * momentum + (1 - beta2) * grad
        wanted.append(value)
    assert_same(run(lambda p: cls(p, lr=lr, betas=(beta1, beta2), weight_decay=decay)), wanted)


def test_lamb() -> None:
    # Kills: a trust ratio over all parameters together, missing bias correction, decay outside of
    # the ratio.
    lr, (beta1, beta2), eps, decay, least, most = 0.1, (0.9, 0.8), 1e-6, 0.3, 0.2, 0.9
    wanted = []
    for index, start in enumerate(parameters()):
        value = start.detach().double()
        first, second = torch.zeros_like(value), torch.zeros_like(value)
        for step in range(STEPS):
            grad = gradients(step)[index].double()
            first, second = (
                beta1 * first + (1 - beta1) * grad,
                beta2 * second + (1 - beta2) * grad**2,
            )
            corrected = first / (1 - beta1 ** (step + 1)), second / (1 - beta2 ** (step + 1))
            update = corrected[0] / (corrected[1].sqrt() + eps) + decay * value
            value = value - lr * (value.norm() / update.norm()).clamp(least, most) * update
        wanted.append(value)
    options = {
        "lr": lr,
        "betas": (beta1, beta2),
        "eps": eps,
        "weight_decay": decay,
        "min_coeff": least,
        "max_coeff": most,
    }
    assert_same(run(lambda p: FusedLamb(p, **options)), wanted)


@needs_muon
def test_muon_steps_matrices_and_adam_the_rest() -> None:
    # Kills: one of the two for all, and a learning rate that a schedule sets but the inner
    # optimizers never see.
    def alone(params: list[nn.Parameter]) -> Any:
        matrix = torch.optim.Muon(params[:1], lr=0.1, momentum=0.9, weight_decay=0.1)
        vector = torch.optim.AdamW(params[1:], lr=0.1, betas=(0.8, 0.9), weight_decay=0.1)
        both = copy.copy(matrix)
        both.step = lambda: (matrix.step(), vector.step())  # type: ignore[method-assign]
        return both

    def together(params: list[nn.Parameter]) -> MuonWithAuxAdam:
        options: dict[str, Any] = {"momentum": 0.9, "betas": (0.8, 0.9), "weight_decay": 0.1}
        made = MuonWithAuxAdam(params, lr=9.0, ns_method="standard", **options)  # torch's
        for group in made.param_groups:
            group["lr"] = 0.1
        return made

    assert_same(run(together), run(alone))


@pytest.mark.parametrize(
    "block, cls",
    [
        ({"type": "Adam"}, FusedAdam),
        ({"type": "AdamW", "params": {"torch_adam": True}}, torch.optim.AdamW),
        ({"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}}, torch.optim.Adam),
        ({"type": "SGD", "params": {"lr": 0.1}}, torch.optim.SGD),
        ({"type": "adagrad"}, torch.optim.Adagrad),
        ({"type": "Lion"}, FusedLion),
        ({"type": "Lamb"}, FusedLamb),
        ({"type": "Muon"}, MuonWithAuxAdam),
        ({"type": "RMSprop"}, torch.optim.RMSprop),
    ],
)
def test_names_in_the_configuration(block: dict[str, Any], cls: type) -> None:
    config = DeepSpeedConfig({"train_batch_size": 1, "optimizer": block})
    assert type(build_basic_optimizer(config, parameters(), nn.Module())) is cls


@pytest.mark.parametrize(
    "name, cls",
    [("AdamW", DeepSpeedCPUAdam), ("Lion", DeepSpeedCPULion), ("Adagrad", DeepSpeedCPUAdagrad)],
)
def test_offload_takes_the_host_optimizers(name: str, cls: type) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = DeepSpeedConfig(
        {"train_batch_size": 1, "optimizer": {"type": name}, "zero_optimization": zero}
    )
    assert isinstance(build_basic_optimizer(config, parameters(), nn.Module()), cls)


def test_what_torch_does_not_do_is_refused() -> None:
    with pytest.raises(ValueError, match="bias_correction=False"):
        FusedAdam(parameters(), bias_correction=False)
    with pytest.raises(ValueError, match="max_grad_norm"):
        FusedLamb(parameters(), max_grad_norm=1.0)
    unknown = DeepSpeedConfig({"train_batch_size": 1, "optimizer": {"type": "Adan"}})
    with pytest.raises(DeepSpeedConfigError, match=r"optimizer\.type: 'Adan'"):
        build_basic_optimizer(unknown, parameters(), nn.Module())
