"""The report as a PNG of its curves and as one self-contained HTML file."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import Any

from deepspeed.utils import reports
from deepspeed.verify.oracle import UsageError
from deepspeed.verify.oracle.report import Report, Verdict, cells, summary

SUFFIXES = (".html", ".png")
CLASSES = dict(zip(Verdict, ("good", "bad", "quiet", "bad"), strict=True))
HEADINGS = (
    *("check", "parameters", "gradient error / allowed", "relative"),
    *("parameter error / allowed", "divisor", "result", ""),
)


def require_plotting(path: str) -> None:
    """Refuse early what cannot be written at the end."""
    if Path(path).suffix not in SUFFIXES:
        raise UsageError(f"--report {path}: the file must end in {' or '.join(SUFFIXES)}")
    if not Path(path).resolve().parent.is_dir():
        raise UsageError(f"--report {path}: there is no folder {Path(path).resolve().parent}")
    try:
        reports.pyplot()
    except ImportError as error:
        raise UsageError(f"--report {path}: {error}") from error


def write_report(report: Report, path: str) -> None:
    """Write `path`: the curves for .png, everything for .html."""
    image = draw(report)
    if Path(path).suffix == ".png":
        Path(path).write_bytes(image)
        return
    Path(path).write_text(page(report, image), encoding="utf-8")


def draw(report: Report) -> bytes:
    """Draw loss, norm and errors over steps, as PNG."""
    plot = reports.pyplot()
    figure, (losses, norms, errors) = plot.subplots(1, 3, figsize=(13, 4), dpi=110)
    long = {name: curve for name, curve in report.curves.items() if curve["step"]}
    for number, (name, curve) in enumerate(long.items()):
        steps, look = curve["step"], {"marker": "o", "color": f"C{number % 10}"}
        losses.plot(_values(curve["loss"]), label=name, **look)
        norms.plot(_values(curve["norm"]), label=name, **look)
        norms.plot(steps, _values(curve["expected_norm"]), "xk")
        errors.plot(steps, _values(curve["gradient"]), label=f"{name}: gradient", **look)
        if any(value is not None for value in curve["parameter"]):
            look |= {"marker": "s", "linestyle": ":"}
            errors.plot(steps, _values(curve["parameter"]), label=f"{name}: parameter", **look)
    errors.axhline(1.0, color="red", linewidth=1)
    for axes, title in (
        (losses, "loss (mean over ranks)"),
        (norms, "gradient norm (x: reference)"),
        (errors, "largest error / allowed"),
    ):
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.locator_params(axis="x", integer=True)
        axes.grid(alpha=0.3)
        if long:
            axes.legend(fontsize="x-small")
    # The last line is that of the allowance.
    if any(value > 0 for line in errors.get_lines()[:-1] for value in line.get_ydata()):
        errors.set_yscale("log")
    figure.tight_layout()
    file = io.BytesIO()
    figure.savefig(file, format="png")
    plot.close(figure)
    return file.getvalue()


def _values(curve: list[Any]) -> list[float]:
    return [float("nan") if value is None else float(value) for value in curve]


def page(report: Report, image: bytes) -> str:
    """Write the HTML file's text."""
    heads = "".join(f"<th>{html.escape(text)}</th>" for text in HEADINGS)
    body = "".join(_row(cells(row), row.verdict, row.detail) for row in report.rows)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in report.notes)
    said = ((html.escape(str(k)), html.escape(str(v))) for k, v in report.settings.items())
    settings = "".join(f"<li>{key}: <code>{value}</code></li>" for key, value in said)
    result = CLASSES[Verdict.PASS if report.passed else Verdict.FAIL]
    return reports.page(
        "ds_verify",
        "<h1>ds_verify</h1>"
        f'<p class="{result}"><b>{html.escape(summary(report))}</b></p><ul>{settings}</ul>'
        f'<div class="wide"><table><tr>{heads}</tr>{body}</table></div><ul>{notes}</ul>'
        f'<img alt="curves" src="data:image/png;base64,{base64.b64encode(image).decode()}">',
    )


def _row(texts: list[str], verdict: Verdict, detail: str) -> str:
    first = f"<td>{html.escape(texts[0])}</td>"
    family = f'<td class="f">{html.escape(texts[1])}</td>'
    numbers = "".join(f'<td class="n">{html.escape(text)}</td>' for text in texts[2:-1])
    result = f'<td class="{CLASSES[verdict]}"><b>{verdict.value}</b></td>'
    return f"<tr>{first}{family}{numbers}{result}<td><pre>{html.escape(detail)}</pre></td></tr>"
