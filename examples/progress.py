"""What the example shows of a run: its numbers, a progress bar, and a picture of the loss."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

SMOOTHING = 0.8


@dataclass
class History:
    """Numbers of every step; saved with each checkpoint, so that a resumed run continues them.

    Attributes:
        steps: One dictionary per step: `step`, `loss` (nats per byte, mean over ranks),
            `grad_norm`, `lr`.
        validation: (step, loss) pairs.
    """

    steps: list[dict[str, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)

    def add_step(self, step: int, loss: float, grad_norm: float, lr: float) -> None:
        """Append a training step."""
        self.steps.append({"step": step, "loss": loss, "grad_norm": grad_norm, "lr": lr})

    def add_validation(self, step: int, loss: float) -> None:
        """Append a validation."""
        self.validation.append((step, loss))

    def state(self) -> dict[str, Any]:
        """Plain data, for checkpoint and log."""
        return {"steps": list(self.steps), "validation": [list(pair) for pair in self.validation]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> History:
        """Back from `state()`."""
        return cls(
            list(state["steps"]), [(int(step), float(loss)) for step, loss in state["validation"]]
        )

    def smoothed_losses(self) -> list[float]:
        """Running means of the training loss, unbiased at the start."""
        smoothed, total, weight = [], 0.0, 0.0
        for entry in self.steps:
            total = SMOOTHING * total + (1 - SMOOTHING) * entry["loss"]
            weight = SMOOTHING * weight + (1 - SMOOTHING)
            smoothed.append(total / weight)
        return smoothed


class Progress:
    """A bar with tokens/s, loss, gradient norm and learning rate.

    Args:
        done: Steps behind the run.
        end: Steps at its end.
        tokens: Tokens per step over all ranks.
        visible: Whether this process shows it.
    """

    def __init__(self, done: int, end: int, tokens: int, visible: bool) -> None:
        self._bar = tqdm(
            total=end,
            initial=done,
            disable=not visible,
            unit="step",
            dynamic_ncols=True,
            mininterval=0.5,
        )
        self._tokens = tokens
        self._last = time.perf_counter()
        self._seconds = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

    def step(self, history: History) -> None:
        """One step is done; its numbers are the history's last."""
        now = time.perf_counter()
        taken, self._last = now - self._last, now
        self._seconds = (
            SMOOTHING * self._seconds + (1 - SMOOTHING) * taken if self._seconds else taken
        )
        entry = history.steps[-1]
        text = f"tok/s {self._tokens / self._seconds:,.0f}, loss {entry['loss']:.3f}"
        text += f", grad norm {entry['grad_norm']:.2f}, lr {entry['lr']:.1e}"
        if history.validation:
            text += f", validation {history.validation[-1][1]:.3f}"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()


def draw_curve(history: History, path: Path) -> None:
    """Save a PNG of training and validation loss over steps."""
    import matplotlib  # optional: only needed at the end of a run

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    steps = [entry["step"] for entry in history.steps]
    axes.plot(
        steps,
        [entry["loss"] for entry in history.steps],
        color="tab:blue",
        alpha=0.25,
        linewidth=0.8,
    )
    axes.plot(steps, history.smoothed_losses(), color="tab:blue", label="train (running mean)")
    axes.plot(
        *zip(*history.validation, strict=True),
        color="tab:orange",
        marker="o",
        markersize=4,
        label="validation",
    )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("Byte-level GPT")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
