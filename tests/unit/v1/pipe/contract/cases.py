"""The pipeline's contract suite: pairs of values, and the whole product, as `contract.matrix`."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from unit.v1.contract.matrix import Case, pairwise

SHARES = 6


@dataclass(frozen=True)
class PipeCase(Case):
    """One configuration of a pipeline; `world` is stages times data-parallel ranks.

    Attributes:
        schedule: "1f1b", "interleaved" (two model chunks per stage) or "zero_bubble".
        checkpoint: Layers per recomputed segment, 0 for none.
        dynamic: Micro-batches have different numbers of rows.
        tied: First and last layer share a weight.
        adaptive: fp16's loss scale is dynamic.
        parts: Boundaries of the stages' layers; empty for parts of equally many.
    """

    accumulation: int = 4
    clip: bool = False
    overlap: bool = False
    reduce_scatter: bool = True
    offload: bool = False
    bucket: str = "huge"
    world: int = 1
    pipe: int = 1
    schedule: str = "1f1b"
    checkpoint: int = 0
    dynamic: bool = False
    tied: bool = False
    adaptive: bool = False
    parts: tuple[int, ...] = ()

    @property
    def replicas(self) -> int:
        """Data-parallel ranks of a stage."""
        return self.world // self.pipe

    @property
    def chunks(self) -> int:
        """Model chunks per stage."""
        return 2 if self.schedule == "interleaved" else 1

    @property
    def name(self) -> str:
        """Short name for failure reports."""
        recomputed = [f"checkpoint{self.checkpoint}"] if self.checkpoint else []
        switches = [word for word in ("dynamic", "tied", "adaptive") if getattr(self, word)]
        cut = [f"parts{self.parts}"] if self.parts else []
        words = (f"pipe{self.pipe}", self.schedule, *recomputed, *switches, *cut, super().name)
        return "-".join(words)


# Stages and data-parallel ranks, together: only these fit into 4 ranks.
_GRIDS = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))
# Schedule and layers per recomputed segment, together: a zero-bubble schedule cannot recompute.
_PLANS = (("1f1b", 0), ("interleaved", 0), ("zero_bubble", 0), ("1f1b", 1), ("interleaved", 2))
_PRECISIONS = ("fp32", "bf16", "bf16+fp32", "fp16", "adaptive fp16")

FACTORS: dict[str, tuple[Any, ...]] = {
    "grid": _GRIDS,
    "plan": _PLANS,
    "precision": _PRECISIONS,
    "stage": (0, 1),
    "dynamic": (False, True),
    "tied": (False, True),
    "clip": (False, True),
    "overlap": (False, True),
    "offload": (False, True),
    "accumulation": (1, 4, 7),
}

# The product is taken of these; the rest takes turns.
_PRODUCT = ("grid", "precision", "stage", "dynamic", "tied", "clip")


def case_of(row: dict[str, Any], bucket: str) -> PipeCase:
    """The case of a row of factors."""
    values = dict(row)
    pipe, replicas = values.pop("grid")
    schedule, checkpoint = values.pop("plan")
    _, adaptive, precision = values.pop("precision").rpartition("adaptive ")
    return PipeCase(
        **values,
        pipe=pipe,
        world=pipe * replicas,
        schedule=schedule,
        checkpoint=checkpoint,
        adaptive=bool(adaptive),
        precision=precision,
        bucket=bucket,
    )


def _cases(rows: Iterable[dict[str, Any]]) -> list[PipeCase]:
    return [case_of(row, ("tiny", "huge")[index % 2]) for index, row in enumerate(rows)]


def pair_cases() -> list[PipeCase]:
    """All pairs of values."""
    return _cases(pairwise(FACTORS, [376]))


def _rows() -> Iterator[dict[str, Any]]:
    turns = itertools.cycle(
        itertools.product((True, False), (False, True), (4, 7, 1), ((0, 1), (0, 0), (0, 2)))
    )
    for values in itertools.product(*(FACTORS[name] for name in _PRODUCT)):
        for schedule in ("1f1b", "interleaved", "zero_bubble"):
            *turn, recomputed = next(turns)
            row = dict(zip(_PRODUCT, values, strict=True))
            row["plan"] = (schedule, 0 if schedule == "zero_bubble" else recomputed[1])
            yield row | dict(zip(("overlap", "offload", "accumulation"), turn, strict=True))


def product_cases() -> list[PipeCase]:
    """The whole product of grids, schedules, precisions, ZeRO stages, shapes, ties and clipping."""
    return _cases(_rows())
