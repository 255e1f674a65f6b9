"""What scripts change while they train, in any configuration, beside one process in plain torch.

A run takes `SPAN` steps, the change, `SPAN` steps while it lasts, and as many after it; then the
masters are those of plain torch. A change that cannot be honoured raises by name.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from unit.models import config_of, drawn
from unit.one_process import of_all_ranks, own_loss

ROWS, WIDTH, SPAN = 4, 6, 3
# A change that is lost moves a weight by 2e-2 at least; 16 bits differ from fp32 by less than this.
TOLERANCE = {"fp32": 3e-6, "bf16": 8e-3, "fp16": 2e-3}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "momentum": (
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    ),
    "adamw": (
        {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.5, "eps": 1e-3}},
        lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.5, eps=1e-3),
    ),
}


class Net(nn.Module):
    """Three layers, of which `b` is changed; shards of two ranks cut inside parameters."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.o = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, batch: torch.Tensor, uses_b: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.a(batch.to(self.a.weight.dtype)))
        if uses_b:
            hidden = torch.tanh(self.b(hidden))
        return self.o(hidden).float().square().mean()


def set_frozen(model: nn.Module, step: int) -> list[str]:
    """Freeze `b` for three steps, and `a.bias` until `b` is trained again; what is frozen now."""
    first = {"b.weight": 3, "b.bias": 3, "a.bias": 0}
    frozen = [name for name, begin in first.items() if begin <= step < 6]
    for name, param in model.named_parameters():
        param.requires_grad_(name not in frozen)
    return frozen


def full_master(model: nn.Module, name: str) -> torch.Tensor:
    """A copy of a parameter's master, or of itself where it is its own."""
    param = dict(model.named_parameters())[name]
    value = safe_get_full_fp32_param(param)
    return (param.detach() if value is None else value).float().clone()


@dataclass(frozen=True)
class Case:
    change: str
    stage: int
    precision: str
    accumulation: int
    offload: bool
    optimizer: str

    @property
    def is_sharded(self) -> bool:
        return self.stage > 0


FACTORS: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "precision": tuple(TOLERANCE),
    "accumulation": (1, 2),
    "offload": (False, True),
    "optimizer": tuple(OPTIMIZERS),
}


def config_for(case: Case, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = dict(more.pop("zero_optimization", {}))
    if case.offload and case.stage:
        zero["offload_optimizer"] = {"device": "cpu"}
    if case.stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    config = config_of(case.stage, ROWS, case.accumulation, case.precision, zero_optimization=zero)
    if case.precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 64.0}
    return {**config, "optimizer": OPTIMIZERS[case.optimizer][0], **more}


@dataclass
class Run:
    """An engine and plain torch, trained alike."""

    case: Case
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model, self.reference = Net(), Net()
        self.start()
        self.optimizer = OPTIMIZERS[self.case.optimizer][1](self.reference.parameters())
        self.steps = 0
        self.uses_b = [True, True]  # of micro-batches

    def start(self) -> None:
        config = config_for(self.case, **self.more)
        self.engine, *_ = deepspeed.initialize(
            model=self.model, model_parameters=self.model.parameters(), config=config
        )

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.model, self.reference

    def backward(self) -> None:
        """Leave the gradients of one step's micro-batches, in both."""
        accumulation = self.case.accumulation
        batch_of = lambda number, rank: drawn(100 * number + rank, ROWS, WIDTH)  # noqa: E731
        self.optimizer.zero_grad()
        own, world = dist.get_rank(), dist.get_world_size()
        batches = of_all_ranks(batch_of, self.steps, accumulation)
        for micro in range(accumulation):
            self.on_micro_batch(micro)
            uses_b = self.uses_b[micro]
            for batch in batches[micro * world : (micro + 1) * world]:
                (self.reference(batch, uses_b) / len(batches)).backward()
            self.engine.backward(self.engine(batches[micro * world + own], uses_b))
            if micro < accumulation - 1:
                self.engine.step()

    def on_micro_batch(self, micro: int) -> None:
        """Change something before a micro-batch; replaced by changes that do."""

    def step(self) -> None:
        self.optimizer.step()
        self.engine.step()
        self.steps += 1

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.step()

    def master(self, name: str) -> torch.Tensor:
        return full_master(self.model, name)

    def moment(self, name: str) -> torch.Tensor:
        key = "momentum_buffer" if self.case.optimizer == "momentum" else "exp_avg"
        param = dict(self.model.named_parameters())[name]
        value = safe_get_full_optimizer_state(param, key)
        return self.engine.optimizer.state[param][key].clone() if value is None else value

    def check(self) -> None:
        """The masters are plain torch's parameters."""
        wanted = dict(self.reference.named_parameters())
        for name in wanted:
            error = (self.master(name) - wanted[name].detach()).abs().max().item()
            assert error <= TOLERANCE[self.case.precision], f"{name} is off by {error:.1e}"


def refused(case: Case, words: str, what: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match=words):
        what()


# Freezing


def frozen_later(run: Run) -> None:
    """Freeze `b` for some steps, as gradual unfreezing and phases of GANs do, then train it."""
    run.train(SPAN)
    for model in run.both:
        model.b.requires_grad_(False)
    before = run.master("b.weight"), run.moment("b.weight")
    run.train(SPAN)
    assert torch.equal(run.master("b.weight"), before[0]), "the frozen master moved"
    assert torch.equal(run.moment("b.weight"), before[1]), "the frozen moment moved"
    for model in run.both:
        model.b.requires_grad_(True)
    run.train(SPAN)


