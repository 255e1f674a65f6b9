"""Write the drawing of the layers in ``docs/architecture.md`` from the table that the style tests
hold the package to (``tests/style/layers.py``).

Owns the drawing between the two marks of the page; the rest of the page is written by hand. Run it
after changing the table; a test holds the page to its output.

    python docs/generate_architecture.py            write the drawing
    python docs/generate_architecture.py --check    exit 1 when the drawing is not current
"""

from __future__ import annotations

import argparse
import runpy
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
TABLE = ROOT / "tests" / "style" / "layers.py"
BEGIN, END = "<!-- layers: begin (generate_architecture.py) -->", "<!-- layers: end -->"
WIDTH = 96


def drawing(layers: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    """The layers as a stack of boxes, the highest on top."""
    edge = "+" + "-" * (WIDTH - 2) + "+"
    lines = [edge]
    for number, (what, modules) in reversed(list(enumerate(layers, start=1))):
        names = textwrap.wrap(
            "  ".join(modules), WIDTH - 12, break_long_words=False, break_on_hyphens=False
        )
        lines += [f"| {number:2}  {what}".ljust(WIDTH - 1) + "|"]
        lines += [f"|       {line}".ljust(WIDTH - 1) + "|" for line in names]
        lines.append(edge)
    return "\n".join(lines)


def page_with(text: str, stack: str) -> str:
    """`text` with `stack` between the marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n```\n{stack}\n```\n{END}{after}"


def main() -> int:
    """Write or check the page; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write the layers into docs/architecture.md.")
    parser.add_argument("--check", action="store_true", help="only say whether it is current")
    args = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    current = page_with(text, drawing(runpy.run_path(str(TABLE))["LAYERS"]))
    if args.check:
        return int(text != current)
    PAGE.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
