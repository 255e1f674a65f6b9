"""Replaying what is issued finds how much communication is not hidden: of programs by hand, and of
stages 0 to 3 and pipelines, which hide what they can.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from exposure import SLACK, Found
from replay import Device, Launches, WorkLog, exposed, replayed
from torch import nn
from unit.common import DistributedTest
from unit.models import config_of, drawn, linears, sgd
from unit.one_process import mean_square, placed
from unit.v1.looping import each

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.accelerator.stream_trace import Access
from deepspeed.pipe import PipelineModule

# A byte takes a second, and nothing else takes any.
BY_BYTES = Device(memory=1.0, kernel=0.0, nvlink=1.0, network=1.0, start=0.0, hop=0.0)


class Stream:
    def __init__(self, name: str) -> None:
        self.name, self.issued = name, 0

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Program:
    """What one rank of two issues, by hand."""

    def __init__(self, rank: int = 0) -> None:
        self.log, self.rank, self.collectives = WorkLog(), rank, 0
        self.main, self.comm, self.other = map(Stream, ("default stream", "comm", "other"))

    def kernel(self, stream: Stream, seconds: int) -> None:
        self._launch(stream, "aten::add", seconds)
        self.log.kernel(stream, stream.issued)

    def all_reduce(self, seconds: int) -> None:
        self._launch(self.comm, "all_reduce", seconds)  # twice half of its bytes
        own, self.collectives = ("g", self.collectives), self.collectives + 1
        others = ((1 - self.rank, own),)
        self.log.communication(self.comm, self.comm.issued, "all_reduce", own, others, False)

    def wait(self, stream: Stream, other: Stream) -> None:
        stream.issued += 1
        self.log.stream_wait(stream, stream.issued, other, other.issued)

    def _launch(self, stream: Stream, operator: str, seconds: int) -> None:
        stream.issued += 1
        Launches(self.log).launched(operator, stream, [Access(0, 0, seconds, True, 0)])


def program(rank: int = 0, first: int = 5) -> WorkLog:
    made = Program(rank)
    made.kernel(made.main, first)
    made.wait(made.comm, made.main)
    made.all_reduce(4)
    made.kernel(made.main, 3)
    made.kernel(made.other, 6)
    made.log.mark("beside")
    made.wait(made.main, made.comm)
    made.kernel(made.main, 1)
    made.log.mark("behind")
    return made.log


def test_a_program_by_hand() -> None:
    # Kills: a wait, a queue, another rank or a host that holds nothing up, and one that does though
    # nothing says so; a collective that is exposed where computation covers it.
    assert replayed([program()], BY_BYTES) == [{"beside": 8.0, "behind": 10.0, "end": 10.0}]
    assert exposed([program()], BY_BYTES) == [{"beside": 0.0, "behind": 1.0, "end": 1.0}]
    one_queue = replayed([program()], BY_BYTES, queues=1)[0]
    assert one_queue["end"] == 11.0, one_queue  # the third stream is behind the wait of the second
    first, second = replayed([program(0), program(1, first=7)], BY_BYTES)
    assert first["behind"] == second["behind"] == 12.0 and first["beside"] == 8.0
    made = Program()
    made.kernel(made.main, 5)
    made.log.host_wait(made.main, 1)
    made.kernel(made.other, 1)
    assert replayed([made.log], BY_BYTES)[0]["end"] == 6.0


WIDTH, LAYERS = 64, 4
LAYER = WIDTH * WIDTH


class TestStages(DistributedTest):
    world_size = 2
    backend = "gloo"

    def test_only_the_first_gather_and_the_last_reduction_show(self) -> None:
        for stage in range(4):
            zero = {"overlap_comm": True, "reduce_bucket_size": LAYER}
            if stage == 3:
                small = ("param_persistence_threshold", "unit_fusion_size", "max_reuse_distance")
                zero |= {f"stage3_{name}": 0 for name in small}
                zero |= {"stage3_prefetch_bucket_size": 1}
            config = config_of(stage, WIDTH, optimizer=sgd(0.1), zero_optimization=zero)
            with simulate():
                model = linears(LAYERS, WIDTH, bias=False)
                engine = deepspeed.initialize(model=model, config=config)[0]

                def train(mark: Callable[[str], None], engine: Any = engine) -> None:
                    x = drawn(dist.get_rank(), WIDTH, WIDTH)
                    loss = mean_square(engine, placed(engine, x))
                    mark("forward")
                    engine.backward(loss)
                    mark("backward")
                    engine.step()

                found = Found(train)
                engine.destroy()
            first, last = found.one("all_gather_into_tensor"), found.one("reduce_scatter_tensor")
            gathers = found.total("all_gather_into_tensor")
            norm = found.total("all_reduce")
            # Kills: a reduction that waits for the whole backward; a gather that is not begun
            # before the reduction of the unit at hand.
            forward, rest, after = {
                0: (0.0, found.one("all_reduce"), 0.0),
                1: (0.0, 0.0, last + gathers + norm),
                2: (0.0, 0.0, last + gathers + norm),
                3: (first, 0.0, last + norm),
            }[stage]
            parts = [found.part(name) for name in ("forward", "backward", "step")]
            bounds = [forward + SLACK, rest + SLACK, after + SLACK]
            assert all(map(operator.le, parts, bounds)), (stage, parts, bounds)


MICRO_BATCHES = 4


class TestPipeline(DistributedTest):
    world_size = 2
    backend = "gloo"

    @each(schedule=("1f1b", "zero_bubble"))
    def test_two_messages_show(self, schedule: str) -> None:
        layers = linears(8, WIDTH, bias=False)
        keys = {"optimizer": sgd(0.1), "pipeline": {"schedule": schedule}}
        with simulate():
            module = PipelineModule(
                list(layers),
                num_stages=2,
                loss_fn=nn.functional.mse_loss,
                partition_method="uniform",
            )
            config = config_of(0, WIDTH, MICRO_BATCHES, **keys)
            engine = deepspeed.initialize(model=module, config=config)[0]

            def train(mark: Callable[[str], None]) -> None:
                pairs = drawn(0, MICRO_BATCHES, 2, WIDTH, WIDTH)
                engine.train_batch(iter([pair.unbind(0) for pair in pairs]))

            found = Found(train)
            engine.destroy()
        # Kills: a message that is not under way while its stage computes. Nothing hides the first
        # one, nor the last, which gradients of weights do with zero_bubble.
        messages = {"1f1b": 2, "zero_bubble": 1}[schedule] * found.one("isend")
        assert messages < found.part("step") < messages + found.total("all_reduce") + SLACK
