"""Jobs of the `deepspeed` command on a `cluster`: started, read, awaited until nothing is left."""

import os
import subprocess
import sys
import threading
import time

import cluster as hosts

SETTINGS = {"PYTHONPATH": str(hosts.ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
NODE_TIMEOUT = 10.0
SLACK = 30.0
"""What a loaded machine may add to a bound: interpreters start and end slowly on it."""


class Job:
    """The `deepspeed` command on a host, or the first one, its output read as it comes."""

    def __init__(
        self, cluster: hosts.Cluster, *flags: str, node: int = 0, **environment: str
    ) -> None:
        self.cluster = cluster
        settings = {**SETTINGS, "DS_LAUNCH_TIMEOUT": str(NODE_TIMEOUT)}
        settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        self.process = subprocess.Popen(
            cluster.nodes[node].inside(sys.executable, "-m", "deepspeed.launcher.runner", *flags),
            cwd=cluster.folder,
            env={**os.environ, **settings, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self.lines.append("(end of output)")
            self._changed.notify_all()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def await_lines(self, word: str, count: int) -> None:
        """Wait until `count` lines hold `word`."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: self._count(word) >= count or "(end of output)" in self.lines, timeout=120
            )
        assert came and self._count(word) >= count, self.text

    def _count(self, word: str) -> int:
        return sum(word in line for line in self.lines)

    def end(self, timeout: float = 120.0) -> int:
        """Wait for the exit code; nothing of the job may be left on any host in reach."""
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code

    def signal(self, number: int) -> None:
        """Send a signal to the command; nsenter has become it."""
        os.kill(self.process.pid, number)


def await_empty(cluster: hosts.Cluster, seconds: float = SLACK) -> None:
    """Wait until no process of a job is left on any host."""
    deadline = time.monotonic() + seconds
    while left := {node.name: found for node in cluster.nodes if (found := node.processes())}:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
