"""Hosts for tests of the launcher: network namespaces on one bridge, with names and ssh servers.

Makes and removes them, runs commands on them, cuts them off, finds what is left running on them.
Keys, known hosts and servers lie in one temporary folder.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("ip", "nsenter", "unshare", "mount", "ssh", "ssh-keygen", "/usr/sbin/sshd")
NETWORK = "10.77.0"
READY_SECONDS = 30.0


def why_impossible() -> str | None:
    """Say why this machine can make no cluster, or None."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    command = ["unshare", "--net", "--uts", "--mount", "true"]
    probe = subprocess.run(command, capture_output=True, text=True)
    return f"no namespaces here: {probe.stderr.strip()}" if probe.returncode else None


class Node:
    """One host: a namespace of network, mounts and host name, held by its ssh server."""

    def __init__(self, cluster: "Cluster", number: int) -> None:
        self.name = f"node{number}"
        self.address = f"{NETWORK}.{number}"
        self.namespace = f"{cluster.prefix}n{number}"
        self.cable = f"{cluster.prefix}v{number}"
        self._cluster, self._switch = cluster, cluster.switch
        self.server: subprocess.Popen[bytes] | None = None

    def boot(self) -> None:
        """Bring the network up and start the ssh server."""
        ip("netns add", self.namespace)
        peer = f"type veth peer name eth0 netns {self.namespace}"
        ip("link add", self.cable, peer, at=self._switch)
        ip("link set", self.cable, "master bridge up", at=self._switch)
        ip("address add", f"{self.address}/24", "dev eth0", at=self.namespace)
        ip("link set eth0 up", at=self.namespace)
        ip("link set lo up", at=self.namespace)
        folder = self._cluster.folder
        # /run is the host's own, as are its name, its known names, and what ssh keeps for the user.
        script = f"""
            set -e
            hostname {self.name}
            mount -t tmpfs none /run
            mkdir -p /run/sshd /root/.ssh
            mount --bind {folder}/ssh /root/.ssh
            mount --bind {folder}/hosts /etc/hosts
            exec /usr/sbin/sshd -D -e -f {folder}/sshd_config -o ListenAddress={self.address}
            """
        command = f"ip netns exec {self.namespace} unshare --uts --mount bash -c"
        log = open(folder / f"{self.name}.log", "wb")  # noqa: SIM115 the server writes on
        words = [*command.split(), textwrap.dedent(script)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        self.server = subprocess.Popen(words, start_new_session=True, **pipes)
        log.close()

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs `command` on this host."""
        if self.server is None:
            raise AssertionError(f"{self.name} is not booted")
        return ["nsenter", "-t", str(self.server.pid), "--net", "--mount", "--uts", "--", *command]

    def cut(self) -> None:
        """Pull the cable: nothing comes or goes, and nobody is told."""
        ip("link set", self.cable, "down", at=self._switch)

    def mend(self) -> None:
        """Put the cable back."""
        ip("link set", self.cable, "up", at=self._switch)

    def _pids(self) -> list[int]:
        command = ["ip", "netns", "pids", self.namespace]
        return [*map(int, subprocess.run(command, capture_output=True, text=True).stdout.split())]

    def processes(self) -> dict[int, str]:
        """What jobs run on this host, by process id: no daemons, nor sessions of ssh.

        Those the server ends itself when it learns of a cut connection.
        """
        own = {*self._cluster.daemons, *([self.server.pid] if self.server else [])}
        found = {pid: command_line(pid) for pid in self._pids() if pid not in own}
        return {pid: line for pid, line in found.items() if line and not line.startswith("sshd: ")}

    def shut_down(self) -> None:
        """End everything that runs on this host, and remove it."""
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.server:
            self.server.wait()
        subprocess.run(["ip", "netns", "delete", self.namespace], capture_output=True, check=False)


class Cluster:
    """`size` hosts that reach each other over ssh as the same user; a context manager.

    Attributes:
        daemons: processes that belong to the hosts and not to a job; the user adds them.

    Args:
        folder: an empty folder for all files of the cluster.
        number: tells clusters of one test process apart.
    """

    def __init__(self, size: int, folder: Path, ssh_port: int = 22, number: int = 1) -> None:
        self.folder = folder
        self.prefix = f"ds{os.getpid() % 100000}{number}"
        self.switch = f"{self.prefix}sw"
        self.ssh_port = ssh_port
        self.daemons: set[int] = set()
        self.nodes = [Node(self, number) for number in range(1, size + 1)]

    def __enter__(self) -> "Cluster":
        self._write_files()
        try:
            ip("netns add", self.switch)
            ip("link add bridge type bridge", at=self.switch)
            ip("link set bridge up", at=self.switch)
            for node in self.nodes:
                node.boot()
            for node in self.nodes:
                self._await(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.shut_down()
        subprocess.run(["ip", "netns", "delete", self.switch], capture_output=True, check=False)

    def _write_files(self) -> None:
        ssh = self.folder / "ssh"
        ssh.mkdir(mode=0o700)
        for key in (ssh / "id_ed25519", self.folder / "host_key"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        shutil.copy(ssh / "id_ed25519.pub", ssh / "authorized_keys")
        host_key = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        names = [name for node in self.nodes for name in (node.name, node.address)]
        known = [name if self.ssh_port == 22 else f"[{name}]:{self.ssh_port}" for name in names]
        (ssh / "known_hosts").write_text("".join(f"{name} {host_key}\n" for name in known))
        lines = ["127.0.0.1 localhost", *(f"{node.address} {node.name}" for node in self.nodes)]
        (self.folder / "hosts").write_text("\n".join([*lines, ""]))
        (self.folder / "sshd_config").write_text(
            textwrap.dedent(f"""
            Port {self.ssh_port}
            HostKey {self.folder}/host_key
            AuthorizedKeysFile /root/.ssh/authorized_keys
            PermitRootLogin yes
            PasswordAuthentication no
            StrictModes no
            UsePAM no
            PidFile none
            """)
        )

    def _await(self, node: Node) -> None:
        """Wait until the host answers over ssh."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            log = (self.folder / f"{node.name}.log").read_text()
            if "Server listening" in log:
                return
            if node.server is None or node.server.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{node.name} did not come up: {log}")
            time.sleep(0.05)

    def hostfile(self, slots: int = 2) -> str:
        """Write a hostfile of all hosts; returns its path."""
        path = self.folder / "hostfile"
        path.write_text("".join(f"{node.name} slots={slots}\n" for node in self.nodes))
        return str(path)


def run(*command: str) -> None:
    """Run a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}: {done.stderr}")


def ip(*words: str, at: str = "") -> None:
    """Run `ip`, in a namespace if one is named."""
    run("ip", *(["-n", at] if at else []), *" ".join(words).split())


def command_line(pid: int) -> str:
    """A process's command line; empty for one that has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return words.decode(errors="replace").strip()
    except OSError:
        return ""
