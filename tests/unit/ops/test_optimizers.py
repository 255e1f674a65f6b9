"""The optimizers under DeepSpeed's names against torch's own or published formulas in fp64."""

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.muon import MuonWithAuxAdam
from deepspeed.ops.muon.newton_schulz import orthogonalize
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.config_models.training import SchedulerConfig
from deepspeed.runtime.optimizer_factory import build_basic_optimizer
from deepspeed.runtime.optimizers.muon_groups import check_whole_parameters, one_rate_for_both
from deepspeed.runtime.sharding.model_ranks import ModelRanks
from unit.operators import Operators

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
            update = torch.sign(beta1 * momentum + (1 - beta1) * grad)
            value = value * (1 - lr * decay) - lr * update
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
            first = beta1 * first + (1 - beta1) * grad
            second = beta2 * second + (1 - beta2) * grad**2
            corrected = first / (1 - beta1 ** (step + 1)), second / (1 - beta2 ** (step + 1))
            update = corrected[0] / (corrected[1].sqrt() + eps) + decay * value
            value = value - lr * (value.norm() / update.norm()).clamp(least, most) * update
        wanted.append(value)
    options = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": decay}
    options |= {"min_coeff": least, "max_coeff": most}
    assert_same(run(lambda p: FusedLamb(p, **options)), wanted)


def without_correction(
    decoupled: bool, amsgrad: bool, lr: float, betas: tuple[float, float], eps: float, decay: float
) -> list[torch.Tensor]:
    """Adam's formula on the moments as they are."""
    wanted = []
    for index, value in enumerate(param.detach().double() for param in parameters()):
        first, second = torch.zeros_like(value), torch.zeros_like(value)
        largest = second
        for step in range(STEPS):
            grad = gradients(step)[index].double() + (0.0 if decoupled else decay) * value
            first = betas[0] * first + (1 - betas[0]) * grad
            second = betas[1] * second + (1 - betas[1]) * grad**2
            largest = torch.maximum(largest, second)
            root = (largest if amsgrad else second).sqrt() + eps
            value = value * (1 - lr * decay if decoupled else 1.0) - lr * first / root
        wanted.append(value)
    return wanted


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_without_bias_correction(decoupled: bool, amsgrad: bool) -> None:
    # Kills: a moment that is divided by what it lacks, one of the largest ones; decay of the other.
    decay = 0.3 if decoupled or ADAM_HAS_SWITCH else 0.0
    wanted = without_correction(decoupled, amsgrad, 0.1, (0.8, 0.9), 1e-6, decay)
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "amsgrad": amsgrad}
    options |= {"weight_decay": decay, "bias_correction": False}
    assert_same(run(lambda p: FusedAdam(p, adam_w_mode=decoupled, **options)), wanted)
    assert_same(run(lambda p: DeepSpeedCPUAdam(p, adamw_mode=decoupled, **options)), wanted)


def test_state_of_torchs_adam_leaves_bias_correction_as_it_is() -> None:
    # Kills: groups that have never heard of the option, after which steps are corrected; the same
    # of a copy; an infinite count in files.
    plain = torch.optim.AdamW(parameters())
    for param, grad in zip(plain.param_groups[0]["params"], gradients(0), strict=True):
        param.grad = grad
    plain.step()
    loaded = FusedAdam(parameters(), bias_correction=False)
    loaded.load_state_dict(plain.state_dict())
    optimizer = copy.deepcopy(loaded)
    assert not optimizer.param_groups[0]["bias_correction"]
    for param, grad in zip(optimizer.param_groups[0]["params"], gradients(1), strict=True):
        param.grad = grad
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state_dict()["state"].values()} == {2}


def test_a_step_without_bias_correction_calls_hooks_once() -> None:
    # Kills: a step around torch's, which has been made to call them as well.
    optimizers = [torch.optim.AdamW(parameters()), FusedAdam(parameters(), bias_correction=False)]
    called: list[Any] = []
    optimizers[1].register_step_post_hook(lambda *args: called.append(args))
    optimizers[1].step()
    assert len(called) == 1


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


