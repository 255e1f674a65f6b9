"""Runs one configuration of the MoE contract on this rank and compares it with the single-process
reference. Collective.

[Note: tolerance] fp32: what is left is the order of sums over at most 4 ranks, 2 micro-batches and
12 tokens, a few units of 2^-24 relative to gradients whose parts cancel by an order of magnitude or
so: 2e-5. bf16: the reference rounds where the system does, but an expert's matrix product over
another number of rows may be rounded otherwise, by a unit of 2^-8 each in forward, backward, sum
over micro-batches and sum over ranks: 4 * 2^-8 of the norm, and the norm itself inherits it. Half
the gradient of one rank is far more.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import deepspeed
from deepspeed import comm as dist
from deepspeed.moe.layer import MoE
from deepspeed.utils import safe_get_full_fp32_params, safe_get_full_grads
from unit.models import config_of, sgd
from unit.v1.gathering import from_all_ranks
from unit.v1.moe.slow_gate import Gate, Tensors, expert_forward, moe_forward

WIDTH, ROWS, NUM_EXPERTS, STEPS = 6, 12, 4, 2
LEARNING_RATE, CLIP, AUX_WEIGHT = 0.5, 0.05, 0.3
LOCAL_EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts."


@dataclass(frozen=True)
class Case:
    """One configuration."""

    ep_size: int
    k: int
    drop: bool
    stage: int
    precision: str
    residual: bool = False
    accumulation: int = 1
    data_first: bool = False
    zero_init: bool = False
    offload: bool = False

    @property
    def gate(self) -> Gate:
        """For the reference."""
        return Gate(self.k, 1.0, 1, self.drop)

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def tolerance(self) -> float:
        """See [Note: tolerance]."""
        return 4 * 2.0**-8 if self.precision == "bf16" else 2e-5


class Expert(nn.Module):
    """A linear layer and tanh, with `weight` and `bias` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[..., WIDTH] -> the same."""
        return torch.tanh(nn.functional.linear(tokens, self.weight, self.bias))


def mixture(ep_size: int, k: int, drop: bool, **more: Any) -> MoE:
    """A layer of experts that routes as the reference does."""
    drawn = {"use_rts": False, "top2_2nd_expert_sampling": False}
    how = {"k": k, "min_capacity": 1, "drop_tokens": drop, **drawn, **more}
    return MoE(WIDTH, Expert(), NUM_EXPERTS, ep_size, **how)


class Net(nn.Module):
    """A dense layer, a mixture of experts, a dense layer; square error plus balancing loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.moe = mixture(case.ep_size, case.k, case.drop, use_residual=case.residual)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Scalar fp32 loss."""
        output, l_aux, _ = self.moe(self.first(x))
        return (self.last(output).float() - target.float()).square().mean() + AUX_WEIGHT * l_aux


def initial_parameters(case: Case) -> dict[str, torch.Tensor]:
    """All parameters of the whole model, every expert different, by the reference's names."""
    dense = ["first", *(f"experts.{e}" for e in range(NUM_EXPERTS)), "mlp", "coefficient", "last"]
    shapes = {"first.weight": (WIDTH, WIDTH), "first.bias": (WIDTH,), "wg": (NUM_EXPERTS, WIDTH)}
    for name in dense[1:]:
        width = 2 if name == "coefficient" else WIDTH
        shapes |= {f"{name}.weight": (width, WIDTH), f"{name}.bias": (width,)}
    unused = () if case.residual else ("mlp", "coefficient")
    values = exact_in_bf16(shapes, 0.6)
    return {n: value for n, value in values.items() if n.partition(".")[0] not in unused}


