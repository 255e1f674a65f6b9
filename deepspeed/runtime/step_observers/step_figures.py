"""What the engine records of each step for `ds_watch`: loss, norms, rates, times, memory, tokens.

Nothing here makes the host wait for the device. Numbers are copied there to page-locked memory and
phases are bracketed by events; a step is recorded when all of its numbers have arrived, which is
looked at while later steps are given out. Only when more than `MAX_UNREAD` steps are on their way,
and at the end, is a copy waited for.
"""

from __future__ import annotations

import atexit
import math
import platform
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.accelerator import get_accelerator, runs_ahead
from deepspeed.git_version_info import version
from deepspeed.monitor.watch.record import FORMAT
from deepspeed.runtime.engine_parts.digest import digest_of_all
from deepspeed.runtime.step_observers.step_observer import MeanLoss, StepObserver
from deepspeed.runtime.streams import LateNumber
from deepspeed.runtime.utils import tensors_in
from deepspeed.utils.timer import MAX_UNREAD, Span, begin_span, end_span

if TYPE_CHECKING:
    from deepspeed.runtime.engine_parts.engine_state import WatchedEngine

# Asking an allocator takes a tenth of a millisecond.
MEMORY_EVERY_S = 1.0
Spare = dict[int, list[LateNumber]]
"""Page-locked memory by its number of elements."""


class _UnreadStep:
    """A step, of which `line` is known and some numbers are on their way."""

    def __init__(self, line: dict[str, Any], spans: dict[str, list[Span]]) -> None:
        self.line = line
        self.spans = spans
        self._known: dict[str, list[float]] = {}
        self._late: list[tuple[LateNumber, list[tuple[str, int]]]] = []

    def send(self, numbers: Mapping[str, torch.Tensor], spare: Spare) -> None:
        """Start copying fp32 tensors, 0-d or 1-d, to the host, those of a device as one."""
        ahead = {name: t.reshape(-1) for name, t in numbers.items() if runs_ahead(t)}
        self._known |= {
            name: t.reshape(-1).tolist() for name, t in numbers.items() if name not in ahead
        }
        if ahead:
            packed = torch.cat(list(ahead.values()))
            unused = spare.setdefault(packed.numel(), [])
            late = unused.pop() if unused else LateNumber()
            late.post(packed)
            self._late.append((late, [(name, t.numel()) for name, t in ahead.items()]))

    def is_there(self) -> bool:
        return all(late.is_there() for late, _ in self._late) and all(
            span.is_over() for spans in self.spans.values() for span in spans
        )

    def read(self, spare: Spare) -> dict[str, list[float]]:
        """Return all numbers by name; what they came in goes back to `spare`."""
        for late, lengths in self._late:
            values = late.read_list()
            spare.setdefault(len(values), []).append(late)
            numbers = iter(values)
            self._known |= {name: [next(numbers) for _ in range(n)] for name, n in lengths}
        self._late = []
        return self._known


