"""`SpeculativeUpdate`: the bits of an update that waits, whatever happens before the step."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.ops import early_update, state_files
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.aio.handle import AsyncIOHandle
from deepspeed.ops.early_update import SpeculativeUpdate
from deepspeed.ops.host_optimizer import Ranges
from deepspeed.ops.state_files import StateFiles

NUMEL = 12
ALL = [(0, 5), (5, NUMEL)]


class Run:
    """One flat parameter, whose pieces of 5 are delivered to `sent`."""

    def __init__(self, is_early: bool, files: StateFiles | None = None) -> None:
        self.master = (files.zeros if files else torch.zeros)(NUMEL, dtype=torch.float32)
        self.master.copy_(torch.linspace(-1.0, 1.0, NUMEL))
        self.param = nn.Parameter(self.master)
        self.optimizer = DeepSpeedCPUAdam([self.param], lr=0.1, weight_decay=0.1)
        self.optimizer.state_files = files
        self.grad = torch.linspace(2.0, -3.0, NUMEL)
        self.factor = 0.5
        self.sent = torch.zeros(NUMEL)
        self.early: SpeculativeUpdate | None = None
        self.step()
        if is_early:
            # The last element is padding.
            self.early = SpeculativeUpdate(self.optimizer, [self.master], [[(0, NUMEL - 1)]])
            self.early.predict = lambda: 0.5

    def pieces(self) -> Iterator[tuple[int, int]]:
        yield from ((0, 5), (5, 10), (10, NUMEL))

    def low_precision_out(self, start: int, end: int) -> None:
        return None

    def updated(self, start: int, end: int) -> None:
        self.sent[start:end] = self.master[start:end]

    def state(self, slot: str = "exp_avg") -> Any:
        return self.optimizer.state[self.param][slot]

    def land(self, final: Ranges, wait: bool = True) -> None:
        """As the sink does when gradients have come."""
        early = self.early
        if early is None:
            self.grad.add_(1.0)
            return
        early.landing(self.param, self.grad)
        self.grad.add_(1.0)
        early.landed(self.param, self.grad, final)
        for task in early._tasks if wait else ():
            task.exception()

    def step(self) -> None:
        with self.optimizer.fused(self.factor, {self.param: self}, self.early):
            self.optimizer.step()
        if self.early is not None:
            self.early.clear()

    def values(self) -> list[torch.Tensor]:
        kept = (self.master, self.param.detach(), self.sent, self.grad, self.state())
        both = [tensor.clone() for tensor in (*kept, self.state("exp_avg_sq"))]
        return [*both, torch.tensor(self.state("step"))]


def same(a: Run, b: Run) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.values(), b.values(), strict=True))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateFiles:
    """Files whose windows are two elements."""
    monkeypatch.setattr(state_files, "WINDOW_NUMEL", 2)
    return StateFiles(str(tmp_path), lambda: AsyncIOHandle(4096, 4))


def both(act: Callable[[Run], object], files: StateFiles | None = None) -> tuple[Run, Run]:
    runs = Run(True, files), Run(False)
    for run in runs:
        act(run)
        run.step()
    return runs


@pytest.mark.parametrize("final", [ALL, [(1, 11)], [(2, 4)], []], ids=str)
@pytest.mark.parametrize("how", ["alone", "viewed", "unknown"])
def test_what_is_made_is_taken_and_the_rest_is_done_in_the_step(
    final: Ranges, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kills: elements that are left out or updated twice, memory that a view does not see, or that
    # is written while the old values are still seen.
    if how == "unknown":
        monkeypatch.setattr(early_update, "_use_count", None)
    early, plain = Run(True), Run(False)
    views = [early.master[2:5], early.state()[2:5]] if how == "viewed" else []
    for _ in range(3):
        before = early.values()[:2]
        early.land(final), plain.land(final)
        assert all(torch.equal(*pair) for pair in zip(before, early.values()[:2], strict=True))
        memory = early.master.data_ptr()
        early.step(), plain.step()
        assert same(early, plain)
        changes = how == "alone" and final in (ALL, [(1, 11)])
        assert (early.master.data_ptr() != memory) == changes
        assert early.master.data_ptr() == early.param.data_ptr()
    if views:
        assert torch.equal(views[0], early.master[2:5])
        assert torch.equal(views[1], early.state()[2:5])
    assert early.early is not None and early.early.hits == (3 if final else 0)


@pytest.mark.parametrize(
    "final, count",
    # Of the second, windows that take each other's memory are neighbours.
    [(ALL, 6), ([(0, 2), (6, 8), (2, 6), (8, 11)], 6), ([(1, 11)], 5), ([(3, 5)], 0)],
    ids=str,
)
def test_windows_of_files_change_places(final: Ranges, count: int, files: StateFiles) -> None:
    # Kills: a window that is updated before all of it is there, twice, or not at all; what is left
    # that is read where it is to be written; memory that a view does not see.
    run, plain = Run(True, files), Run(False)
    early = run.early
    assert early is not None
    for turn in range(5):
        before, memory, view = run.values()[:2], run.master.data_ptr(), run.state()[2:5]
        run.land(final), plain.land(final)
        assert len(early._begun[run.param].done) == count
        assert all(torch.equal(*pair) for pair in zip(before, run.values()[:2], strict=True))
        if turn < 4:
            del view
        run.step(), plain.step()
        assert same(run, plain), turn
        assert (run.master.data_ptr() != memory) == (turn < 4)
        assert run.master.data_ptr() == run.param.data_ptr()
    assert torch.equal(view, run.state()[2:5]) and (early.hits, early.misses) == (4, 1)


def test_an_error_of_the_disk_ahead_is_the_steps(
    files: StateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kills: an error that nobody hears of, or that is heard of twice, one that spoils what there
    # is, windows that count as written since others are.
    def gone(*args: Any) -> None:
        raise OSError(errno.EIO, "the disk is gone", "state")

    for owner, name in ((StateFiles, "zeros"), (AsyncIOHandle, "async_pwrite")):
        run, plain = Run(True, files), Run(False)
        for forgets in (False, True):
            before = run.values()[:3]
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, gone)
                run.land([(0, 5)]), plain.land([(0, 5)])
            if forgets and run.early is not None:
                run.early.forget()
            run.land([(5, NUMEL)]), plain.land([(5, NUMEL)])
            with pytest.raises(OSError, match="the disk is gone"):
                run.step()
            assert all(torch.equal(*pair) for pair in zip(before, run.values()[:3], strict=True))
            run.optimizer.state[run.param]["step"] -= 1  # of the step that failed
            run.step(), plain.step()
            assert same(run, plain), (name, forgets)


def landed(change: Callable[[Run], object]) -> Callable[[Run], None]:
    def act(run: Run) -> None:
        run.land(ALL)
        change(run)

    return act


def in_between(run: Run) -> None:
    run.land([(0, 5)])
    run.grad[:5].mul_(2.0)
    run.land([(5, NUMEL)])


def with_factor(run: Run) -> None:
    run.land(ALL)
    run.factor = 0.5000000000000001


def with_step(run: Run) -> None:
    run.land(ALL)
    run.optimizer.state[run.param]["step"] += 1


def with_new_memory(run: Run) -> None:
    run.land(ALL)
    run.state().data = run.state() * 2


def with_new_gradient(run: Run) -> None:
    run.land(ALL)
    run.grad = run.grad * 2


def forgotten(run: Run) -> None:
    """What was on its way already lands, and then what it was forgotten for."""
    run.land([(0, 5)])
    if run.early is not None:
        run.early.forget()
    run.land([(5, NUMEL)])
    run.land([])


def failed(run: Run) -> None:
    if run.early is not None:
        # It raises when it is called.
        run.optimizer.run_apart = run.optimizer.run_windows_apart = None  # type: ignore[method-assign,assignment]
    run.land(ALL)


@pytest.mark.parametrize("in_files", [False, True], ids=["memory", "files"])
def test_other_numbers_in_the_step_are_those_that_count(in_files: bool, files: StateFiles) -> None:
    # Kills: each of the comparisons that say whether the step would make the same, left out.
    cases = {
        "gradient": landed(lambda run: run.grad.mul_(2.0)),
        "its view": landed(lambda run: run.grad[3:4].mul_(2.0)),
        "state": landed(lambda run: run.state().mul_(2.0)),
        "master": landed(lambda run: run.master[1:2].mul_(2.0)),
        "parameter": landed(lambda run: run.param.detach().mul_(2.0)),
        "gradient in between": in_between,
        "rate": landed(lambda run: run.optimizer.param_groups[0].update(lr=0.2)),
        "decay": landed(lambda run: run.optimizer.param_groups[0].update(weight_decay=0.0)),
        "factor": with_factor,
        "step": with_step,
        "new state": landed(
            lambda run: run.optimizer.state[run.param].update(exp_avg=run.state() * 2)
        ),
        "new memory": with_new_memory,
        "new gradient": with_new_gradient,
        "forgotten": forgotten,
    }
    for name, act in cases.items():
        early, plain = both(act, files if in_files else None)
        assert same(early, plain), name
        assert early.early is not None and (early.early.hits, early.early.misses) == (0, 1), name
    early, plain = both(failed, files if in_files else None)
    assert same(early, plain)


def test_a_thousand_updates_in_vain_leave_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills: anything that is written to masters or state ahead of the step.
    monkeypatch.setattr(early_update, "MAX_PAUSE", 0)
    early, plain = Run(True), Run(False)
    for number in range(1000):
        for run in (early, plain):
            run.land(ALL, wait=number % 2 == 0)
            run.factor = 0.5 / (2 + number)
            run.step()
        assert same(early, plain), number
    assert early.early is not None and (early.early.hits, early.early.misses) == (0, 1000)


def test_pauses_double_after_misses_and_end_with_a_hit() -> None:
    # Kills: an update in vain in every step where every step clips, or none ever again.
    run, found = Run(True), []
    early = run.early
    assert early is not None
    for number in range(40):
        run.factor = 0.5 if number > 16 else 0.25
        run.land(ALL)
        found.append(bool(early._begun))
        run.step()
    begun = [number for number, is_begun in enumerate(found) if is_begun]
    assert begun == [0, 2, 6, 14, *range(30, 40)] and (early.hits, early.misses) == (10, 4)
    early.destroy()


def test_state_that_the_step_would_convert_waits_for_it() -> None:
    def converted(run: Run) -> None:
        state = run.optimizer.state[run.param]
        state["exp_avg"] = state["exp_avg"].double()
        run.land(ALL)

    def missing(run: Run) -> None:
        run.optimizer.state.clear()
        run.land(ALL)

    for act in (converted, missing):
        early, plain = both(act)
        assert same(early, plain)
        assert early.early is not None and (early.early.hits, early.early.misses) == (0, 0)
