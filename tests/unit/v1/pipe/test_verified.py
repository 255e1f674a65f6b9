"""All guards are silent over pipelines that train right, on the host and on the simulated device;
what the ledger sees of them.

Every schedule, ZeRO stage, precision, tied and not, overlapped or not, on 2 and 4 ranks, is
compared with one process and watched, on the host by the ledger and the intent check, on the device
by the stream checker and once by all; so are experts and sequence parallelism. What each guard says
of a fault is in `unit.verify.faults`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm.watch import intent
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.gradients.ledger.gradient_ledger import GradientLedgerError
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.verify import ledger
from deepspeed.verify.ledgers import LedgerBook
from unit.common import DistributedTest
from unit.models import config_of, sgd
from unit.v1.contract.matrix import of_world
from unit.v1.gathering import from_all_ranks
from unit.v1.looping import each, each_pair
from unit.v1.moe.runner import Case as ExpertCase
from unit.v1.moe.runner import CaseRun as ExpertRun
from unit.v1.sequence.test_training import Run as SequenceRun
from unit.verify import planted_models
from unit.verify.guards import watched
from unit.verify.pipe_scenarios import CASES, INTENT, LEDGER, train

WIDTH = 6
ROWS = 4
MICRO_BATCHES = 3


@pytest.fixture(autouse=True)
def check_off() -> Iterator[None]:
    """Engines that asked for the intent check leave it on."""
    yield
    intent.disable()


class TestSilence(DistributedTest):
    world_size = [2, 4]
    exec_timeout = 200

    def test_on_the_host(self) -> None:
        # Kills: a ledger that takes a stage for the whole model, or a tied weight for one that is
        # counted twice; an intent check that holds up a schedule which is right.
        failures = [
            failure
            for case in of_world(CASES, dist.get_world_size())
            for failure in train(case, LEDGER | INTENT)
        ]
        assert not failures, "\n".join(failures)

    def test_on_the_device(self) -> None:
        # Kills: a message that is used before it has come or sent before it is computed, memory
        # used again while it is sent; and a checker that takes messages for races.
        # The last case's schedule, stages and overlap are others' too.
        *others, last = of_world(CASES[:-1], dist.get_world_size())
        for case in (*others, last):
            guards = LEDGER | INTENT if case is last else {}
            with watched() as found:
                failures = train(case, guards)
            assert not found and not failures, "\n".join([case.name, *found, *failures])


class TestExpertsOnTheDevice(DistributedTest):
    world_size = 4

    @each(case=[ExpertCase(2, 2, True, 2, "bf16"), ExpertCase(4, 1, False, 0, "fp32")])
    def test(self, case: ExpertCase) -> None:
        # Kills: tokens that are used before their exchange is over, or sent before they are gated;
        # a simulated collective that is over before its start is, because that waits for another's.
        with watched() as found:
            failures = ExpertRun(case).run()
        assert not found and not failures, "\n".join([*found, *failures])


class TestSequencesOnTheDevice(DistributedTest):
    world_size = 4

    @each(case=[((2, 2), "mesh", 2, "bf16", 2, "ours"), ((1, 4), "mpu", 0, "fp32", 1, "own mean")])
    def test(self, monkeypatch: pytest.MonkeyPatch, case: tuple[Any, ...]) -> None:
        # Kills: heads used before their exchange is over; a ledger that counts data ranks only.
        monkeypatch.setenv("DS_VERIFY", "ledger")
        with watched() as found:
            SequenceRun(*case).run(steps=1)
        assert not found, "\n".join(found)


class Experts(nn.Module):
    """A mixture of experts as a pipeline's layer, without its balancing loss."""

    def __init__(self) -> None:
        super().__init__()
        how = {"num_experts": 2, "ep_size": 2, "k": 1, "min_capacity": 1, "use_rts": False}
        self.moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), **how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(x)[0]


def start(layers: list[Any], stage: int, **keys: Any) -> PipelineEngine:
    torch.manual_seed(3)
    keys |= {"optimizer": sgd(0.1), "verify": LEDGER | INTENT}
    config = config_of(stage, ROWS, MICRO_BATCHES, **keys)
    how: dict[str, Any] = {"loss_fn": nn.MSELoss(), "partition_method": "uniform"}
    module = PipelineModule(layers, num_stages=2, **how)
    engine: PipelineEngine = deepspeed.initialize(model=module, config=config)[0]
    return engine