class StepFigures(StepObserver):
    """Records steps."""

    def __init__(self, engine: WatchedEngine) -> None:
        self._engine = engine
        self._loss = MeanLoss()
        self._marks: dict[str, Any] = {}
        self._spans: dict[str, list[Span]] = {}
        self._tokens = 0
        self._awaits_loss = False  # that of a pipeline comes after the step
        self._rates: list[Any] = []
        self._last_end: Any = None
        self._memory_at = -MEMORY_EVERY_S
        self._unread: deque[_UnreadStep] = deque()
        self._spare: Spare = {}
        self._held: _UnreadStep | None = None  # until a pipeline says its loss
        engine.monitor.describe(self._about())
        # Scripts seldom destroy their engine, and the last steps are still to be read.
        self._at_exit = partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def _about(self) -> dict[str, Any]:
        engine = self._engine
        optimizer = engine.basic_optimizer
        groups = optimizer.param_groups if optimizer is not None else []
        return {
            "watch": FORMAT,
            "began": time.time(),
            "job": engine._config.tree.watch.job_name,
            "stage": engine.zero_optimization_stage(),
            "dtype": str(engine.model_dtype).removeprefix("torch."),
            "optimizer": engine.optimizer_name(),
            "world_size": engine.world_size,
            "data_parallel": engine.dp_world_size,
            "batch": engine.train_batch_size(),
            "micro_batch": engine.train_micro_batch_size_per_gpu(),
            "accumulation": engine.gradient_accumulation_steps(),
            "clip": engine.gradient_clipping(),
            "device": engine.device.type,
            "host": platform.node(),
            "deepspeed": version,
            "torch": torch.__version__,
            "groups": [str(g.get("name", f"group {i}")) for i, g in enumerate(groups)],
        }

    # Phases

    def _begin(self, phase: str) -> None:
        self._marks[phase] = begin_span()

    def _end(self, phase: str) -> None:
        mark = self._marks.pop(phase, None)
        if mark is not None:
            self._spans.setdefault(phase, []).append(end_span(mark))

    def saw_inputs(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._tokens += tokens_in(inputs, kwargs)

    def forward_starts(self, training: bool) -> None:
        if not training:
            return
        self._record_held()
        self._record_read()
        if self._last_end is None:
            self._last_end = begin_span()
        self._begin("forward")

    def forward_ended(self) -> None:
        self._end("forward")

    def saw_loss(self, loss: torch.Tensor) -> None:
        self._loss.add(loss)

    def backward_starts(self) -> None:
        self._begin("backward")

    def reduction_starts(self) -> None:
        self._end("backward")
        self._begin("communication")

    def reduction_ended(self) -> None:
        self._end("communication")

    def step_starts(self) -> None:
        # Before the step: the schedule moves on within it.
        self._rates = self._engine.get_lr()
        self._begin("step")

    def step_ended(self) -> None:
        self._end("step")
        if self._last_end is not None:
            self._spans["total"] = [end_span(self._last_end)]
        self._last_end = begin_span()
        step = _UnreadStep(self._known_line(), self._spans)
        step.send(self._numbers(step.line), self._spare)
        self._spans, self._tokens = {}, 0
        self._held = step
        if not self._awaits_loss:
            self._record_held()
            self._record_read()

    def saw_batch_loss(self, loss: torch.Tensor) -> None:
        if self._held is not None:
            self._held.send({"loss": loss.detach().float()}, self._spare)
            if "digests" in self._held.line:
                steps, ranks = (
                    self._engine.gradient_accumulation_steps(),
                    self._engine.dp_world_size,
                )
                self._held.line["losses"] = steps * ranks
        self._record_held()
        self._record_read()

    def _known_line(self) -> dict[str, Any]:
        engine = self._engine
        line: dict[str, Any] = {
            "step": engine.global_steps,
            "time": round(time.time(), 3),
            "samples": engine.train_batch_size(),
        }
        if (digests := engine._digests) is not None:
            line["digest"] = digest_of_all(digests.by_name)
            line["digests"] = digests.by_name
            if digests.losses:
                line["losses"] = digests.losses
        if self._tokens:
            line["tokens"] = self._tokens * engine.parallel_map.replicas.size
        if engine.curriculum_scheduler_legacy is not None:
            line["difficulty"] = engine.curriculum_scheduler_legacy.get_current_difficulty()
        if not any(isinstance(rate, torch.Tensor) for rate in self._rates):
            line["lr"] = [float(rate) for rate in self._rates]
        if time.monotonic() - self._memory_at >= MEMORY_EVERY_S:
            self._memory_at = time.monotonic()
            accelerator = get_accelerator()
            line["memory"] = accelerator.memory_allocated()
            line["peak_memory"] = accelerator.max_memory_allocated()
        return line

    def _numbers(self, line: dict[str, Any]) -> dict[str, torch.Tensor]:
        """What is on the device of the step that just ended; how to read it goes into its line."""
        numbers: dict[str, torch.Tensor] = {}
        loss = self._loss.take()
        if self._engine._digests is not None and self._engine._digests.loss is not None:
            loss = self._engine._digests.loss  # rank 0's own is another one on other ranks
        self._awaits_loss = loss is None
        if loss is not None:
            numbers["loss"] = loss
        if "lr" not in line:
            numbers["lr"] = torch.stack(
                [torch.as_tensor(rate, device=self._engine.device).float() for rate in self._rates]
            )
        sequence = self._engine._sequence
        norms = sequence.unread_norms if sequence is not None else None
        if norms is not None:
            line |= {"loss_scale": norms.scale, "skips": norms.skips}
            numbers["norm"] = norms.norm.float() / norms.scale
            if norms.group_squares is not None:
                numbers["group_norms"] = norms.group_squares.sqrt() * norms.group_factor
        return numbers

    # Recording

    def _record_held(self) -> None:
        if self._held is not None:
            self._unread.append(self._held)
            self._held = None

    def _record_read(self, all_of_them: bool = False) -> None:
        unread = self._unread
        while unread and (all_of_them or len(unread) > MAX_UNREAD or unread[0].is_there()):
            step = unread.popleft()
            numbers = step.read(self._spare)
            line = step.line
            for name in ("loss", "norm"):
                if name in numbers:
                    line[name] = numbers[name][0]
            for name in ("group_norms", "lr"):
                if name in numbers:
                    line[name] = numbers[name]
            if line.pop("skips", False) and not math.isfinite(line["norm"]):
                line["skipped"] = True
            line["ms"] = {
                phase: round(sum(span.get_elapsed_msec() for span in spans), 4)
                for phase, spans in step.spans.items()
            }
            self._engine.monitor.record(line)

    def close(self) -> None:
        atexit.unregister(self._at_exit)
        self._record_held()
        self._record_read(all_of_them=True)
        self._engine.monitor.end_record()

    def close_at_exit(self) -> None:
        """End the record of an engine that nobody has destroyed."""
        # The interpreter keeps what has ended it. A device may have failed then: wait for nothing.
        error = getattr(sys, "last_value", None)
        self._record_held()
        self._record_read(all_of_them=error is None)
        self._engine.monitor.end_record(error)


def _close_at_exit(figures: weakref.ref[StepFigures]) -> None:
    alive = figures()
    if alive is not None:
        alive.close_at_exit()


def tokens_in(inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Count the tokens of a micro-batch: the elements of `input_ids`, otherwise of the first tensor
    of whole numbers `[batch, sequence]`, up to `curriculum_seqlen` of each sequence; 0 if there is
    none.
    """
    named = kwargs.get("input_ids")
    candidates = [named] if isinstance(named, torch.Tensor) else tensors_in((inputs, dict(kwargs)))
    for tensor in candidates:
        if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.dtype != torch.bool:
            rows, length = tensor.shape
            return rows * min(length, kwargs.get("curriculum_seqlen", length))
    return 0
