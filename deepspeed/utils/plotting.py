"""Pictures in files, drawn by matplotlib where it is there."""

from __future__ import annotations

from typing import Any


def pyplot() -> Any:
    """Return `matplotlib.pyplot`, which needs no display then.

    Raises:
        ImportError: there is no matplotlib; the text says what to do.
    """
    try:
        # optional: only reports draw
        import matplotlib
    except ImportError as error:
        raise ImportError("needs matplotlib; pip install matplotlib, or leave it out") from error
    matplotlib.use("Agg")
    # optional: as above; it looks at the choice just made
    from matplotlib import pyplot as made

    return made