def data(engine: PipelineEngine) -> Iterator[Any]:
    seed = 10 * engine.global_steps + engine.grid.data_parallel_id
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(2, ROWS, WIDTH, generator=generator).unbind(0)


def two_steps(engine: PipelineEngine) -> LedgerBook:
    """What the ledger has seen of them."""
    with ledger(engine) as book:
        for _ in range(2):
            engine.train_batch(data(engine))
    assert book.steps == 2 and not book.findings
    return book


def linear(frozen: bool = False) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(not frozen)


class TestStages(DistributedTest):
    """Stages that own nothing to be trained, and what the ledger has counted."""

    world_size = 2

    @each_pair(stage=[0, 1], schedule=["1f1b", "zero_bubble"], bare=["first", "last", "functions"])
    def test_a_stage_without_trainable_parameters(
        self, stage: int, schedule: str, bare: str
    ) -> None:
        # Kills: a ledger that asks the first piece for its device; ranks that settle without those
        # that own nothing.
        trained: list[Any] = [linear(), linear()]
        idle = [torch.tanh, torch.sin] if bare == "functions" else [linear(True), linear(True)]
        layers = [*trained, *idle] if bare == "last" else [*idle, *trained]
        engine = start(layers, stage, pipeline={"schedule": schedule})
        assert not two_steps(engine).zero_gradients
        engine.destroy()

    def test_every_rank_raises_what_one_stage_found(self) -> None:
        # Kills: a verdict that stays on the stage; the others would wait for it at the norm.
        engine = start([linear(), linear()], 0)
        if dist.get_rank() == 1:
            original = engine._sequence.local_gradient
            last = engine.module.get_submodule("1").weight
            reduce = PipelineEngine._exec_reduce_grads

            def thrice(engine: PipelineEngine) -> None:
                original(last).mul_(3)
                reduce(engine)

            instructions = PipelineEngine._INSTRUCTION_MAP.items()
            engine._INSTRUCTION_MAP = {
                kind: thrice if run is reduce else run for kind, run in instructions
            }
        told = r"rank\(s\) \[1\]:\n.*arrives times 3.*1\.weight"
        with pytest.raises(GradientLedgerError, match=told):
            engine.train_batch(data(engine))


class TestFourRanks(DistributedTest):
    world_size = 4

    def test_pieces_of_a_tied_weight_agree(self) -> None:
        # Kills: fingerprints of other elements on each stage that shares a weight; stages that sum
        # other numbers of rows.
        tied = TiedLayerSpec("tied", nn.Linear, WIDTH, WIDTH, tied_weight_attr=["weight", "bias"])
        engine = start([tied, linear(), torch.tanh, tied], 1)
        weight = engine.module.tied_modules["tied"].weight
        pieces = engine._sequence.gradient_pieces(), engine._sequence.observer._pieces
        mine = [str([(p.start, p.numel) for p in some if p.param is weight]) for some in pieces]
        cut, common = map(set, zip(*from_all_ranks(mine), strict=True))
        assert len(cut) == 2, "the stages cut the weight alike: nothing is tested"
        assert len(common) == 1
        engine.train_batch(data(engine))

    @each(seed=range(6, 9))
    def test_copies_of_a_tied_weight_stay_equal(self, seed: int) -> None:
        # Kills: a fused kernel of the host, which rounds the end of a slice otherwise than its
        # middle; the copies are cut elsewhere on each stage (seen with seed 7).
        torch.manual_seed(seed)
        module, batch_of = planted_models.pipeline()
        config = {**config_of(1, ROWS, 2), "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
        engine, *_ = deepspeed.initialize(model=module, config=config)
        place = engine.parallel_map.data.rank
        for step in range(4):
            numbers = itertools.count()
            engine.train_batch(batch_of(100 * seed + step, number, place) for number in numbers)
        first, *others = from_all_ranks(module.tied_modules["in"].weight.detach().clone())
        assert all(torch.equal(first, other) for other in others)
        engine.destroy()

    @each(stage=[0, 1])
    def test_experts_within_a_stage(self, stage: int) -> None:
        # Kills: groups of experts that reach over stages; their contributions summed over the data
        # ranks.
        engine = start([linear(), Experts(), linear(), Experts()], stage)
        two_steps(engine)
        named = engine.module.named_parameters()
        names = {name for name, param in named if hasattr(param, "group_name")}
        assert len(names) == 2
        engine.destroy()
