"""Running a test for several values inside one launched world."""

from typing import Any

import pytest

from unit.v1.looping import each


def test_each_names_the_combination() -> None:
    # Kills: a loop that stops before its last value, or hides which one failed.
    seen = []

    @each(a=(1, 2), b=("x", "y"))
    def body(self: Any, a: int, b: str) -> None:
        seen.append((a, b))
        if (a, b) == (2, "y"):
            raise KeyError("last")

    with pytest.raises(AssertionError, match="'a': 2, 'b': 'y'.*last"):
        body(None)
    assert len(seen) == 4
