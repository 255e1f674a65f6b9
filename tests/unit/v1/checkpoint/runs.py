"""A small training run that can be stopped and resumed, and everything of it that must survive."""

import random
from typing import Any

import numpy
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_fp32_params,
    safe_get_full_optimizer_state,
    safe_get_full_optimizer_states,
)

WIDTH = 8
# 5 micro-batches of 2 per rank and epoch: with 2 accumulation steps every other step spans two
# epochs.
SAMPLES = 20
BF16 = {"bf16": {"enabled": True}}
ACCUMULATE = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}  # BF16_Optimizer
MOMENTS = ("exp_avg", "exp_avg_sq")


class Net(nn.Module):
    """Tied weights, a frozen layer, dropout, a buffer, sizes that two do not divide."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 7)
        self.drop = nn.Dropout(0.2)
        self.tied = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(7, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: (batch, WIDTH)
        self.calls += 1
        hidden = self.drop(torch.tanh(self.first(x)))
        return self.last(self.frozen(torch.tanh(self.again(self.tied(hidden)))))


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets, the same in every run."""
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(WIDTH, generator=generator), torch.randn(3, generator=generator))
        for _ in range(SAMPLES)
    ]


def config(**keys: Any) -> dict[str, Any]:
    """AdamW, a schedule, two accumulation steps and clipping; with further keys."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "steps_per_print": 1000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 3, "total_num_steps": 9, "warmup_max_lr": 1e-2},
        },
        **keys,
    }


def start(configuration: dict[str, Any], seed: int = 1, **more: Any) -> Any:
    """An engine over a fresh model, with its own dataloader."""
    torch.manual_seed(seed)
    model = Net()
    decayed = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() > 1]
    plain = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    more = {"model_parameters": groups, "training_data": samples(), **more}
    engine = deepspeed.initialize(model=model, config=configuration, **more)[0]
    for seeding in (torch.manual_seed, numpy.random.seed, random.seed):
        seeding(100 * seed + dist.get_rank())
    engine.batches = deepspeed.utils.RepeatingLoader(engine.training_dataloader)
    return engine


def train(engine: Any, steps: int) -> list[dict[str, Any]]:
    """Take `steps` optimizer steps; returns what is seen after each."""
    seen = []
    for _ in range(steps):
        losses = []
        for _ in range(engine.gradient_accumulation_steps()):
            losses.append(backward(engine))
            engine.step()
        seen.append(stepped(engine, losses))
    return seen


def backward(engine: Any) -> float:
    """Forward and backward of the next micro-batch; returns its loss."""
    x, target = next(engine.batches)
    x = x.to(next(engine.module.parameters()).dtype)
    # Host random states matter, too.
    x = x + 0.01 * random.random() + 0.01 * numpy.random.rand()
    loss = (engine(x).float() - target).pow(2).mean()
    engine.backward(loss)
    return loss.item()


def stepped(engine: Any, losses: list[float]) -> dict[str, Any]:
    """What is seen after a step."""
    norm = float(engine.get_global_grad_norm())
    return {"losses": losses, "norm": norm, "lr": engine.get_lr(), **look(engine)}


def look(engine: Any) -> dict[str, Any]:
    """Everything that a resumed run must have in common with one that did not stop."""
    optimizer = engine.optimizer
    state = {f"module.{name}": value.clone() for name, value in engine.module.state_dict().items()}
    for index, tensor in enumerate(getattr(optimizer, "single_partition_of_fp32_groups", [])):
        state[f"master.{index}"] = tensor.detach().clone()
    for position, entry in enumerate(optimizer.state.values()):
        state.update(
            {
                f"state.{position}.{key}": torch.as_tensor(value).clone()
                for key, value in entry.items()
            }
        )
    host: Any = numpy.random.get_state()
    scaler = vars(optimizer.loss_scaler) if hasattr(optimizer, "loss_scaler") else {}
    return {
        **state,
        "scaler": dict(scaler),
        "counters": (
            engine.global_steps,
            engine.skipped_steps,
            engine.global_samples,
            engine.micro_steps,
        ),
        "schedule": engine.lr_scheduler.state_dict(),
        "random": (torch.get_rng_state(), random.getstate(), host[1].tolist(), host[2]),
        "data": engine.training_dataloader.state_dict(),
    }


def counts(engine: Any) -> set[float]:
    """How many steps the states of this rank's optimizer have counted."""
    return {float(own["step"]) for own in engine.optimizer.state.values() if "step" in own}


def whole(param: torch.Tensor) -> torch.Tensor:
    """A parameter's value on every rank, at any stage."""
    with deepspeed.zero.GatheredParameters([param]):
        return param.detach().clone()


def by_name(engine: Any) -> dict[str, Any]:
    """Weights, masters and moments of every trained parameter, whole, on every rank: what no
    division over ranks may change. At stage 0 in fp32 the weights are the masters.
    """
    params = dict(engine.module.named_parameters())
    if not params:
        return {}  # of a pipeline's stage
    with deepspeed.zero.GatheredParameters(list(params.values())):
        found: dict[str, Any] = {f"weight.{name}": p.detach().clone() for name, p in params.items()}
    trained = {name: param for name, param in params.items() if param.requires_grad}
    sharded = {name: param for name, param in trained.items() if hasattr(param, "_hp_mapping")}
    if sharded:
        # Of all of them at once: ranks wait for each other at every collective.
        masters = safe_get_full_fp32_params(list(sharded.values()))
        found |= {f"master.{name}": own.clone() for name, own in zip(sharded, masters, strict=True)}
        for key in MOMENTS:
            moments = safe_get_full_optimizer_states(list(sharded.values()), key)
            found |= {f"{key}.{name}": m.clone() for name, m in zip(sharded, moments, strict=True)}
    for name, param in trained.items():
        if name not in sharded:
            master = safe_get_full_fp32_param(param)
            found[f"master.{name}"] = None if master is None else master.clone()
            found |= {f"{key}.{name}": moment(engine, param, key) for key in MOMENTS}
    return found


def moment(engine: Any, param: nn.Parameter, key: str) -> torch.Tensor:
    """Optimizer state of a parameter, whole, whoever keeps it."""
    if hasattr(param, "_hp_mapping"):
        found = safe_get_full_optimizer_state(param, key)
        assert found is not None
        return found.clone()
    return engine.optimizer.state[param][key].clone()


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Where two nested values are not bit-equal."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
        return [] if same else [path]
    if type(left) is not type(right):
        return [f"{path}: {type(left).__name__} is not {type(right).__name__}"]
    if isinstance(left, dict):
        keys = [f"{path}.{key} is on one side only" for key in left.keys() ^ right.keys()]
        return keys + [
            found
            for key in left.keys() & right.keys()
            for found in differences(left[key], right[key], f"{path}.{key}")
        ]
    if isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return [f"{path}: {len(left)} is not {len(right)} long"]
        pairs = enumerate(zip(left, right, strict=True))
        return [found for index, (a, b) in pairs for found in differences(a, b, f"{path}[{index}]")]
    return (
        []
        if left == right or left != left and right != right
        else [f"{path}: {left!r} is not {right!r}"]
    )
