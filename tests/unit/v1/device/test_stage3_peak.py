"""The peaks that docs/zero3.md gives by formula, against those of simulated runs."""

from __future__ import annotations

from typing import Any, NamedTuple

from deepspeed.runtime.sharding.publisher import UPDATE_NUMEL
from unit.common import DistributedTest
from unit.v1.device.test_peak_memory import LAYERS, TOLERANCE, WIDTH, peak_of

LAYER = WIDTH * WIDTH
NUMEL = LAYERS * LAYER
RANKS = 2


class Case(NamedTuple):
    """What of a configuration changes the peak.

    Attributes:
        precision: Of the model.
        params, optimizer: Whether they are on the host.
        ahead: Layers gathered ahead.
        fused: Layers that are one unit.
        ratio: How much of the optimizer is on the host, if it is.
    """

    precision: str
    params: bool = False
    optimizer: bool = False
    ahead: int = 0
    fused: int = 1
    ratio: float = 1.0

    @property
    def zero(self) -> dict[str, Any]:
        """Its configuration."""
        places: dict[str, dict[str, Any]] = {}
        if self.params:
            places["offload_param"] = {"device": "cpu"}
        if self.optimizer:
            places["offload_optimizer"] = {"device": "cpu", "ratio": self.ratio}
        return {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": self.ahead * LAYER,
            # An eighth of it is a layer, and no more than is gathered ahead is fused.
            "stage3_unit_fusion_size": 8 * LAYER,
            **places,
        }

    @property
    def formula(self) -> float:
        """The table of docs/zero3.md, in bytes."""
        narrow = 4 if self.precision == "fp32" else 2
        unit = self.fused * LAYER
        states = 0 if self.params else narrow * NUMEL / RANKS
        has_masters = self.precision != "fp32" or self.params
        on_device = 1.0 - self.ratio if self.optimizer else 1.0
        states += on_device * (4 * has_masters + 4 + 8) * NUMEL / RANKS
        gathers = narrow * (unit + self.ahead * LAYER) + narrow * unit
        gradients = narrow * (1 + 2 + 2 / RANKS) * unit
        if self.optimizer:
            gradients += narrow * 2 / RANKS * unit
        elif self.params and narrow == 2:
            # Rounded shards on their way to the host; two reductions keep their memory.
            rounded = narrow * min(NUMEL // RANKS, UPDATE_NUMEL)
            gradients = max(gradients, narrow * 2 * unit + rounded)
        return states + gathers + gradients


CASES = (
    Case("fp32", ahead=2),
    Case("bf16"),
    Case("fp32", ahead=8, fused=8),
    Case("bf16", optimizer=True),
    Case("bf16", optimizer=True, ratio=0.75),
    Case("bf16", params=True),
    Case("bf16", params=True, optimizer=True, ahead=2),
    Case("fp32", params=True, optimizer=True, ahead=8, fused=8),
)


class TestPeak(DistributedTest):
    world_size = RANKS
    backend = "gloo"

    def test_is_the_formula(self) -> None:
        # Kills: shards or state on the device that are on the host, a unit more that stays whole,
        # gradients that outlive their bucket, rows for each gather, results that pile up on their
        # way to the host.
        for case in CASES:
            peak = peak_of(case.precision, "AdamW", None, 8, **case.zero)
            assert peak <= (1 + TOLERANCE) * case.formula, (case, peak / case.formula)
            # What is on its way and what is whole are bounded together, and seldom both full.
            assert peak >= 0.85 * case.formula, (case, peak / case.formula)