def exact_in_bf16(shapes: Mapping[str, tuple[int, ...]], size: float) -> dict[str, torch.Tensor]:
    """Random values that masters start with."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: (torch.randn(shape, generator=generator) * size).bfloat16().float()
        for name, shape in shapes.items()
    }


def micro_batch(
    step: int, rank: int, micro: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank sees; in step 1 its tokens are much alike, so that most experts get none."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * rank + micro)
    x, target = torch.randn(2, ROWS, WIDTH, generator=generator)
    if step == 1:
        x = 2 * x[:1] + 0.3 * x
    return x.to(dtype), target


def reference_loss(
    params: Tensors, case: Case, batch: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """One rank's loss on one micro-batch, all experts at hand."""
    x, target = batch
    hidden = nn.functional.linear(x, params["first.weight"], params["first.bias"])
    output, l_aux = moe_forward(hidden, params, case.gate, NUM_EXPERTS)
    if case.residual:
        weight, bias = params["coefficient.weight"], params["coefficient.bias"]
        shares = torch.softmax(nn.functional.linear(hidden, weight, bias), dim=-1)
        output = output * shares[:, :1] + expert_forward(hidden, params, "mlp") * shares[:, 1:]
    result = nn.functional.linear(output, params["last.weight"], params["last.bias"])
    return (result.float() - target).square().mean() + AUX_WEIGHT * l_aux


@dataclass
class Expected:
    """losses[rank][micro]; averaged gradients before clipping; their norm; parameters after SGD."""

    losses: list[list[float]]
    grads: dict[str, torch.Tensor]
    norm: float
    params: dict[str, torch.Tensor]


def reference_step(
    masters: Tensors,
    case: Case,
    step: int,
    ranks: int,
    loss_of: Callable[..., torch.Tensor] = reference_loss,
) -> Expected:
    """What one step from `masters` must give; micro-batch gradients are summed in double."""
    total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in masters.items()}
    losses: list[list[float]] = []
    for rank in range(ranks):
        losses.append([])
        for micro in range(case.accumulation):
            params = {n: value.to(case.dtype).requires_grad_() for n, value in masters.items()}
            loss = loss_of(params, case, micro_batch(step, rank, micro, case.dtype))
            losses[-1].append(loss.item())
            grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
            for name, grad in zip(params, grads, strict=True):
                if grad is not None:
                    total[name] += grad.double() / (ranks * case.accumulation)
    norm = math.sqrt(sum(grad.square().sum().item() for grad in total.values()))
    factor = min(1.0, CLIP / (norm + 1e-6))
    params = {
        name: (value.double() - LEARNING_RATE * factor * total[name]).float()
        for name, value in masters.items()
    }
    return Expected(losses, {name: grad.float() for name, grad in total.items()}, norm, params)


