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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import deepspeed
from deepspeed import comm as dist
from deepspeed.moe.layer import MoE
from deepspeed.utils import safe_get_full_fp32_params, safe_get_full_grads
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


class Net(nn.Module):
    """A dense layer, a mixture of experts, a dense layer; square error plus balancing loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(
            WIDTH,
            Expert(),
            NUM_EXPERTS,
            case.ep_size,
            k=case.k,
            min_capacity=1,
            use_residual=case.residual,
            drop_tokens=case.drop,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Scalar fp32 loss."""
        output, l_aux, _ = self.moe(self.first(x))
        return (self.last(output).float() - target.float()).square().mean() + AUX_WEIGHT * l_aux


def initial_parameters(case: Case) -> dict[str, torch.Tensor]:
    """All parameters of the whole model, every expert different, by the reference's names."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"first.weight": (WIDTH, WIDTH), "first.bias": (WIDTH,), "wg": (NUM_EXPERTS, WIDTH)}
    for expert in (*(f"experts.{e}" for e in range(NUM_EXPERTS)), "mlp"):
        shapes |= {f"{expert}.weight": (WIDTH, WIDTH), f"{expert}.bias": (WIDTH,)}
    shapes |= {"coefficient.weight": (2, WIDTH), "coefficient.bias": (2,)}
    shapes |= {"last.weight": (WIDTH, WIDTH), "last.bias": (WIDTH,)}
    # Exact in bf16, so that masters start with them.
    values = {
        name: (torch.randn(shape, generator=generator) * 0.6).bfloat16().float()
        for name, shape in shapes.items()
    }
    unused = () if case.residual else ("mlp", "coefficient")
    return (
        {name: value for name, value in values.items() if not name.startswith(unused)}
        if unused
        else values
    )


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
        shares = torch.softmax(
            nn.functional.linear(hidden, params["coefficient.weight"], params["coefficient.bias"]),
            dim=-1,
        )
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
            params = {
                name: value.to(case.dtype).requires_grad_() for name, value in masters.items()
            }
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
        self.params = {
            self._global_name(name, ep_rank * num_local): p for name, p in model.named_parameters()
        }
        self.initial = initial_parameters(case)
        with torch.no_grad():
            for name, param in self.params.items():
                group = getattr(param, "ds_process_group", None)
                first = None if group is None else dist.get_global_rank(group, 0)
                with deepspeed.zero.GatheredParameters(param, modifier_rank=first):
                    param.copy_(self.initial[name])
        self.engine, _, _, _ = deepspeed.initialize(model=model, config=self._config())
        if list(model.moe.global_expert_ids) != list(
            range(ep_rank * num_local, (ep_rank + 1) * num_local)
        ):
            self.failures.append(f"global_expert_ids {model.moe.global_expert_ids}")

    @staticmethod
    def _global_name(name: str, first: int) -> str:
        if name.startswith(LOCAL_EXPERT):
            local, _, rest = name.removeprefix(LOCAL_EXPERT).partition(".")
            return f"experts.{first + int(local)}.{rest}"
        return {"moe.deepspeed_moe.gate.wg.weight": "wg"}.get(name, name.removeprefix("moe."))

    def _config(self) -> dict[str, Any]:
        # Biases persist; what is larger is gathered.
        whole: dict[str, Any] = (
            {"stage3_param_persistence_threshold": WIDTH} if self.case.stage == 3 else {}
        )
        if self.case.offload:
            whole |= {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
        return {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": self.case.accumulation,
            "gradient_clipping": CLIP,
            "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
            "bf16": {"enabled": self.case.precision == "bf16"},
            "zero_optimization": {"stage": self.case.stage, "reduce_bucket_size": 50, **whole},
            "use_data_before_expert_parallelism": self.case.data_first,
            "verify": {"ledger": self.ledger},
        }

    def _whole(self, local: list[torch.Tensor], what: str) -> dict[str, torch.Tensor]:
        """The tensors of all ranks by name; those that several hold have the same bits."""
        own = {name: value.detach().clone() for name, value in zip(self.params, local, strict=True)}
        whole: dict[str, torch.Tensor] = {}
        for rank, tensors in enumerate(from_all_ranks(own)):
            for name, value in tensors.items():
                if name in whole and not torch.equal(whole[name], value):
                    self.failures.append(
                        f"{what} {name} of rank {rank} is not what other ranks have"
                    )
                whole.setdefault(name, value)
        return {name: whole[name] for name in self.initial}

    def _masters(self) -> dict[str, torch.Tensor]:
        params = list(self.params.values())
        plain = self.case.stage == 0 and self.case.precision == "fp32"
        return self._whole(
            [p.data for p in params] if plain else safe_get_full_fp32_params(params), "parameter"
        )

    def _grads(self) -> dict[str, torch.Tensor]:
        params = list(self.params.values())
        if self.case.stage == 0 and self.case.precision == "fp32":
            return self._whole(
                [torch.zeros_like(p) if p.grad is None else p.grad for p in params], "gradient"
            )
        return self._whole(safe_get_full_grads(params) or [], "gradient")

    def run(self) -> list[str]:
        """All steps; returns the failures."""
        try:
            masters = self._masters()
            self._compare(0, "first weight", masters, self.initial, 0.0)
            for step in range(STEPS):
                with _disable_current_modes():  # it need not run on a simulated device
                    expected = reference_step(masters, self.case, step, self.world)
                self._backwards(step, expected)
                grads = self._grads()
                self.engine.step()
                masters = self._masters()
                self._compare(step, "gradient", grads, expected.grads, self.case.tolerance)
                # An update is at most LEARNING_RATE * CLIP long; what is compared is its error.
                self._compare(
                    step,
                    "parameter",
                    masters,
                    expected.params,
                    3 * self.case.tolerance * LEARNING_RATE * CLIP,
                )
                norm = float(self.engine.get_global_grad_norm())
                if not math.isclose(norm, expected.norm, rel_tol=self.case.tolerance):
                    self.failures.append(f"step {step}: norm {norm} instead of {expected.norm}")
        finally:
            self.engine.destroy()
        return [f"{self.case}: {failure}" for failure in self.failures]

    def _backwards(self, step: int, expected: Expected) -> None:
        for micro in range(self.case.accumulation):
            loss = self.engine(*micro_batch(step, self.rank, micro, self.case.dtype))
            if not math.isclose(
                loss.item(), expected.losses[self.rank][micro], rel_tol=self.case.tolerance
            ):
                self.failures.append(
                    f"step {step}: loss {loss.item()} instead of "
                    f"{expected.losses[self.rank][micro]}"
                )
            self.engine.backward(loss)
            if micro + 1 < self.case.accumulation:
                self.engine.step()

    def _compare(
        self,
        step: int,
        what: str,
        got: dict[str, torch.Tensor],
        expected: dict[str, torch.Tensor],
        tolerance: float,
    ) -> None:
        size = (
            max(math.sqrt(sum(value.square().sum().item() for value in expected.values())), 1e-3)
            if what == "gradient"
            else 1.0
        )
        for name, value in expected.items():
            error = (got[name].float() - value).norm().item()
            # Half of its own size at most, too: a small parameter's gradient must not hide behind
            # the others'.
            bound = tolerance * size
            if what == "gradient" and self.case.precision == "fp32":
                bound = min(bound, max(0.5 * value.norm().item(), 1e-7))
            if not error <= bound + (
                2.0**-23 * value.norm().item() if what == "parameter" else 0.0
            ):
                self.failures.append(
                    f"step {step}: {what} {name} is off by {error:.2e}, allowed {bound:.2e}"
                )
