"""What of a small engine's communication is exposed, as if it were large."""

from collections.abc import Callable

from replay import Device, exposed, logged
from unit.v1.gathering import from_all_ranks

# A layer of 4,096 features over as many rows multiplies for longer than it is gathered.
LARGE = Device(length=64, element=4, heads=4)
# What reads and writes little takes its three microseconds on the way.
SLACK = 50e-6


class Found:
    """Of the third step that `train` takes: what is exposed in each part of it, on the rank that
    has most, and how long this rank's communications take.
    """

    def __init__(self, train: Callable[[Callable[[str], None]], None]) -> None:
        for _ in range(2):
            train(lambda name: None)
        with logged() as log:
            train(log.mark)
            log.mark("step")
        self.spent = log.communicated(LARGE)
        self.ranks = exposed(from_all_ranks(log), LARGE)

    def one(self, name: str) -> float:
        return max(self.spent.get(name, [0.0]))

    def total(self, name: str) -> float:
        return sum(self.spent.get(name, []))

    def part(self, name: str) -> float:
        names = ["", *self.ranks[0]]
        before = names[names.index(name) - 1]
        return max(times[name] - times.get(before, 0.0) for times in self.ranks)
