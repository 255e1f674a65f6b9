"""What the engine prints when it is asked to: progress, phases, configuration, communication."""

import contextlib
import io
from typing import Any

import torch

import deepspeed
from deepspeed import comm as dist
from unit.common import DistributedTest
from unit.models import config_of, sgd
from unit.one_process import train


def printed(steps: int, **keys: Any) -> str:
    """Standard output of a run."""
    out, config = io.StringIO(), config_of(1, 2, optimizer=sgd(0.25), **keys)
    with contextlib.redirect_stdout(out):
        engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
        train(engine, [torch.ones(2, 4)] * steps, lambda model, batch: model(batch).sum())
        engine.destroy()
    return out.getvalue()


class TestReports(DistributedTest):
    world_size = 1

    def test_progress_every_so_many_steps(self) -> None:
        # Kills: a line every step, a line that the log level hides, none at all.
        out = printed(4, steps_per_print=2)
        assert out.count("step=") == 2 and "step=2, skipped=0, lr=[0.25]" in out and "step=4" in out
        # The first steps do not count, and their rate was said to be minus infinity.
        assert "-inf" not in out and "samples/s=not known yet" in out
        assert "step=" not in printed(2) and "step=" not in printed(2, steps_per_print=float("inf"))

    def test_phases(self) -> None:
        out = printed(2, wall_clock_breakdown=True)
        assert all(phase in out for phase in ("fwd", "bwd", "step"))
        assert "fwd" not in printed(2)

    def test_configuration(self) -> None:
        # Kills: a dump that the log level hides, and one that shows a secret.
        out = printed(0, dump_state=True, comet={"enabled": False, "api_key": "secret"})
        assert "zero_optimization" in out and '"stage": 1' in out and "secret" not in out
        assert "zero_optimization" not in printed(0)

    def test_communication(self) -> None:
        # Kills: a comms logger that the configuration does not switch on.
        with contextlib.redirect_stdout(io.StringIO()):
            dist.reset_log()
            printed(2, comms_logger={"enabled": True})
            summary = dist.log_summary(return_dict=True)
            dist.configure(enabled=False)
        assert summary
