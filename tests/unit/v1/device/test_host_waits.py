"""How often the host waits for the device in a training step: at most once, for whether it was
skipped, when the update is queued; never in a micro-batch. How many operators the device gets for
what the host could do piece by piece.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.host_waits import HostWaits
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.moe.gating import top1gating, top2gating, topkgating
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.gradients import local_accumulator
from deepspeed.runtime.gradients.local_accumulator import LocalAccumulator
from deepspeed.sequence.exchange import Cut, _pack
from deepspeed.sequence.layer import DistributedAttention, shares
from deepspeed.verify import check_streams
from unit.common import DistributedTest
from unit.models import config_of, drawn, linears, seeded
from unit.one_process import mean_square, placed
from unit.v1.looping import each

WIDTH, ROWS, ACCUMULATION = 16, 4, 2
# Buckets are agreed on in the first backward, and buffers made in the first step.
WARM_UP = 2
STEPS = 4
BAD_STEP = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration, and how often the host may wait per step; `ahead`: the update is queued
    then.
    """

    stage: int
    precision: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    optimizer: str = "AdamW"
    waits: int = 1
    ahead: bool = True
    scheduled: bool = False
    clip: float = 0.05

    @property
    def skips(self) -> bool:
        return ("check_grad_overflow", False) not in self.settings

    def config(self) -> dict[str, Any]:
        more: dict[str, Any] = {"gradient_clipping": self.clip}
        if self.precision is not None:
            more[self.precision] = {"enabled": True, **dict(self.settings)}
        if self.scheduled:
            more["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
        more["optimizer"] = {"type": self.optimizer, "params": {"lr": 1e-2}}
        zero = {"reduce_bucket_size": 2 * WIDTH * WIDTH}
        return config_of(self.stage, ROWS, ACCUMULATION, zero_optimization=zero, **more)

    def engine(self) -> Any:
        return deepspeed.initialize(model=linears(4, WIDTH, seed=5), config=self.config())[0]


UNCHECKED = (("check_grad_overflow", False),)
CHECKED = (("check_grad_overflow", True),)
CASES = [
    Case(0),
    Case(0, "fp16"),
    Case(0, "bf16", UNCHECKED, waits=0),
    Case(1, "bf16", CHECKED, scheduled=True),
    Case(1, "bf16", UNCHECKED, waits=0),
    Case(2, optimizer="Lion"),
    Case(2, "fp16", scheduled=True),
    Case(2, "fp16", (("loss_scale", 8.0),), clip=0.0),
    Case(2, "bf16", UNCHECKED, waits=0, scheduled=True),
    # Optimizers that cannot skip: the host decides, if there is anything to decide.
    Case(2, "bf16", UNCHECKED, "SGD", waits=0),
    Case(1, "bf16", CHECKED, "SGD", ahead=False),
]


def batch(number: int) -> torch.Tensor:
    return drawn(100 * number + dist.get_rank(), ROWS, WIDTH)


def batches(steps: int) -> Iterator[list[torch.Tensor]]:
    for step in range(steps):
        yield [batch(ACCUMULATION * step + micro) for micro in range(ACCUMULATION)]


def waited(waits: HostWaits) -> int:
    """Count waits so far. The throughput timer reads spans that are over by then."""
    return waits.total - sum(waits.inside("deepspeed/utils/timer.py").values())


def waited_before(optimizer: torch.optim.Optimizer, waits: HostWaits) -> list[int]:
    """How often the host had waited when each update was queued."""
    before: list[int] = []
    optimizer.register_step_post_hook(lambda *_: before.append(waited(waits)))
    return before


def train(case: Case, bad_step: int | None = None) -> dict[str, Any]:
    """Numbers of a run on whatever device there is; on rank 1, one step's input is infinite."""
    engine = case.engine()
    seen: dict[str, Any] = {"norms": [], "scales": [], "applied": [], "rates": []}
    for step, micro_batches in enumerate(batches(STEPS)):
        for x in micro_batches:
            if step == bad_step and dist.get_rank() == 1:
                x = x * float("inf")
            engine.backward(mean_square(engine, placed(engine, x)))
            engine.step()
        seen["applied"].append(engine.was_step_applied())
        seen["norms"].append(float(engine.get_global_grad_norm()))
        seen["scales"].append(engine._sequence.loss_scale)
        seen["rates"].append(engine.get_lr()[0])
    seen["counters"] = (engine.global_steps, engine.skipped_steps)
    seen["weights"] = [param.detach().float().clone() for param in engine.module.parameters()]
    engine.destroy()
    return seen


class TestWaits(DistributedTest):
    world_size = 2

    @each(case=CASES)
    def test_of_a_step(self, case: Case) -> None:
        # Kills: reading the norm before the update, and reading what nobody asks for.
        with simulate():
            engine = case.engine()
            with get_accelerator().count_host_waits() as waits:
                queued = waited_before(engine.basic_optimizer, waits)
                for step, micro_batches in enumerate(batches(STEPS)):
                    inputs = [placed(engine, x) for x in micro_batches]
                    before, copies = waited(waits), waits.pageable_copies.total()
                    for x in inputs:
                        engine.backward(mean_square(engine, x))
                        if step >= WARM_UP:
                            assert waited(waits) == before, waits.by_place
                        engine.step()
                    found = dict(waits.by_place)
                    if step >= WARM_UP:
                        assert waited(waits) - before == case.waits, found
                        ahead = queued[-1] == before
                        assert ahead is (case.ahead or not case.waits), found
                        assert waits.pageable_copies.total() == copies, waits.pageable_copies
            engine.destroy()

    @each(case=CASES)
    def test_training_is_that_of_a_host_that_knows(self, case: Case) -> None:
        # Kills: a factor, a skip or a scale that is another one on the device.
        bad_step = BAD_STEP if case.skips else None
        with simulate(), check_streams():
            there = train(case, bad_step)
        here = train(case, bad_step)
        assert there["applied"] == here["applied"]
        assert here["applied"] == [step != bad_step for step in range(STEPS)]
        assert there["counters"] == here["counters"] == (STEPS, int(bad_step is not None))
        assert there["scales"] == here["scales"] and there["rates"] == here["rates"]
        # Scaled gradients differ in their last bit, rounded weights therefore here and there.
        bound = {"bf16": 2e-2, "fp16": 2e-3}.get(case.precision or "", 1e-5)
        assert there["norms"] == pytest.approx(here["norms"], rel=bound, nan_ok=True)
        for a, b in zip(there["weights"], here["weights"], strict=True):
            assert (a - b).norm() <= bound * b.norm()

    def test_a_skip_is_counted_although_nobody_asked_meanwhile(self) -> None:
        # Kills: the norm of the next step, read for that of the one which was skipped.
        with simulate():
            engine = Case(1).engine()
            for step, micro_batches in enumerate(batches(STEPS)):
                for x in micro_batches:
                    bad = step == STEPS - 1 and dist.get_rank() == 0
                    engine.backward(mean_square(engine, x * float("inf") if bad else x))
                    engine.step()
            assert engine.skipped_steps == 1 and not engine.was_step_applied()
            engine.destroy()

    def test_a_state_that_is_saved_knows_the_last_step(self) -> None:
        # Kills: saving the counters and the scale from before a step that was skipped.
        config = Case(2).config()
        # Of several buckets ranks would exchange their shards, and wait for each other.
        config["zero_optimization"]["reduce_bucket_size"] = 1 << 20
        with simulate():
            engine = deepspeed.initialize(model=linears(4, WIDTH), config=config)[0]
            for x in next(batches(1)):
                engine.backward(mean_square(engine, x * float("inf")))
                engine.step()
            with get_accelerator().count_host_waits() as waits:
                assert engine.optimizer.state_dict()["overflow"]
                assert engine.skipped_steps == 1
                assert waited(waits) == 1, waits.by_place
            engine.destroy()
        assert engine.skipped_steps == 1 and not engine.was_step_applied()


class TestPipelineWaits(DistributedTest):
    world_size = 2

    @each(zero_stage=(0, 1), unchecked=(False, True))
    def test_of_a_batch(self, zero_stage: int, unchecked: bool) -> None:
        # Kills: a copy of the inputs, a loss or a norm that a stage waits for.
        case = Case(zero_stage, "bf16", UNCHECKED if unchecked else CHECKED)
        with simulate():
            layers = list(linears(4, WIDTH, seed=5))
            model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
            engine = deepspeed.initialize(model=model, config=case.config())[0]
            data = iter([(batch(i).bfloat16(), batch(i).bfloat16()) for i in range(20)])
            with get_accelerator().count_host_waits() as waits:
                queued = waited_before(engine.basic_optimizer, waits)
                for step in range(STEPS):
                    before = waited(waits)
                    engine.train_batch(data)
                    if step >= WARM_UP:
                        assert queued[-1] == before, waits.by_place
                        assert waited(waits) - before == (not unchecked), waits.by_place
            engine.destroy()


class Operators(TorchDispatchMode):
    """Operators by name; `slow` are scans over other elements, and grouped ones of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.slow: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.count[name] += 1
        if name == "aten::cumsum" and args[0].stride(args[1]) != 1:
            self.slow.append(name)
        if name.startswith("aten::_foreach_add") and len(args[0]) > 1:
            self.slow += [name] * (args[0][0].dtype != args[1][0].dtype)
        return func(*args, **(kwargs or {}))


Gate = Callable[[torch.Tensor], Any]
GATES: list[Gate] = [
    lambda logits: top1gating(logits, 1.0, 2, use_rts=False),
    lambda logits: top1gating(logits, 1.0, 2, used_token=torch.arange(len(logits)) % 3),
    lambda logits: top2gating(logits, 1.0, 2, top2_2nd_expert_sampling=False),
    lambda logits: topkgating(logits, 2, 1.0, 2, drop_policy="position"),
]


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_scans_along_memory_and_routes_as_on_the_host(gate: Gate) -> None:
    # Kills: a scan over the tokens of [tokens, experts], each element as far from the next as
    # there are experts; positions that are not the host's.
    logits = drawn(0, 37, 4)
    wanted = seeded(gate, logits.clone(), seed=1)
    with simulate():
        with Operators() as seen:
            found = seeded(gate, logits.clone(), seed=1)
        assert seen.count["aten::cumsum"] >= 1 and not seen.slow
        assert torch.equal(found.combine_weights, wanted.combine_weights)
        assert torch.equal(found.dispatch_mask, wanted.dispatch_mask)


@pytest.mark.parametrize("heads", [16, 13])
@pytest.mark.parametrize("scatter", [0, 2])
def test_an_exchange_is_packed_by_few_copies_for_many_ranks(heads: int, scatter: int) -> None:
    # Kills: a copy per rank and tensor; pieces in another order than the ranks'.
    tensors = [torch.randn(8, 2, count, 3) for count in (heads, 8, 8)]
    pieces = [shares(tensor.shape[scatter], 8) for tensor in tensors]
    cuts = [Cut(scatter, 2 - scatter, sizes, (1,) * 8) for sizes in pieces]
    wanted, sizes = _pack(tensors, cuts, 8)
    with simulate():
        with Operators() as seen:
            found, sent = _pack(tensors, cuts, 8)
        runs = len({cut.scatter_sizes[0] != size for cut in cuts for size in cut.scatter_sizes})
        assert seen.count["aten::copy_"] == 3 * runs < 3 * 8
        assert sent == sizes and torch.equal(found, wanted)


class _Group:
    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self.params = params
        self.flat = torch.zeros(sum(param.numel() for param in params))
        self.table = self
        self.padded_numel = len(self.flat)

    def param_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pieces = flat.split([param.numel() for param in self.params])
        return [piece.view(param.shape) for piece, param in zip(pieces, self.params, strict=True)]


def accumulated() -> torch.Tensor:
    draw = torch.Generator().manual_seed(2)
    sizes = ((3, 5), (7,), (64, 4), (9,), (11,))
    params = [torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in sizes]
    accumulator = LocalAccumulator([_Group(params)], torch.float32)  # type: ignore[list-item]
    for _ in range(3):
        for param in params[:-1]:
            param.grad = torch.randn(param.shape, generator=draw).bfloat16()
        accumulator.absorb(0.3)
    return accumulator.flats[0]


def test_gradients_of_another_dtype_are_added_together(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills: a grouped addition of two dtypes, which a device does one by one; one that rounds
    # otherwise than the host; memory for all gradients in the wide dtype.
    wanted = accumulated()
    monkeypatch.setattr(local_accumulator, "WIDENED_NUMEL", 30)
    with simulate():
        with Operators() as seen:
            found = accumulated()
        # The first two together, the large one and the last by themselves.
        assert seen.count["aten::_foreach_copy_"] == 3 and not seen.slow
        assert torch.equal(found, wanted)


class TestAttentionWaits(DistributedTest):
    world_size = 2

    def test_the_order_of_repeated_heads_is_sent_to_the_device_once(self) -> None:
        # Kills: a copy of the host's numbers, for which it waits, in every forward.
        with simulate() as sim:
            attention = DistributedAttention(_Attends(), dist.get_world_group())
            tensors = [torch.randn(4, 1, heads, 3) for heads in (4, 1, 1)]
            attention(*tensors, 1)
            with sim.count_host_waits() as waits:
                attention(*tensors, 1)
            assert waits.total == 0 and not waits.pageable_copies, waits.by_place
            get_accelerator().synchronize()


class _Attends(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return query + key + value
