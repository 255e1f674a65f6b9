"""The agent of an elastic job: what processes get, who starts again, when it gives up."""

import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

from deepspeed.elasticity import DSElasticAgent
from deepspeed.launcher.job.rendezvous import QUICK_FAILURE_SECONDS, PatientAgent

QUICK, LONG = QUICK_FAILURE_SECONDS - 1, QUICK_FAILURE_SECONDS
RESTARTS = 100


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An agent on a clock of its own, whose processes do as `agent.state` says."""
    agent: Any = PatientAgent.__new__(PatientAgent)
    agent.now, agent._remaining_restarts, agent.waiting, agent.gave_up = 0.0, RESTARTS, 0, False
    agent.rendezvous = SimpleNamespace(
        num_nodes_waiting=lambda: agent.waiting,
        give_up=lambda: setattr(agent, "gave_up", True),
    )
    monkeypatch.setattr(time, "monotonic", lambda: agent.now)
    monkeypatch.setattr(LocalElasticAgent, "_start_workers", lambda self, group: {})
    result = staticmethod(lambda group: RunResult(agent.state))
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", result)
    return agent


def play(agent: Any, lasts: float, waiting: int = 0) -> None:
    """A round of processes that fail after so many seconds."""
    group: Any = SimpleNamespace(spec=SimpleNamespace(rdzv_handler=agent.rendezvous))
    agent._start_workers(group)
    agent.waiting = waiting
    agent.state = WorkerState.HEALTHY
    assert agent._monitor_workers(group).state == WorkerState.HEALTHY
    agent.now += lasts
    agent.state = WorkerState.FAILED
    assert agent._monitor_workers(group).state == WorkerState.FAILED


@pytest.mark.parametrize(
    "rounds, gives_up",
    [
        ([(QUICK, 0)] * 2, False),
        ([(QUICK, 0)] * 3, True),
        ([(LONG, 0)] * 10, False),
        # Kills: counting all of a job's failures.
        ([(QUICK, 0), (QUICK, 0), (LONG, 0), (QUICK, 0), (QUICK, 0)], False),
        ([(LONG, 0), (QUICK, 0), (QUICK, 0), (QUICK, 0)], True),
        # Kills: counting what ended because nodes came one after the other, or forgetting by it.
        ([(QUICK, 1)] * 5, False),
        ([(QUICK, 0), (QUICK, 0), (QUICK, 1), (QUICK, 0)], True),
    ],
)
def test_quick_failures_end_it(agent: Any, rounds: list[Any], gives_up: bool) -> None:
    for lasts, waiting in rounds:
        assert agent._remaining_restarts == RESTARTS and not agent.gave_up
        play(agent, lasts, waiting)
    assert agent.gave_up is gives_up
    assert agent._remaining_restarts == (0 if gives_up else RESTARTS)


def test_variables_and_restart(tmp_path: Path) -> None:
    # Kills: an agent that drops `env`, or lets it override what it sets itself.
    script = "echo $COLOUR $RANK >> seen; [ -e failed ] || { touch failed; exit 1; }"
    how = {"local_addr": "127.0.0.1", "is_host": True, "store_type": "file"}
    where = ("c10d", str(tmp_path / "store"), uuid.uuid4().hex)
    handler = registry.get_rendezvous_handler(RendezvousParameters(*where, 1, 1, **how))
    program = {"entrypoint": "sh", "args": ("-c", f"cd {tmp_path}; {script}"), "max_restarts": 1}
    spec = WorkerSpec(role="default", local_world_size=1, rdzv_handler=handler, **program)
    variables = {"COLOUR": "blue", "RANK": 7}
    result = DSElasticAgent(spec, variables, log_dir=str(tmp_path / "logs")).run()
    assert not result.is_failed()
    assert (tmp_path / "seen").read_text() == "blue 0\nblue 0\n"