class CaseRun:
    """One case on this rank; `failures` says what was not as it must be."""

    def __init__(self, case: Case, ledger: bool = True) -> None:
        self.case = case
        self.ledger = ledger
        self.failures: list[str] = []
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        with deepspeed.zero.Init(config_dict_or_path=self._config(), enabled=case.zero_init):
            model = Net(case)
        replicas = self.world // case.ep_size
        ep_rank = self.rank // replicas if case.data_first else self.rank % case.ep_size
        num_local = NUM_EXPERTS // case.ep_size
        first = ep_rank * num_local
        named = model.named_parameters()
        self.params = {self._global_name(name, first): param for name, param in named}
        self.initial = initial_parameters(case)
        with torch.no_grad():
            for name, param in self.params.items():
                group = getattr(param, "ds_process_group", None)
                owner = None if group is None else dist.get_global_rank(group, 0)
                with deepspeed.zero.GatheredParameters(param, modifier_rank=owner):
                    param.copy_(self.initial[name])
        self.engine = deepspeed.initialize(model=model, config=self._config())[0]
        ids = list(model.moe.global_expert_ids)
        if ids != list(range(first, first + num_local)):
            self.failures.append(f"global_expert_ids {ids}")

    @staticmethod
    def _global_name(name: str, first: int) -> str:
        if name.startswith(LOCAL_EXPERT):
            local, _, rest = name.removeprefix(LOCAL_EXPERT).partition(".")
            return f"experts.{first + int(local)}.{rest}"
        return {"moe.deepspeed_moe.gate.wg.weight": "wg"}.get(name, name.removeprefix("moe."))

    def _config(self) -> dict[str, Any]:
        case, zero = self.case, {"reduce_bucket_size": 50}
        if case.stage == 3:
            zero["stage3_param_persistence_threshold"] = WIDTH  # biases persist
        if case.offload:
            zero |= {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
        return config_of(
            case.stage,
            ROWS,
            case.accumulation,
            case.precision,
            gradient_clipping=CLIP,
            optimizer=sgd(LEARNING_RATE),
            zero_optimization=zero,
            use_data_before_expert_parallelism=case.data_first,
            verify={"ledger": self.ledger},
        )

    def _whole(self, local: list[torch.Tensor], what: str) -> dict[str, torch.Tensor]:
        """The tensors of all ranks by name; those that several hold have the same bits."""
        own = {name: value.detach().clone() for name, value in zip(self.params, local, strict=True)}
        whole: dict[str, torch.Tensor] = {}
        for rank, tensors in enumerate(from_all_ranks(own)):
            for name, value in tensors.items():
                if not torch.equal(whole.setdefault(name, value), value):
                    told = f"{what} {name} of rank {rank} is not what other ranks have"
                    self.failures.append(told)
        return {name: whole[name] for name in self.initial}

    def _masters(self) -> dict[str, torch.Tensor]:
        params = list(self.params.values())
        whole = [p.data for p in params] if self._is_plain else safe_get_full_fp32_params(params)
        return self._whole(whole, "parameter")

    def _grads(self) -> dict[str, torch.Tensor]:
        params = list(self.params.values())
        if self._is_plain:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            return self._whole(grads, "gradient")
        return self._whole(safe_get_full_grads(params) or [], "gradient")

    @property
    def _is_plain(self) -> bool:
        return self.case.stage == 0 and self.case.precision == "fp32"

    def run(self) -> list[str]:
        """All steps; returns the failures."""
        try:
            masters = self._masters()
            self._compare(0, "first weight", masters, self.initial, 0.0)
            for step in range(STEPS):
                masters = self._train(step, masters)
        finally:
            self.engine.destroy()
        return [f"{self.case}: {failure}" for failure in self.failures]

    def _train(self, step: int, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with _disable_current_modes():  # it need not run on a simulated device
            expected = reference_step(before, self.case, step, self.world)
        self._backwards(step, expected)
        grads = self._grads()
        self.engine.step()
        masters = self._masters()
        self._compare_step(step, grads, masters, expected)
        return masters

    def _compare_step(
        self, step: int, grads: Tensors, masters: Tensors, expected: Expected
    ) -> None:
        tolerance = self.case.tolerance
        self._compare(step, "gradient", grads, expected.grads, tolerance)
        # An update is at most LEARNING_RATE * CLIP long; what is compared is its error.
        bound = 3 * tolerance * LEARNING_RATE * CLIP
        self._compare(step, "parameter", masters, expected.params, bound)
        norm = float(self.engine.get_global_grad_norm())
        self._compare_number(step, "norm", norm, expected.norm)

    def _compare_number(self, step: int, what: str, number: float, right: float) -> None:
        if not math.isclose(number, right, rel_tol=self.case.tolerance):
            self.failures.append(f"step {step}: {what} {number} instead of {right}")

    def _backwards(self, step: int, expected: Expected) -> None:
        for micro in range(self.case.accumulation):
            if micro:
                self.engine.step()
            loss = self.engine(*micro_batch(step, self.rank, micro, self.case.dtype))
            self._compare_number(step, "loss", loss.item(), expected.losses[self.rank][micro])
            self.engine.backward(loss)

    def _compare(
        self, step: int, what: str, got: Tensors, expected: Tensors, tolerance: float
    ) -> None:
        is_gradient = what == "gradient"
        whole = math.sqrt(sum(value.square().sum().item() for value in expected.values()))
        size = max(whole, 1e-3) if is_gradient else 1.0
        for name, value in expected.items():
            error, own = (got[name].float() - value).norm().item(), value.norm().item()
            # Half of its own size at most, too: a small parameter's gradient must not hide behind
            # the others'.
            bound = tolerance * size
            if is_gradient and self.case.precision == "fp32":
                bound = min(bound, max(0.5 * own, 1e-7))
            if not error <= bound + (2.0**-23 * own if what == "parameter" else 0.0):
                told = f"{what} {name} is off by {error:.2e}, allowed {bound:.2e}"
                self.failures.append(f"step {step}: {told}")
