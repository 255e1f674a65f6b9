"""The global batch of every step: collected from what the user gives, and cut into micro-batches in
different ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import Dataset, IterableDataset, default_collate

from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.verify.oracle import UsageError
from deepspeed.verify.oracle.drawn import (
    DrawnBatches,
    code_of,
    inputs_for,
    inputs_like,
    listed,
    of_rows,
)
from deepspeed.verify.oracle.workload import (
    Batch,
    Batches,
    Workload,
    has_rows,
    is_by_rank,
    kind_of,
)


@dataclass(frozen=True)
class Shape:
    """How one global batch is cut."""

    world: int  # data-parallel ranks
    accumulation: int  # micro-batches per rank and step
    rows: int  # samples per micro-batch

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one step over all ranks."""
        return self.world * self.accumulation

    def place(self, rank: int, micro: int) -> int:
        """Position of a rank's micro-batch in the global batch."""
        return micro * self.world + rank

    def splits(self) -> list[Shape]:
        """Cut the same global batch otherwise: all at once, and into as many (at most 8) as fit."""
        samples = self.accumulation * self.rows
        finest = next(a for a in range(min(samples, 8), 0, -1) if samples % a == 0)
        wanted = {1, finest} - {self.accumulation}
        return [Shape(self.world, a, samples // a) for a in sorted(wanted)]


class GlobalBatches:
    """The global batch of every step, cut as asked."""

    def __init__(self, workload: Workload, shape: Shape, steps: int) -> None:
        self.shape = shape
        # Why micro-batches cannot be joined to a whole batch; None if they can.
        self.whole_reason: str | None = None
        self.notes: list[str] = []  # what was done to batches, for the report
        found = self._collected(workload, steps)
        self._all = found
        every = shape.micro_batches
        self._steps = [found[start : start + every] for start in range(0, len(found), every)]
        self._whole: dict[int, Any] = {}
        kinds = [
            (tree_flatten(batch)[1], [leaf.shape[1:] for leaf in _tensors(batch) if leaf.dim()])
            for batch in self._all
        ]
        if self.whole_reason is None and any(kind != kinds[0] for kind in kinds):
            self.whole_reason = "batches differ in structure or shape"

    def _collected(self, workload: Workload, steps: int) -> list[Batch]:
        """The micro-batches in the order (step, micro-batch, rank); UsageError with all that is
        wrong with them, and what to write instead.
        """
        rows, wanted = self.shape.rows, self.shape.micro_batches * steps
        if workload.batches is None:
            wrong, found = ["there are no batches"], []
        else:
            found = list(islice(self._pieces(workload.batches), wanted))
            wrong = [f"batches ended after {len(found)}"] if len(found) < wanted else []
        for number, batch in enumerate(found):
            sizes = _row_counts(batch)
            if len(sizes) != 1:
                self.whole_reason = (
                    "the tensors of a batch have no common number of samples in front "
                    f"({sorted(sizes)}); a loader gives micro-batches of "
                    f"{rows} samples, a Dataset single ones"
                )
                break
            if sizes != {rows}:
                wrong.append(f"batch {number} has {sizes.pop()} samples")
                break
        if wrong:
            needed = (
                f"{steps} steps x {self.shape.accumulation} micro-batches x {self.shape.world} "
                f"ranks need {wanted} micro-batches of {rows} samples "
                "(train_micro_batch_size_per_gpu), or batches of a multiple of it, which are cut"
            )
            remedy = _remedy(workload, found[0] if found else None, rows)
            raise UsageError(f"--model: {', and '.join(wrong)}; {needed}. {remedy}")
        return found

    def _pieces(self, batches: Batches) -> Iterator[Batch]:
        """All that the user gives, cut."""
        if callable(batches) and not isinstance(batches, (Dataset, Iterable)):
            ranks = [self._pieces_of_rank(batches, rank) for rank in range(self.shape.world)]
            return chain.from_iterable(zip(*ranks, strict=True))
        if _is_map_style(batches):
            return _collated(batches, self.shape.rows)
        if isinstance(batches, Iterable):
            return chain.from_iterable(map(self._cut, batches))
        raise UsageError(
            f"batches is {kind_of(batches)}; give a function of (rank, step) or of (step, "
            "micro_batch, rank), a dataset or an iterable"
        )

    def _pieces_of_rank(self, batches: Callable[..., Batch], rank: int) -> Iterator[Batch]:
        """A rank's, without end: a function is asked for the next when the last is used up."""
        made: Iterator[Batch]
        if is_by_rank(batches):
            made = (batches(rank=rank, step=step) for step in count())
        else:
            # Steps have no end, which is why this is not itertools.product.
            micro_batches = range(self.shape.accumulation)
            made = (batches(step, micro, rank) for step in count() for micro in micro_batches)
        return chain.from_iterable(map(self._cut, made))

    def _cut(self, batch: Batch) -> list[Batch]:
        """Cut a batch of several micro-batches; any other is left as it is."""
        rows, sizes = self.shape.rows, _row_counts(batch)
        samples = sizes.pop() if len(sizes) == 1 else rows
        if samples <= rows or samples % rows:
            return [batch]
        if not self.notes:
            text = f"of {rows} (train_micro_batch_size_per_gpu)"
            self.notes.append(f"batches of {samples} samples are cut into micro-batches {text}")
        return [_rows(batch, start, rows) for start in range(0, samples, rows)]

    @property
    def num_steps(self) -> int:
        """Count the steps that there are batches for."""
        return len(self._steps)

    def micro_batches(self, step: int, shape: Shape | None = None) -> list[Batch]:
        """The micro-batches of a step in the order of `Shape.place`."""
        own = (self.shape.micro_batches, self.shape.rows)
        if shape is None or (shape.micro_batches, shape.rows) == own:
            return self._steps[step]
        whole, rows = self.whole(step), shape.rows
        return [_rows(whole, place * rows, rows) for place in range(shape.micro_batches)]

    def whole(self, step: int) -> Batch:
        """The global batch of a step as one batch; `whole_reason` must be None."""
        if step not in self._whole:
            flat = [tree_flatten(batch)[0] for batch in self._steps[step]]
            structure = tree_flatten(self._steps[step][0])[1]
            leaves = [_joined(parts) for parts in zip(*flat, strict=True)]
            self._whole[step] = tree_unflatten(leaves, structure)
        return self._whole[step]

    def checksum(self) -> float:
        """Return a number that differs when batches differ, for comparison between ranks."""
        total = 0.0
        for number, batch in enumerate(self._all, start=1):
            for leaf in _tensors(batch):
                flat = leaf.detach().double().reshape(-1)
                weights = torch.linspace(1.0, 2.0, flat.numel(), dtype=torch.float64)
                total += number * float((flat * weights).sum())
        return total


def _tensors(batch: Batch) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)]