KINDS: dict[str, tuple[dict[str, Any], type]] = {
    "Adam": ({}, FusedAdam),
    "AdamW": ({"torch_adam": True}, torch.optim.AdamW),
    "adam": ({"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam),
    "SGD": ({"lr": 0.1}, torch.optim.SGD),
    "adagrad": ({}, torch.optim.Adagrad),
    **{"Lion": ({}, FusedLion), "Lamb": ({}, FusedLamb), "Muon": ({}, MuonWithAuxAdam)},
    "RMSprop": ({}, torch.optim.RMSprop),
}


@pytest.mark.parametrize("name", KINDS)
def test_names_in_the_configuration(name: str) -> None:
    params, cls = KINDS[name]
    block = {"type": name, "params": params}
    config = DeepSpeedConfig({"train_batch_size": 1, "optimizer": block})
    assert type(build_basic_optimizer(config, parameters(), nn.Module())) is cls


def test_offload_takes_the_host_optimizers() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    kinds = {"AdamW": DeepSpeedCPUAdam, "Lion": DeepSpeedCPULion, "Adagrad": DeepSpeedCPUAdagrad}
    for name, cls in kinds.items():
        block = {"optimizer": {"type": name}, "zero_optimization": zero}
        config = DeepSpeedConfig({"train_batch_size": 1, **block})
        assert isinstance(build_basic_optimizer(config, parameters(), nn.Module()), cls)


def test_what_torch_does_not_do_is_refused() -> None:
    with pytest.raises(ValueError, match="max_grad_norm"):
        FusedLamb(parameters(), max_grad_norm=1.0)
    unknown = DeepSpeedConfig({"train_batch_size": 1, "optimizer": {"type": "Adan"}})
    with pytest.raises(DeepSpeedConfigError, match=r"optimizer\.type: 'Adan'"):
        build_basic_optimizer(unknown, parameters(), nn.Module())


COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def by_singular_values(matrix: torch.Tensor) -> torch.Tensor:
    """Five steps of the polynomial, in double precision."""
    a, b, c = COEFFICIENTS
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    return (left * values) @ right


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(24, 90), (90, 24), (32, 32), (3, 20, 90), (2, 90, 20)])
def test_the_polynomial_of_singular_values(shape: tuple[int, ...], method: str) -> None:
    # Kills: one step more or less, a product in the other order, a stack as one matrix, one norm
    # for all of a stack.
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if len(shape) == 3:
        tensor[0] *= 100
    found = orthogonalize(tensor, method)
    assert (found.dtype, found.shape) == (torch.bfloat16, tensor.shape)
    for own, matrix in zip(found.view(-1, *shape[-2:]), tensor.view(-1, *shape[-2:]), strict=True):
        wanted = by_singular_values(matrix)
        assert (own.double() - wanted).norm() < 0.05 * wanted.norm()


def test_filters_and_nothing() -> None:
    # Kills: filters as stacks of small matrices; a matrix without elements that divides by zero.
    filters = torch.randn(6, 3, 3, 3)
    wanted = orthogonalize(filters.view(6, 27))
    assert torch.equal(orthogonalize(filters), wanted.view(6, 3, 3, 3))
    assert orthogonalize(torch.empty(3, 0)).shape == (3, 0)
    assert torch.equal(orthogonalize(torch.zeros(3, 4)), torch.zeros(3, 4, dtype=torch.bfloat16))


def test_marks_and_groups_that_disagree_are_refused() -> None:
    # Kills: either of them wins without a word.
    matrix, vector = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))
    matrix.use_muon = True  # type: ignore[attr-defined]  # a mark
    with pytest.raises(ValueError, match=r"shape \(3, 4\), has param\.use_muon = True, its group"):
        MuonWithAuxAdam([{"params": [matrix], "use_muon": False}])
    with pytest.raises(ValueError, match=r"parameter 1 of group 0.*has use_muon, but Muon updates"):
        MuonWithAuxAdam([{"params": [matrix, vector], "use_muon": True}])


def test_state_of_other_groups_is_refused() -> None:
    # Kills: a group that AdamW updates after a load.
    matrix, other = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
    first, second = {"params": [matrix], "use_muon": True}, {"params": [other], "use_muon": False}
    optimizer = MuonWithAuxAdam([first, second])
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    state["param_groups"].reverse()
    with pytest.raises(ValueError, match="parameter group 0 has use_muon=True, in the state"):
        optimizer.load_state_dict(state)


def test_adam_beside_muon_is_the_fused_kernel() -> None:
    # Kills: launches for every operator of AdamW; a count of steps that stays as it was loaded.
    param = parameters()[1]
    optimizer = MuonWithAuxAdam([param])
    launched = Operators()
    for step in range(2):
        param.grad = gradients(step)[1]
        with launched:
            optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        state["state"][0]["step"] = step + 1  # as a number, or on the host
        optimizer.load_state_dict(state)
    assert launched.names.count("_fused_adamw_.default") == 2


def test_a_schedule_that_sets_one_rate_is_told_of() -> None:
    # Kills: rates of their own that a schedule overwrites without a word; a warning for nothing.
    rates = {"muon_lr": 0.02, "adam_lr": 3e-4}

    def told(kind: str, params: dict[str, Any]) -> str | None:
        return one_rate_for_both(rates, SchedulerConfig(type=kind, params=params))

    assert "scheduler.params.warmup_max_lr: 0.1" in (told("WarmupLR", {"warmup_max_lr": 0.1}) or "")
    assert "scheduler.params.warmup_max_lr: 0.001" in (told("WarmupDecayLR", {}) or "")
    assert told("WarmupLR", {}) is None
    assert told("WarmupLR", {"warmup_max_lr": [0.02, 3e-4]}) is None
    assert told("WarmupCosineLR", {"total_num_steps": 9}) is None
    one = SchedulerConfig(type="WarmupLR", params={"warmup_max_lr": 0.1})
    assert one_rate_for_both({"lr": 0.1}, one) is None
    assert one_rate_for_both(rates, None) is None


def test_a_slice_of_a_matrix_is_refused() -> None:
    # Kills: a tensor-parallel rank's slice, made orthogonal by itself.
    matrix = nn.Parameter(torch.randn(3, 4))
    matrix.tensor_model_parallel = True  # type: ignore[attr-defined]  # a mark
    ranks = ModelRanks(cast(Any, None), None, 1, tensor_group=object(), has_parts=True)
    with pytest.raises(DeepSpeedConfigError, match="updates weight from the whole of it, and tens"):
        check_whole_parameters(MuonWithAuxAdam([matrix]), False, False, {matrix: "weight"}, ranks)
