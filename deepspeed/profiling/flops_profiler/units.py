"""Numbers with units, in upstream's spelling (1.23 KMACs, 2.5 GFLOPS, 10 us)."""

from __future__ import annotations

_SCALES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Write `num` with a decimal prefix ("T" to "u"), None: the largest that leaves at least 1."""
    if units is None:
        units = (
            next((unit for unit, scale in _SCALES.items() if abs(num) >= scale), "u") if num else ""
        )
    if units not in _SCALES:
        raise ValueError(
            f"units={units!r} is unknown; use one of {', '.join(map(repr, _SCALES))} or None"
        )
    value = round(num / _SCALES[units], precision)
    return f"{value:g} {units}" if abs(value) < 1e6 else f"{value:.{precision}f} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Multiply-accumulate operations: "1.23 KMACs"."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Floating-point operations per second: "1.23 KFLOPS"."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    """Bytes, in units of 1000: "1.23 KB"."""
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Parameters: "1.23 M", with "B" for 1e9."""
    return (
        number_to_string(params_num, "G" if units == "B" else units, precision)
        .replace("G", "B")
        .strip()
    )


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Write seconds, in units ("s", "ms", "us") or what fits: "1.23 ms"."""
    if units is not None and units.endswith("s"):
        units = units[:-1]
    return f"{number_to_string(duration, units, precision)}s"
