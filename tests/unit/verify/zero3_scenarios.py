"""Short trainings at stage 3 with one guard switched on, by name; see `scenarios`, which lists them
with its own.

The model has many small units of one size, so that memory goes from each to the next but one, and
does what users do: two streams, a parameter read outside its own module and held over that module's
run, frozen parameters and two optimizer groups in one unit, two forwards for a backward, a forward
whose backward never comes between backward and step, an evaluation that changes a weight, weights
that a script edits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from unit.models import drawn, seeded
from unit.one_process import OneProcess
from unit.v1.zero.stage3.models import SHARDED, Block, config_of, engine_of, make_net, tokens_of
from unit.v1.zero.stage3.models import loss_of as token_loss
from unit.verify.guards import raised, simulated, watched

STEPS = 2
WIDTH = 5
LR = 0.2
DECAY = 0.1
EDITED = "blocks.0.up.weight"
SHRUNK = "blocks.3.up.weight"
CLOSE = 1e-5
Tensors = dict[str, torch.Tensor]


class Forked(nn.Module):
    """Two branches, each on a stream of its own where there are streams."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(4)])
        for block in self.blocks:
            block.down.bias.requires_grad_(False)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.outlet = nn.Linear(WIDTH, WIDTH, bias=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.shrinks = False  # whether an evaluation changes a weight that it uses later

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, WIDTH]` -> the loss of each row."""
        x = self.inlet(x)
        # One reader of `x` there: gradients of several streams are not summed as on a device.
        copied = x.clone()
        beside, wait_for_main, wait_for_side = _fork()
        wait_for_main()
        weight = self.gate.weight  # gathered after the side stream has waited
        with beside():
            left = self.blocks[0](copied).tanh() + self.gate(copied)
        right = x
        for block in self.blocks[1:]:
            right = block(right)
            if self.shrinks and block is self.blocks[2]:
                self._shrink()
        wait_for_side()
        with torch.no_grad():
            shift = x @ weight
        out: torch.Tensor = self.outlet(left * right) + shift
        wait_for_main()  # what the side stream has made goes back to it
        return out.square().mean(1)

    def _shrink(self) -> None:
        """The last block's weight, as codebooks are updated: it may have been gathered ahead."""
        weight = dict(self.named_parameters())[SHRUNK]  # reading the attribute would gather it
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
            weight.data.mul_(0.5)


_sides: dict[Any, Any] = {}


def _fork() -> tuple[Callable[[], AbstractContextManager[Any]], Callable[[], None], Any]:
    """A context on a side stream, and the two waits; nothing where there are no streams."""
    accelerator = get_accelerator()
    if accelerator.current_stream() is None:
        return nullcontext, lambda: None, lambda: None
    main = accelerator.current_stream()
    side = _sides.setdefault(accelerator, accelerator.Stream())
    return (
        lambda: accelerator.stream(side),
        lambda: side.wait_stream(main),
        lambda: main.wait_stream(side),
    )


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """With and without weight decay, as transformers does: both in every unit."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": DECAY},
        {"params": [param for param in trained if param.dim() == 1]},
    ]


def batch(index: int, rank: int) -> torch.Tensor:
    """`[4, WIDTH]`: other data on each rank."""
    return drawn(100 * index + rank, 4, WIDTH)


def loss_of(model: Any, index: int, rank: int) -> torch.Tensor:
    """Of two forwards."""
    first, second = (model(batch(2 * index + half, rank)).mean() for half in range(2))
    return first + 2 * second


def edit(step: int, value: torch.Tensor) -> None:
    """What a script does to a weight."""
    value.mul_(1.25 + 0.25 * step)


def evaluation(model: Any, forked: Forked) -> torch.Tensor:
    """What the model says while it changes a weight."""
    forked.shrinks = True
    with torch.no_grad():
        losses: torch.Tensor = model(batch(0, 0))
    forked.shrinks = False
    return losses.clone()


def reference(world: int) -> Iterator[Tensors]:
    """One process that sees the batches of all ranks, after each step; see `trained`."""
    model = seeded(Forked)
    optimizer = torch.optim.SGD(groups_of(model), lr=LR)
    process = OneProcess(model, optimizer, lambda model, place: loss_of(model, *place))
    for step in range(STEPS):
        process.step((step, rank) for rank in range(world))
        with torch.no_grad():
            edit(step, dict(model.named_parameters())[EDITED])
        shown = process.params()
        padding = {f"padding of {name}": torch.zeros(()) for name in shown}
        losses = evaluation(model, model)
        yield {**shown, **padding, "evaluation": losses, "norm": process.norm}


def trained(steps: int, zero: dict[str, Any], verify: dict[str, Any]) -> Iterator[Tensors]:
    """After each step at stage 3: the norm, parameters as scripts see them, whether there is
    anything in the padding of shards, and what an evaluation says.
    """
    model = seeded(Forked)
    optimizer = torch.optim.SGD(groups_of(model), lr=LR)
    config = config_of(3, 1, **zero) | {"verify": verify}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    params: dict[str, Any] = dict(model.named_parameters())
    for step in range(steps):
        engine.backward(loss_of(engine, step, dist.get_rank()))
        engine(batch(0, 0))
        engine.step()
        norm = torch.as_tensor(engine.get_global_grad_norm())
        with deepspeed.zero.GatheredParameters(params[EDITED], modifier_rank=1):
            if dist.get_rank() == 1:
                edit(step, params[EDITED].data)
        with deepspeed.zero.GatheredParameters(params.values()):
            shown = {name: param.detach().clone() for name, param in params.items()}
        padding = {f"padding of {name}": _padding_of(param) for name, param in params.items()}
        losses = evaluation(engine.eval(), model)
        engine.train()
        yield {**shown, **padding, "evaluation": losses, "norm": norm}
    engine.destroy()


def _padding_of(param: Any) -> torch.Tensor:
    cut = param.ds_tensor.numel()
    rank = dist.get_rank(group=param.ds_process_group)
    own = min(max(param.ds_numel - rank * cut, 0), cut)
    return torch.as_tensor(param.ds_tensor[own:].abs().sum())


def checker(zero: dict[str, Any]) -> list[str]:
    """What the stream checker finds on the simulated device."""
    with watched(in_pieces=False) as found:
        deepspeed.init_distributed(dist_backend="gloo")
        failed = None
        try:
            list(trained(1, zero, {}))
        except RuntimeError as error:
            failed = error
    if failed is not None and not found:  # otherwise it is what a race leads to
        raise failed
    return found


class _StoppedError(Exception):
    pass


def _stop(module: Any, args: Any) -> None:
    raise _StoppedError


def with_evaluations(zero: dict[str, Any]) -> list[str]:
    """The same, where each step comes while an evaluation is under way that ended early, so that
    what was loaded ahead is still on its way. On one rank: waiting for a collective of gloo's holds
    the host up, and so hides waits that are missing.
    """
    deepspeed.init_distributed(dist_backend="gloo")
    with watched(in_pieces=False) as found:
        model = make_net(depth=3)
        engine = engine_of(model, config_of(3, 1, **zero))
        for step in range(STEPS):
            engine.backward(token_loss(engine, tokens_of(step, 0)))
            with torch.no_grad():
                engine(tokens_of(9, 0))
                handle = model.blocks[1].register_forward_pre_hook(_stop)
                with suppress(_StoppedError):
                    engine(tokens_of(9, 0))
                handle.remove()
            engine.step()
        engine.destroy()
    return found


def oracle(zero: dict[str, Any], on_device: bool = False) -> list[str]:
    """Which parameters differ from one process's, and after which step; or what was raised."""
    wanted = list(reference(int(os.environ["WORLD_SIZE"])))
    with simulated(in_pieces=False) if on_device else nullcontext():
        deepspeed.init_distributed(dist_backend="gloo")
        try:
            steps = enumerate(zip(trained(STEPS, zero, {}), wanted, strict=True))
            for step, (found, right) in steps:
                off = [
                    f"{name} by {float((found[name] - right[name]).abs().max()):.2g}"
                    for name in right
                    if not torch.allclose(found[name], right[name], rtol=0.0, atol=CLOSE)
                ]
                if off:
                    return [f"stage 3: after step {step} are off: {', '.join(off)}"]
        except (RuntimeError, AssertionError) as error:
            return [f"stage 3: {error}"]
    return []


def guarded(check: str, zero: dict[str, Any]) -> list[str]:
    """What a check of the configuration raises."""
    deepspeed.init_distributed(dist_backend="gloo")
    return raised(check, lambda: list(trained(STEPS, zero, {check: True})))


_BOUNDED = {**SHARDED, "stage3_max_reuse_distance": 0}
_ON_HOST = {**_BOUNDED, "offload_param": {"device": "cpu"}}
_ALL_ON_HOST = {**_ON_HOST, "offload_optimizer": {"device": "cpu"}}
_PERSISTENT = {**SHARDED, "stage3_param_persistence_threshold": 20, "overlap_comm": False}
_MASTERS = "masters on the device"

SCENARIOS: dict[str, Callable[[], list[str]]] = {
    "streams: stage 3": partial(checker, _BOUNDED),
    "streams: stage 3, some persist": partial(checker, _PERSISTENT),
    "streams: stage 3, on the host, 1 rank": partial(with_evaluations, _ALL_ON_HOST),
    f"streams: stage 3, on the host, {_MASTERS}, 1 rank": partial(with_evaluations, _ON_HOST),
    "oracle: stage 3": partial(oracle, _BOUNDED),
    "oracle: stage 3, kept": partial(oracle, SHARDED),
    "oracle: stage 3, all persist": partial(oracle, {}),
    "oracle: stage 3 on the device": partial(oracle, _BOUNDED, True),
    "ledger: stage 3": partial(guarded, "ledger", _BOUNDED),
}
