"""What reports are made of: HTML pages, and pictures drawn by matplotlib where it is there.

A page is one file that loads nothing, is readable on narrow and wide screens, and light or dark as
the reader's system is.
"""

from __future__ import annotations

import html
from typing import Any

# Colors have names, so that scripts and drawings in a page follow the reader's choice too.
STYLE = """\
:root{color-scheme:light dark;--ground:#fff;--raised:#f6f8fa;--text:#1f2328;--quiet:#59636e;
--line:#d0d7de;--good:#1a7f37;--bad:#cf222e;--one:#0969da;--two:#bc4c00;--three:#8250df;
--four:#1a7f37;--five:#bf3989;--six:#9a6700;--seven:#1b7c83;--eight:#6e7781}
@media(prefers-color-scheme:dark){:root{--ground:#0d1117;--raised:#161b22;--text:#e6edf3;
--quiet:#9198a1;--line:#30363d;--good:#3fb950;--bad:#f85149;--one:#58a6ff;--two:#f0883e;
--three:#bc8cff;--four:#3fb950;--five:#f778ba;--six:#d29922;--seven:#39c5cf;--eight:#8b949e}}
*{box-sizing:border-box}
body{font:14px/1.45 system-ui,-apple-system,"Segoe UI",sans-serif;margin:0 auto;max-width:1400px;
padding:1.5em clamp(.8em,2.5vw,2em);background:var(--ground);color:var(--text)}
h1{font-size:1.5em;margin:0 0 .3em}h2{font-size:1.05em;margin:1.6em 0 .5em}
table{border-collapse:collapse;width:100%}
td,th{padding:.25em .6em;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
th{color:var(--quiet);font-weight:600}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.f{font-family:ui-monospace,monospace;overflow-wrap:anywhere}
pre{margin:0;white-space:pre-wrap}img{max-width:100%}
.wide{overflow-x:auto}.quiet{color:var(--quiet)}.good{color:var(--good)}.bad{color:var(--bad)}
"""


def page(title: str, body: str, style: str = "") -> str:
    """A whole page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}{style}</style></head>"
        f"<body>{body}</body></html>\n"
    )


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