def frozen_first(run: Run) -> None:
    """Freeze `b` before the first step: its moments and count of steps begin late."""
    for model in run.both:
        model.b.requires_grad_(False)
    run.train(SPAN)
    for model in run.both:
        model.b.requires_grad_(True)
    run.train(2 * SPAN)


def frozen_in_turns(run: Run) -> None:
    """Train `a` and `b` in turns."""
    for step in range(3 * SPAN):
        for model in run.both:
            model.a.requires_grad_(step % 2 == 0)
            model.b.requires_grad_(step % 3 != 0)
        run.train(1)


def frozen_within_a_step(run: Run) -> None:
    """Freeze `b` after the first micro-batch: the gradient of that counts."""

    def freeze(micro: int) -> None:
        for model in run.both:
            model.b.requires_grad_(micro == 0)

    run.train(SPAN)
    run.on_micro_batch = freeze  # type: ignore[method-assign]  # for this run
    run.train(SPAN)


def unused_skipped(run: Run) -> None:
    """Leave `b` out of some steps' losses, with `skip_unused_parameters`."""
    for step in range(3 * SPAN):
        run.uses_b = [step % 3 != 1] * 2
        run.train(1)


# Writes and moved memory


def _layer_b(run: Run) -> dict[str, torch.Tensor]:
    return {name: value for name, value in Net(9).state_dict().items() if name.startswith("b.")}


def _written(run: Run, write: Callable[[nn.Module], object]) -> None:
    run.train(SPAN)
    write(run.reference)
    if run.case.stage == 3:
        refused(run.case, "shard|^load_state_dict: b.weight", lambda: write(run.model))
        return
    write(run.model)
    run.train(SPAN)
    run.check()
    run.train(SPAN)


def loaded(run: Run) -> None:
    """Load a pretrained part into the model."""
    _written(run, lambda model: model.load_state_dict(_layer_b(run), strict=False))


def copied(run: Run) -> None:
    """Write under `no_grad`, as re-initializing a head does."""

    def write(model: nn.Module) -> None:
        with torch.no_grad():
            model.b.weight.copy_(_layer_b(run)["b.weight"])

    _written(run, write)


def assigned(run: Run) -> None:
    """Give a parameter another tensor's memory."""

    def write(model: nn.Module) -> None:
        model.b.weight.data = _layer_b(run)["b.weight"].to(model.b.weight.dtype)

    _written(run, write)


def scaled_uncounted(run: Run) -> None:
    """Write by way of `.data`, as merging an adapter does, which torch does not count."""
    _written(run, lambda model: model.b.weight.data.mul_(0.5))


def moved_back(run: Run) -> None:
    """Give every parameter memory of its own, as a way to another device and back does."""
    run.train(SPAN)
    for param in run.model.parameters():
        param.data = param.data.clone()
    run.train(SPAN)


def converted(run: Run) -> None:
    """Convert the model to a dtype that the engine does not train."""
    run.train(SPAN)
    own = DTYPES[run.case.precision]
    other = torch.float16 if own != torch.float16 else torch.bfloat16
    if run.case.stage == 3:
        refused(run.case, "cannot become torch", lambda: run.model.to(other))
        return
    run.model.to(other)
    batch = drawn(7, ROWS, WIDTH)
    loss = own_loss(run.engine, batch)
    refused(run.case, f"a.weight is {other}.*offload_states", lambda: run.engine.backward(loss))


# Gradients


def _edited(run: Run, edit: Callable[[nn.Parameter], object]) -> None:
    run.train(SPAN)
    for _ in range(SPAN):
        run.backward()
        edit(run.reference.o.weight)
        edit(run.model.o.weight)
        if run.case.is_sharded:
            refused(run.case, "o.weight was assigned.*safe_set_full_grad", run.engine.step)
            run.engine.destroy()
            raise Refused
        run.step()


class Refused(Exception):
    """The change was refused as it should be, and the run is over."""


def gradient_assigned(run: Run) -> None:
    """Put another tensor in the place of a gradient: it counts where it lies in `param.grad`."""

    def edit(param: nn.Parameter) -> None:
        is_there = param.grad is not None
        param.grad = param.grad * 0.5 if is_there else torch.ones(param.shape, dtype=param.dtype)

    _edited(run, edit)


def gradient_dropped(run: Run) -> None:
    """Set a gradient to None: the step leaves the parameter as it is."""
    if run.case.is_sharded:
        raise Refused  # it is None there
    _edited(run, lambda param: setattr(param, "grad", None))


CHANGES: dict[str, Callable[[Run], None]] = {
    change.__name__: change
    for change in (
        *(frozen_later, frozen_first, frozen_in_turns, frozen_within_a_step, unused_skipped),
        *(loaded, copied, assigned, scaled_uncounted, moved_back, converted),
        *(gradient_assigned, gradient_dropped),
    )
}
MORE: dict[str, dict[str, Any]] = {
    "unused_skipped": {"zero_optimization": {"skip_unused_parameters": True}}
}


def product() -> list[Case]:
    """Every change in every configuration."""
    rows = itertools.product(CHANGES, *FACTORS.values())
    return [Case(*row) for row in rows]


def run_case(case: Case) -> None:
    run = Run(case, MORE.get(case.change, {}))
    try:
        CHANGES[case.change](run)
    except Refused:
        return
    if case.stage < 3 or case.change not in ("loaded", "copied", "assigned", "scaled_uncounted"):
        if case.change != "converted":
            run.check()
    run.engine.destroy()
