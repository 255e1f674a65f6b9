"""torch's elastic agent, which gives up when its processes fail soon after their start.

Owns: counting such failures. Does not own: the restarts, which are torch's, nor how the other nodes
learn that this one gives up (`rendezvous`). Called by: `agent`.
"""

import time
from typing import Any, cast

import torch.distributed.launcher.api
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from deepspeed.launcher.elastic import QUICK_FAILURE_SECONDS, QUICK_FAILURES
from deepspeed.launcher.rendezvous import WatchedRendezvous
from deepspeed.utils.logging import logger


class PatientAgent(LocalElasticAgent):
    """Restarts processes as torch's agent does, until `QUICK_FAILURES` in a row have come within
    `QUICK_FAILURE_SECONDS` of their start; then ends as after its last restart.
    """

    _started_at = 0.0
    _quick_failures = 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._started_at = time.monotonic()
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.UNHEALTHY, WorkerState.FAILED):
            # It is the one that `agent` asks torch for.
            self._count_failure(cast(WatchedRendezvous, worker_group.spec.rdzv_handler))
        return result

    def _count_failure(self, rendezvous: WatchedRendezvous) -> None:
        if time.monotonic() - self._started_at >= QUICK_FAILURE_SECONDS:
            self._quick_failures = 0
            return
        if rendezvous.num_nodes_waiting():
            # A node has come, and these are its peers' ends; or another failed before, and counts.
            return
        self._quick_failures += 1
        if self._quick_failures == QUICK_FAILURES:
            logger.error(
                "the processes have failed within %g seconds of their start %d times in a row: "
                "not starting them again",
                QUICK_FAILURE_SECONDS,
                QUICK_FAILURES,
            )
            self._remaining_restarts = 0
            rendezvous.give_up()


def install() -> None:
    """Make it the agent of torch's launches in this process."""
    torch.distributed.launcher.api.LocalElasticAgent = PatientAgent  # type: ignore[misc]  # a class by another of its kind