def _joined(leaves: Sequence[object]) -> object:
    tensors = [leaf for leaf in leaves if has_rows(leaf)]
    return torch.cat(tensors) if tensors else leaves[0]


def _rows(batch: Batch, start: int, count: int) -> Batch:
    return tree_map(lambda leaf: leaf[start : start + count] if has_rows(leaf) else leaf, batch)


def _row_counts(batch: Batch) -> set[int]:
    """How many samples the tensors of a batch have: one number, if they have one in common."""
    return {leaf.shape[0] for leaf in _tensors(batch) if leaf.dim()}


def _is_map_style(batches: Batches) -> bool:
    is_dataset = isinstance(batches, Dataset) and not isinstance(batches, IterableDataset)
    return is_dataset and hasattr(batches, "__getitem__")


def _collated(dataset: Batches, rows: int) -> Iterator[Batch]:
    size = len(dataset)
    if size < 1:
        raise UsageError("batches: the dataset is empty")
    for start in count(step=rows):
        # A small dataset is gone through again: every step still has one well-defined global batch.
        yield default_collate([dataset[(start + row) % size] for row in range(rows)])


def _remedy(workload: Workload, given: Batch | None, rows: int) -> str:
    """Say how batches are given, in lines to paste: the same ones in the right number, or those
    that suit the model.
    """
    if isinstance(workload.batches, DrawnBatches):
        return f"Write\n  --data '{listed(of_rows(workload.batches.inputs, rows))}'"
    inputs = of_rows(inputs_like(given), rows)
    origin = "like those there are"
    if not inputs:
        paired = workload.loss is not None or isinstance(workload.module, PipelineModule)
        inputs = inputs_for(workload.module, rows, paired)
        origin = "guessed from the layers, so correct them"
    lines = [
        f"Give them so, or let the command draw them, by shapes ({origin}):",
        f"  --data '{listed(inputs)}'",
        "or write a function beside the model's, with these names of parameters:",
        f"  def batch(rank, step): return {code_of(inputs)}",
    ]
    if given is None and workload.loss is None and not isinstance(workload.module, PipelineModule):
        lines.append(
            "What forward returns must be the loss; otherwise return (module, None, loss) with a "
            "function loss(output, batch)."
        )
    return "\n".join(lines)
