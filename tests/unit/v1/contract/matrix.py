"""The contract suite's configurations: the product of the factors, and a share with all pairs."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

# Cut into shares so that a configuration that hangs costs minutes, not the whole run.
CHUNKS_PER_WORLD = 8


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        precision: Model dtype, and "+fp32" if micro-batches are summed in fp32.
        accumulation: Micro-batches per step.
        clip: Whether gradients are clipped (far below their norm).
        offload: Optimizer state on the host.
        bucket: "tiny" (most parameters are larger), "exact" (two parameters fill one), "huge".
        optimizer: "sgd" (an error of a gradient shows in proportion) or "adamw" (it has state).
        instances: `num_optimizer_instances`.
    """

    stage: int
    precision: str
    accumulation: int
    clip: bool
    overlap: bool
    reduce_scatter: bool
    offload: bool
    bucket: str
    world: int
    optimizer: str = "sgd"
    instances: int = 1

    @property
    def name(self) -> str:
        """Short name for failure reports."""
        switches = ("clip", "overlap", "reduce_scatter", "offload")
        words = (
            f"world{self.world}-stage{self.stage}-{self.precision}-acc{self.accumulation}",
            self.bucket,
            *(word for word in switches if getattr(self, word)),
            self.optimizer,
            *([f"instances{self.instances}"] if self.instances > 1 else []),
        )
        return "-".join(words)


FACTORS: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2),
    "precision": ("fp32", "bf16", "fp16", "bf16+fp32", "fp16+fp32"),
    "accumulation": (1, 3),
    "clip": (False, True),
    "overlap": (False, True),
    "reduce_scatter": (True, False),
    "offload": (False, True),
    "bucket": ("tiny", "exact", "huge"),
    "world": (1, 2, 3),
}

# Several optimizer instances: the same factors where state is sharded, of precisions one of a kind,
# and how many ranks are split into how many instances.
INSTANCE_FACTORS: dict[str, tuple[Any, ...]] = {
    **{name: values for name, values in FACTORS.items() if name not in ("stage", "world")},
    "precision": ("fp32", "bf16", "fp16+fp32"),
    "stage": (1, 2),
    "split": ((2, 2), (4, 2)),
}
Factors = Mapping[str, Sequence[Any]]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def all_pairs(factors: Factors) -> set[Pair]:
    """Every pair of values of two different factors."""
    values = [[(name, value) for value in options] for name, options in factors.items()]
    return {pair for two in itertools.combinations(values, 2) for pair in itertools.product(*two)}


def pairs_of(row: Mapping[str, Any], factors: Factors) -> set[Pair]:
    """The pairs that one row covers, named as `all_pairs` names them."""
    chosen = [(name, row[name]) for name in factors if name in row]
    return set(itertools.combinations(chosen, 2))


def pairwise(factors: Factors, draws: Sequence[int] = range(8)) -> list[dict[str, Any]]:
    """Few rows that cover all pairs of values: the fewest of these repeatable draws. Who gives one
    has looked through hundreds for it; any other is right too, and longer.
    """
    return min((_drawn(factors, Random(draw)) for draw in draws), key=len)


def _drawn(factors: Factors, chance: Random) -> list[dict[str, Any]]:
    """Each row starts from a pair that is uncovered and takes, factor by factor, the value that
    covers most of what is left. Factors with many values choose first: fewer rows.
    """
    names = sorted(factors, key=lambda name: (-len(factors[name]), chance.random()))
    order = sorted(all_pairs(factors), key=repr)
    chance.shuffle(order)
    left = {*order, *((second, first) for first, second in order)}
    rows = []
    for pair in order:
        row: dict[str, Any] = dict(pair)
        if pair not in left:
            continue
        for name in names:
            if name not in row:
                gains = [
                    (sum(((name, value), item) in left for item in row.items()), chance.random())
                    for value in factors[name]
                ]
                row[name] = factors[name][gains.index(max(gains))]
        left.difference_update(itertools.permutations(row.items(), 2))
        rows.append(row)
    return rows


def covering(rows: Sequence[Mapping[str, Any]], factors: Factors) -> list[Mapping[str, Any]]:
    """Few of `rows` that cover all pairs that any of them has: where not all values go together.
    Each takes one pair that is left, and most of the others.
    """
    pairs = [pairs_of(row, factors) for row in rows]
    left, chosen = set().union(*pairs), []
    for pair in sorted(left, key=repr):
        if pair in left:
            gains = [len(own & left) if pair in own else 0 for own in pairs]
            best = gains.index(max(gains))
            left -= pairs[best]
            chosen.append(rows[best])
    return chosen


def pairwise_cases(draw: int = 64, **fewer: tuple[Any, ...]) -> list[Case]:
    """All pairs of values, some factors with fewer, and a run with a stateful optimizer per
    precision.
    """
    cases = [Case(**row) for row in pairwise({**FACTORS, **fewer}, [draw])]
    for number, precision in enumerate(FACTORS["precision"]):
        stage = number % 3
        cases.append(Case(stage, precision, 3, True, True, True, stage == 2, "tiny", 2, "adamw"))
    return cases


def instance_cases() -> list[Case]:
    """All pairs of values with several instances, and runs with stateful optimizers."""
    cases = []
    for row in pairwise(INSTANCE_FACTORS, [9]):
        world, count = row.pop("split")
        cases.append(Case(**row, world=world, instances=count))
    return cases + [
        Case(1, "fp16", 3, True, True, True, False, "tiny", 4, "adamw", 2),
        Case(2, "bf16", 3, False, True, False, True, "huge", 4, "adamw", 2),
        Case(1, "bf16+fp32", 1, True, False, True, False, "exact", 4, "adamw", 2),
        Case(2, "fp32", 1, True, True, True, True, "tiny", 4, "adamw", 4),
    ]


def product_cases() -> list[Case]:
    """The whole product."""
    return [Case(*values) for values in itertools.product(*FACTORS.values())]


def of_world(cases: Sequence[Case], world: int) -> list[Case]:
    """The cases that one launched world runs."""
    return [case for case in cases if case.world == world]


def chunk(cases: Sequence[Case], index: int) -> list[Case]:
    """Share `index` of `CHUNKS_PER_WORLD`, all about equally long."""
    return list(cases[index::CHUNKS_PER_WORLD])
