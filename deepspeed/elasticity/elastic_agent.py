"""torch's elastic agent under upstream's name, for programs that run one themselves.

It gives the processes variables beside this process's own; rendezvous, restarts and signals are
torch's. The `deepspeed` command reaches the same agent through `deepspeed.launcher.agent`.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest


class _WithVariables(DefaultLogsSpecs):
    """Log files as torch has them; the agent shows it every process's variables before."""

    def __init__(self, log_dir: str | None, variables: dict[str, str]) -> None:
        super().__init__(log_dir=log_dir)
        self._variables = variables

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Complete the variables where the agent has not set them."""
        for environment in envs.values():
            for name, value in self._variables.items():
                environment.setdefault(name, value)
        return super().reify(envs)


class DSElasticAgent(LocalElasticAgent):
    """Starts a node's processes, and again when one fails or the set of nodes changes."""

    def __init__(
        self,
        spec: WorkerSpec,
        env: dict[str, Any],
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_dir: str | None = None,
    ) -> None:
        variables = {name: str(value) for name, value in env.items()}
        super().__init__(
            spec, _WithVariables(log_dir, variables), start_method, exit_barrier_timeout
        )
