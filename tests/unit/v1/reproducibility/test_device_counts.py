"""What equal bits cost on a device: bytes on the wire, waits of the host, operators."""

from collections import Counter
from typing import Any

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.comm.watch.observation import CollectiveCall
from unit.common import DistributedTest
from unit.models import config_of, drawn, linears
from unit.one_process import mean_square, placed
from unit.operators import Launches
from unit.v1.gathering import noted
from unit.v1.looping import each

WIDTH, ROWS, LAYERS, ACCUMULATION, WARM_UP = 16, 4, 4, 2, 3
# Operators of squares and their totals, once a step.
ONCE = 59


def sent(call: CollectiveCall) -> list[tuple[str, int]]:
    """By what name, and how many bytes this rank gives away of a sum or exchange."""
    if call.name not in ("reduce_scatter_tensor", "all_to_all_single", "all_reduce"):
        return []
    return [(call.name, sum(tensor.nbytes for tensor in call.reads) // 2)]


def step_of(stage: int, is_canonical: bool) -> dict[str, Any]:
    """Counts of one step on the simulated device."""
    zero = {"reduce_bucket_size": 2 * WIDTH * WIDTH, "stage3_param_persistence_threshold": 0}
    more = {"bf16": {"enabled": True}, "gradient_clipping": 0.05}
    more["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    more["reproducibility"] = {"world_size_invariant": is_canonical}
    config = config_of(stage, ROWS, ACCUMULATION, zero_optimization=zero, **more)
    launches = Launches()
    with simulate() as device:
        engine = deepspeed.initialize(model=linears(LAYERS, WIDTH), config=config)[0]

        def step(number: int) -> None:
            for micro in range(ACCUMULATION):
                x = drawn(100 * number + 10 * micro + dist.get_rank(), ROWS, WIDTH)
                engine.backward(mean_square(engine, placed(engine, x)))
                engine.step()

        for number in range(WARM_UP):
            step(number)
        with get_accelerator().count_host_waits() as waits, noted(sent) as calls:
            with device.trace_streams(launches):
                step(WARM_UP)
            waited = waits.total - sum(waits.inside("deepspeed/utils/timer.py").values())
        engine.destroy()
    wire: Counter[str] = Counter()
    for name, size in calls:
        wire[name] += size
    names = Counter(name for name, _ in calls)
    return {"waits": waited, "wire": wire, "calls": names, "operators": launches.names}


class TestTwo(DistributedTest):
    world_size = 2

    @each(stage=(1, 2, 3))
    def test_of_a_step(self, stage: int) -> None:
        # Kills: a wait for what is not finite, sums that travel in fp32, a kernel per row.
        plain, bits = (step_of(stage, is_canonical) for is_canonical in (False, True))
        sends = LAYERS * ACCUMULATION  # a bucket each
        assert bits["waits"] == plain["waits"] == 1
        assert bits["calls"] == {"all_to_all_single": sends, "all_reduce": 1}, bits["calls"]
        # At stage 1 the sum of the micro-batches travels otherwise.
        summed = ACCUMULATION if stage == 1 else 1
        ring = plain["wire"]["reduce_scatter_tensor"]
        assert bits["wire"]["all_to_all_single"] == summed * ring > 0
        assert bits["wire"]["all_reduce"] == 45 * 8 // 2
        # Of a bucket a leaf of each rank is added, where one sum was.
        extra = len(bits["operators"]) - len(plain["operators"])
        assert extra <= ONCE + summed * sends, extra
