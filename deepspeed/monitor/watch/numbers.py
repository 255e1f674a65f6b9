"""How a page writes numbers; `page.js` writes them the same way."""

from __future__ import annotations

import math

NONE = "–"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: float | None) -> str:
    """Four significant digits: 0.1235, 12,346, 3.2e-4; a dash for None."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 999.95:
        return f"{value:,.0f}"
    if size < 1e-3:
        digits, exponent = f"{value:.3e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}"


def milliseconds(value: float | None) -> str:
    """Write a time with the unit that fits."""
    if value is None:
        return NONE
    return f"{number(value)} ms" if value < 1e4 else f"{number(value / 1e3)} s"


def number_of_bytes(value: float | None) -> str:
    """Write a size with the unit that fits."""
    if value is None:
        return NONE
    power = 0
    while value >= 1024 and power < len(_UNITS) - 1:
        value /= 1024
        power += 1
    return f"{number(value)} {_UNITS[power]}"


def change(now: float, before: float) -> str:
    """Say how `now` differs, as +1.2%; nothing where it cannot be said or rounds to nothing."""
    if not (math.isfinite(now) and math.isfinite(before)) or before == 0:
        return ""
    percent = 100 * (now - before) / abs(before)
    if abs(percent) < 0.05:
        return ""
    return f"{percent:+,.0f}%" if abs(percent) >= 99.95 else f"{percent:+.1f}%"
