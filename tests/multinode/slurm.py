"""A real Slurm on a test cluster's hosts: munge and slurmd on each, slurmctld on the first."""

import os
import shutil
import subprocess
import textwrap
import time

from cluster import READY_SECONDS, Cluster, Node

PROGRAMS = ("srun", "sinfo", "/usr/sbin/slurmctld", "/usr/sbin/slurmd", "/usr/sbin/munged")


def why_impossible() -> str | None:
    """Say what is missing for a Slurm, or None."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


class Slurm:
    """Slurm's daemons on a cluster that is up; a context manager."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.folder = cluster.folder / "slurm"
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> "Slurm":
        spools = (self.folder / f"spool.{node.name}" for node in self._cluster.nodes)
        for folder in (self.folder, *spools):
            folder.mkdir()
        self._write_configuration()
        for node in self._cluster.nodes:
            # munge refuses a socket's folder that others can write to; /run is the host's own.
            begin = f"mkdir -p /run/munge && exec {self._munged(node)}"
            self._daemon(node, "munged", "bash", "-c", begin)
        first = self._cluster.nodes[0]
        self._daemon(first, "slurmctld", "/usr/sbin/slurmctld", "-D", "-i")
        for node in self._cluster.nodes:
            self._daemon(node, "slurmd", "/usr/sbin/slurmd", "-D", "-N", node.name)
        self._await(first)
        return self

    def __exit__(self, *_: object) -> None:
        """The daemons end with their hosts."""

    def _munged(self, node: Node) -> str:
        own = self.folder / node.name
        own.mkdir(mode=0o700)
        options = {"key-file": self.folder / "munge.key", "pid-file": "/run/munge/munged.pid"}
        options |= {"seed-file": own / "seed", "log-file": own / "munged.log"}
        flags = " ".join(f"--{key}={value}" for key, value in options.items())
        return f"/usr/sbin/munged --foreground --force {flags}"

    def _daemon(self, node: Node, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.{node.name}.log", "wb") as log:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            given = {**os.environ, **self.environment}
            subprocess.Popen(node.inside(*command), env=given, start_new_session=True, **pipes)

    def _write_configuration(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        all_nodes = self._cluster.nodes
        names = [f"NodeName={n.name} NodeAddr={n.address} NodeHostname={n.name}" for n in all_nodes]
        nodes = "\n".join(f"{name} CPUs=2 State=UNKNOWN" for name in names)
        state = self.folder / "state"
        state.mkdir()
        settings = f"""
            ClusterName=throwaway
            SlurmctldHost={self._cluster.nodes[0].name}
            SlurmUser=root
            AuthType=auth/munge
            CredType=cred/munge
            ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none
            SelectType=select/linear
            SchedulerType=sched/builtin
            MpiDefault=none
            ReturnToService=2
            SlurmdParameters=config_overrides
            StateSaveLocation={state}
            SlurmdSpoolDir={self.folder}/spool.%n
            SlurmctldPidFile=/run/slurmctld.pid
            SlurmdPidFile=/run/slurmd.pid
            PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
            """
        (self.folder / "slurm.conf").write_text(textwrap.dedent(settings) + nodes + "\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")

    def _await(self, node: Node) -> None:
        """Wait until every node is idle."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            command = node.inside("sinfo", "--noheader", "--format=%D %t")
            given = {**os.environ, **self.environment}
            done = subprocess.run(command, env=given, capture_output=True, text=True)
            if done.stdout.split() == [str(len(self._cluster.nodes)), "idle"]:
                return
            if time.monotonic() > deadline:
                told = f"{done.stdout} {done.stderr}\n{self.logs()}"
                raise AssertionError(f"Slurm did not come up: {told}")
            time.sleep(0.2)

    def logs(self) -> str:
        """What all daemons wrote."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in logs)
