"""Configurations that must give equal bits: a share with all pairs of values, and the products."""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from unit.v1.contract.matrix import pairwise

MICRO_BATCHES = 12
SMALL = 30  # elements of a parameter, of which the model has both smaller and larger ones
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    # The first step is skipped.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 15, "hysteresis": 1}},
}
OPTIMIZERS: dict[str, dict[str, Any] | None] = {
    "adam": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
    "sgd": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "lion": {"type": "Lion", "params": {"lr": 1e-3}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 1e-2}},
    "lamb": {"type": "Lamb", "params": {"lr": 1e-2}},
    "muon": {"type": "Muon", "params": {"lr": 1e-2}},
    "adafactor": None,  # torch's
}
# What updates one part on the host and another beside it.
DIVISIBLE = ("adam", "lion")


@dataclass(frozen=True)
class Case:
    """One configuration. What is not for its stage or optimizer becomes what is nearest.

    Attributes:
        offload: "optimizer" on the host, "half" of it (stage 3), or "both" it and parameters
            (stage 3).
        groups: Several "instances" of optimizer state, or "secondary" shards (stage 3).
        persists: All parameters stay whole, not only small ones (stage 3).
        recompute: "reentrant" or "again": how a block is recomputed.
    """

    stage: int
    precision: str = "fp32"
    optimizer: str = "adam"
    ranks: int = 2
    offload: str = ""
    groups: str = ""
    small_buckets: bool = False
    overlap: bool = False
    persists: bool = True
    recompute: str = ""

    @property
    def kind(self) -> str:
        """All of one kind give one digest."""
        return f"{self.precision} {self.optimizer}"

    @property
    def alone(self) -> "Case":
        """The plainest of its kind, on one rank."""
        return Case(2, self.precision, self.optimizer, ranks=1)

    @property
    def zero(self) -> dict[str, Any]:
        """The block of ZeRO."""
        keys: dict[str, Any] = {"stage": self.stage, "overlap_comm": self.overlap}
        if self.small_buckets:
            keys |= {"reduce_bucket_size": 700, "allgather_bucket_size": 700}
        if self.stage == 3 and not self.persists:
            keys["stage3_param_persistence_threshold"] = SMALL
        on_host = self.stage == 3 and self.offload == "both"
        if self.stage and self.offload:
            keys["offload_optimizer"] = {"device": "cpu"}
            if self.stage == 3 and self.offload == "half" and self.optimizer in DIVISIBLE:
                keys["offload_optimizer"]["ratio"] = 0.5
        if on_host:
            keys["offload_param"] = {"device": "cpu"}
        if self.stage and self.groups and self.ranks > 1:
            size = 2 if self.ranks % 2 == 0 else self.ranks
            is_secondary = self.stage == 3 and self.groups == "secondary" and not on_host
            keys |= {"zero_hpz_partition_size" if is_secondary else "num_optimizer_instances": size}
        return keys

    @property
    def name(self) -> str:
        """For reports."""
        words = [f"{key}={value}" for key, value in asdict(self).items() if value != ""]
        return " ".join(words)


FACTORS: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "precision": tuple(PRECISIONS),
    "optimizer": tuple(OPTIMIZERS),
    "ranks": (2, 3, 4),
    "offload": ("", "optimizer", "half", "both"),
    "groups": ("", "instances", "secondary"),
    "small_buckets": (False, True),
    "overlap": (False, True),
    "persists": (True, False),
    "recompute": ("", "reentrant", "again"),
}


def pair_cases() -> list[Case]:
    """All pairs of values."""
    return [Case(**row) for row in pairwise(FACTORS, [14])]


def product_cases() -> list[Case]:
    """The whole product, each configuration once, on 6 ranks too."""
    factors = {**FACTORS, "ranks": (2, 3, 4, 6)}
    cases = (
        Case(**dict(zip(factors, values, strict=True)))
        for values in itertools.product(*factors.values())
    )
    found = {(case.kind, case.ranks, case.recompute, str(case.zero)): case for case in cases}
    return list(found.values())


def long_cases() -> Iterator[Case]:
    """Ranks, stages, precisions and offload of the run of 500 steps; the plainest first."""
    places = [(0, ""), *((stage, where) for stage in (1, 2, 3) for where in ("", "optimizer"))]
    places.append((3, "both"))
    for precision, ranks, (stage, where) in itertools.product(PRECISIONS, (1, 2, 3, 4, 6), places):
        yield Case(stage, precision, ranks=ranks, offload=where)
