"""What is frozen later goes on from a checkpoint as if nobody had stopped: saved while it is frozen
or after it is trained again, on other ranks, at other stages, in every form of files.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from unit.common import DistributedFixture, DistributedTest
from unit.models import config_of, drawn
from unit.v1.checkpoint.runs import ACCUMULATE, TAG, UNIVERSAL, convert, on_rank_0
from unit.v1.silent.changes import OPTIMIZERS, ROWS, TOLERANCE, WIDTH, Net, full_master, set_frozen

WORLDS = (1, 2, 4)
BATCHES = 4  # of one step, in every world
# How many steps have been taken when each checkpoint is saved; training goes on from there.
SAVED_AFTER = {"frozen": 5, "trained again": 8}
MORE_STEPS = 3
FILES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
    "host": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    },
    "elastic": {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}},
    "accumulate": {**ACCUMULATE, "zero_optimization": {"stage": 1}},  # BF16_Optimizer
}


class Row(NamedTuple):
    """A checkpoint, saved in files of one kind by so many ranks, that others load into another."""

    saved: str
    optimizer: str
    by: int
    when: str
    into: str
    ranks: int
    universal: bool

    def folder(self, root: Any) -> Path:
        return Path(root, f"{self.saved} {self.optimizer} {self.when}")


def _rows() -> list[Row]:
    """Files of each kind into each kind; what else differs goes around."""
    rows = []
    for at, saved in enumerate(FILES):
        for to, into in enumerate(FILES):
            if saved != into and "accumulate" in (saved, into):
                continue  # its numbers are others'
            number = at + to + len(FILES) * at
            which = (at + to) % 2
            first = saved, [*OPTIMIZERS][which], WORLDS[(at + which) % 3]
            when = [*SAVED_AFTER][to // 2 % 2]
            rows.append(Row(*first, when, into, WORLDS[number % 3], to % 3 == 0))
    return rows


TABLE = _rows()


def loss_of(model: Any, step: int, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(drawn(100 * step + number, ROWS, WIDTH))
    return loss


def reference(kind: str, steps: int) -> list[dict[str, torch.Tensor]]:
    """What plain torch's parameters are at first and after each step."""
    model = Net()
    optimizer = OPTIMIZERS[kind][1](model.parameters())
    seen = [clones(model)]
    for step in range(steps):
        set_frozen(model, step)
        optimizer.zero_grad()
        for number in range(BATCHES):
            (loss_of(model, step, number) / BATCHES).backward()
        optimizer.step()
        seen.append(clones(model))
    return seen


def clones(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def engine_of(files: str, kind: str, seed: int = 0, **more: Any) -> Any:
    keys = dict(FILES[files])
    zero = keys.pop("zero_optimization")
    if zero["stage"] == 3:
        zero = {**zero, "stage3_param_persistence_threshold": 0}
    accumulation = BATCHES // dist.get_world_size()
    config = config_of(zero["stage"], ROWS, accumulation, zero_optimization=zero)
    model = Net(seed)
    config = {**config, **keys, "optimizer": OPTIMIZERS[kind][0], **more}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine: Any, first: int, last: int) -> None:
    world = dist.get_world_size()
    for step in range(first, last):
        set_frozen(engine.module, step)
        for micro in range(BATCHES // world):
            engine.backward(loss_of(engine, step, micro * world + dist.get_rank()))
            engine.step()


class SavedFolders(DistributedFixture):
    """The checkpoints of the table, each beside its universal form."""

    world_size = [*WORLDS]

    def run(self, class_tmpdir: Any) -> None:
        own = [row for row in TABLE if row.by == dist.get_world_size()]
        for files, optimizer in dict.fromkeys((row.saved, row.optimizer) for row in own):
            engine, done = engine_of(files, optimizer), 0
            for when, steps in SAVED_AFTER.items():
                train(engine, done, steps)
                done = steps
                rows = [row for row in own if row[:2] == (files, optimizer) and row.when == when]
                for folder in {row.folder(class_tmpdir) for row in rows}:
                    engine.save_checkpoint(folder)
                    on_rank_0(partial(convert, folder))
            engine.destroy()


class TestGoesOn(DistributedTest):
    """Kills: counts or moments that are lost or taken for others', a parameter that is filed as
    untrained because it is frozen, state of zeros for what has taken no step.
    """

    world_size = [*WORLDS]

    def test_as_if_nobody_had_stopped(self, SavedFolders: Any, class_tmpdir: Any) -> None:
        for row in TABLE:
            if row.ranks == dist.get_world_size():
                try:
                    check(class_tmpdir, row)
                except Exception as error:
                    raise AssertionError(f"{row}: {type(error).__name__}: {error}") from error


def check(root: Any, row: Row) -> None:
    engine = engine_of(row.into, row.optimizer, seed=5, **(UNIVERSAL if row.universal else {}))
    engine.load_checkpoint(row.folder(root), tag=TAG if row.universal else None)
    first = SAVED_AFTER[row.when]
    tolerance = TOLERANCE["bf16" if row.into == "accumulate" else "fp32"]
    wanted = reference(row.optimizer, first + MORE_STEPS)
    for steps in range(first, first + MORE_STEPS + 1):
        train(engine, max(first, steps - 1), steps)
        for name, value in wanted[steps].items():
            error = (full_master(engine.module, name) - value).abs().max().item()
            assert error <= tolerance, f"{name} is off by {error:.1e} after {steps - first} steps"
    engine.destroy()
