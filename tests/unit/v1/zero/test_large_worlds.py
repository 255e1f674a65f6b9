"""What one of thousands of ranks issues: large models without memory, a pretending group."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import deepspeed
from deepspeed.comm.watch.observation import add_observer, remove_observer
from deepspeed.runtime.gradients import sink
from deepspeed.runtime.gradients.reduction import ReductionSettings
from deepspeed.runtime.optimizers.settings import ShardSettings, StepSettings
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from unit.models import config_of
from unit.v1.zero.stage3.models import SHARDED

WORLDS = (8, 64, 512, 4096)


def shapes(blocks: int, width: int, hidden: int, key_value: int) -> list[tuple[int, ...]]:
    """Of the parameters of a Llama with 32,000 words."""
    block = [
        *[(width, width), (key_value, width), (key_value, width), (width, width)],
        *[(hidden, width), (hidden, width), (width, hidden), (width,), (width,)],
    ]
    return [(32000, width), *(shape for _ in range(blocks) for shape in block), (32000, width)]


MODELS = {"7B": shapes(32, 4096, 11008, 4096), "70B": shapes(80, 8192, 28672, 1024)}


class Issued:
    """Counts collectives, and carries none out: tensors have no memory."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        self.most_tensors = 0  # that one operation was given

    def run(self, call: Any, proceed: Any) -> Any:
        """Called for every operation."""
        self.names[call.name] += 1
        self.most_tensors = max(self.most_tensors, len(call.reads) + len(call.writes))
        for tensor in call.writes if call.name != "broadcast" else ():
            tensor.zero_()  # where there is memory: a step is taken only if it is finite
        return self if call.async_op else None

    def wait(self) -> None:
        """A handle's."""


@contextmanager
def world_of(size: int) -> Iterator[Issued]:
    """This process is rank 0 of so many."""
    torch_dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    issued = Issued()
    add_observer(issued)
    try:
        yield issued
    finally:
        remove_observer(issued)
        torch_dist.destroy_process_group()


def built(model: list[tuple[int, ...]], stage: int) -> DeepSpeedZeroOptimizer:
    params = [nn.Parameter(torch.empty(s, dtype=torch.bfloat16, device="meta")) for s in model]
    return DeepSpeedZeroOptimizer(
        torch.optim.SGD(params, lr=0.1),
        {param: str(index) for index, param in enumerate(params)},
        # Nothing has a value, so no norm can be looked at.
        StepSettings(check_grad_overflow=False),
        ShardSettings(),
        ReductionSettings(),
        partition_grads=stage == 2,
    )


def step(optimizer: DeepSpeedZeroOptimizer) -> None:
    """One micro-batch and one update."""
    for group in optimizer.groups:
        for param in group.params:
            param.grad = torch.empty_like(param)
    # Ranks agree on this in a first backward; there is nobody to agree with.
    optimizer.reduction.hooks.readiness.learned = True
    optimizer.backward_prologue()
    optimizer.reduce_gradients()
    optimizer.exit_backward()
    optimizer.step()


@pytest.fixture
def one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A billion elements have too many."""
    monkeypatch.setattr(sink, "HOST_CHUNK", 1 << 40)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("stage", [1, 2])
def test_as_many_collectives_as_buckets(name: str, stage: int, one_chunk: None) -> None:
    # Kills: a reduction or a gather per owner, or per piece; splits that are even for some models
    # and worlds only.
    counts = []
    for size in WORLDS if name == "7B" else WORLDS[::3]:
        with world_of(size) as issued:
            optimizer = built(MODELS[name], stage)
            issued.names.clear()
            step(optimizer)
            num_buckets = len(optimizer.plans)
            assert issued.names.pop("reduce_scatter_tensor") == num_buckets
            assert issued.names.pop("all_gather_into_tensor") == num_buckets
            assert not issued.names, issued.names
            counts.append(num_buckets)
            (group,) = optimizer.groups
            assert group.table.padded_numel < 1.001 * group.table.numel
            optimizer.destroy()
    # A bucket takes parameters up to 500M elements.
    total = sum(torch.Size(shape).numel() for shape in MODELS[name])
    assert len(set(counts)) == 1 and total / 5e8 <= counts[0] <= total / 5e8 * 1.2 + 1, counts


@contextmanager
def counted_events() -> Iterator[list[int]]:
    """How many functions are called, in Python and of the interpreter, and how many lines run: one
    for each round of a loop, and of a comprehension.
    """
    events = [0]

    def count(frame: Any, event: str, argument: Any) -> Any:
        events[0] += event in ("line", "c_call")
        return count

    sys.setprofile(count)
    sys.settrace(count)
    try:
        yield events
    finally:
        sys.settrace(None)
        sys.setprofile(None)


def events_at(stage: int, world: int, blocks: int) -> tuple[int, int, Counter[str]]:
    """Of building a model and its engine, and of a step; and the step's collectives."""
    zero = {"reduce_bucket_size": 300}
    if stage == 3:
        zero = {**SHARDED, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1000}
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    config = config_of(stage, 1, optimizer=sgd, zero_optimization=zero)
    with world_of(world) as issued:
        with counted_events() as building:
            with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
                layers = (nn.TransformerEncoderLayer(8, 2, 16, 0.0) for _ in range(blocks))
                model = nn.Sequential(*layers)
            engine, *_ = deepspeed.initialize(model=model, config=config)
        for _ in range(2):
            issued.names.clear()
            with counted_events() as stepping:
                engine.backward(engine(torch.ones(2, 1, 8)).square().mean())
                engine.step()
        counts = Counter(issued.names)
        assert issued.most_tensors <= 2
        assert engine.skipped_steps == 0 and engine.global_steps == 2
        engine.destroy()
    return building[0], stepping[0], counts


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_python_for_each_rank(stage: int) -> None:
    # Kills: a list, a view or a call for every rank, or every rank and parameter, when parameters
    # are cut, gathered or reduced; a gather or a reduction for each parameter.
    blocks = 3
    events_at(stage, 8, blocks)  # what is imported and cached at the first time
    building, stepping, counts = events_at(stage, 8, blocks)
    many_building, many_stepping, many_counts = events_at(stage, 4096, blocks)
    # Other parameters have padding.
    assert many_building <= 1.05 * building, (building, many_building)
    assert many_stepping <= 1.05 * stepping, (stepping, many_stepping)
    assert counts == many_counts
    if stage == 3:
        assert counts["all_gather_into_tensor"] <= 2 * blocks
        assert counts["reduce_scatter_tensor"] == blocks
    else:
        assert counts["all_gather_into_tensor"] == counts["reduce_scatter_tensor"] > blocks
