"""The peaks that docs/zero3.md gives by formula, against those of simulated runs."""

from typing import Any, NamedTuple

from deepspeed import comm as dist
from deepspeed.runtime.zero.estimates.stage3 import ModelShape, plan_sharded_parameters
from deepspeed.runtime.zero.gathering.units import GatherSettings
from unit.common import DistributedTest
from unit.simple_model import Wide
from unit.v1.device.test_peak_memory import LAYERS, TOLERANCE, WIDTH, peak_of

LAYER = WIDTH * WIDTH
NUMEL = LAYERS * LAYER


class Case(NamedTuple):
    """What of a configuration changes the peak: places of state, layers gathered `ahead`, `fused`
    or kept for `reuse`, the `ratio` of the optimizer on the host, ranks that keep `copies`.
    """

    precision: str
    params: bool = False
    optimizer: bool = False
    ahead: int = 0
    fused: int = 1
    ratio: float = 1.0
    reuse: int = 0
    ranks: int = 2
    copies: int = 1

    @property
    def zero(self) -> dict[str, Any]:
        places: dict[str, dict[str, Any]] = {}
        if self.params:
            places["offload_param"] = {"device": "cpu"}
        if self.optimizer:
            places["offload_optimizer"] = {"device": "cpu", "ratio": self.ratio}
        return {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": self.reuse * LAYER,
            "stage3_prefetch_bucket_size": self.ahead * LAYER,
            # An eighth of it is a layer, and no more than is gathered ahead is fused.
            "stage3_unit_fusion_size": 8 * LAYER,
            "zero_hpz_partition_size": self.copies,
            **places,
        }

    @property
    def formula(self) -> int:
        settings = GatherSettings(
            prefetch=self.ahead * LAYER,
            max_reuse=self.reuse * LAYER,
            param_persistence=0,
            loads=self.params,
            fusion=8 * LAYER if self.fused > 1 else 0,
        )
        shape = ModelShape.of(Wide(LAYERS, WIDTH), settings)
        assert shape == ModelShape(NUMEL, self.fused * LAYER)
        return plan_sharded_parameters(
            shape,
            self.ranks,
            settings,
            model_bytes=4 if self.precision == "fp32" else 2,
            offload_ratio=self.ratio if self.optimizer else 0.0,
            secondary_ranks=self.copies,
        ).device


CASES = (
    Case("fp32", ahead=2),
    Case("bf16"),
    Case("fp32", ahead=8, fused=8),
    Case("bf16", ahead=2, reuse=100),
    Case("bf16", optimizer=True, ratio=0.75),
    Case("bf16", params=True),
    Case("bf16", params=True, optimizer=True, ahead=2),
    Case("fp32", params=True, optimizer=True, ahead=8, fused=8),
)
COPIES = Case("bf16", ranks=4, copies=2)


class TestPeak(DistributedTest):
    world_size = [2, 4]
    backend = "gloo"

    def test_is_the_formula(self) -> None:
        # Kills: shards or state on the device that are on the host, a unit more that stays whole,
        # gradients that outlive their bucket, rows for each gather, results that pile up on their
        # way to the host; copies of gathered shards that are whole on each rank.
        for case in CASES if dist.get_world_size() == 2 else (COPIES,):
            # Buffers on the host are those of the first two steps.
            micro_batches = 8 if case.optimizer else 4
            peak = peak_of(case.precision, "AdamW", None, micro_batches, **case.zero)
            assert peak <= (1 + TOLERANCE) * case.formula, (case, peak / case.formula)
            # What is on its way and what is whole are bounded together, and seldom both full.
            assert peak >= 0.85 * case.formula, (case, peak / case.formula)
