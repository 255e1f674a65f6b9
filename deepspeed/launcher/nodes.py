"""Launching on several nodes: the part of the `deepspeed` command that the user started.

Owns starting the engine's commands, the coordinator that all launchers report to, the user's
signals, the words and exit code at the end, and which variables go along.
"""

import argparse
import contextlib
import hashlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FrameType

from deepspeed.launcher.constants import (
    ADDRESS_VARIABLE,
    DEEPSPEED_ENVIRONMENT_NAME,
    DEEPSPEED_ENVIRONMENT_PATHS,
    LOCAL_MASTER_ADDR,
    PDSH_LAUNCHER,
    SSH_LAUNCHER,
    TORCH_DISTRIBUTED_DEFAULT_PORT,
)
from deepspeed.launcher.failures import describe_exit
from deepspeed.launcher.job.coordinator import Coordinator, CoordinatorAddress, Verdict
from deepspeed.launcher.launch import pid_file, run, write_verdict
from deepspeed.launcher.multinode_runner import MultiNodeRunner, make_runner, ssh_command
from deepspeed.launcher.plan import LaunchPlan, address_towards, place_of_node
from deepspeed.launcher.process_tree import children_ended
from deepspeed.launcher.signals import (
    MIN_APART_SECONDS,
    ending_signals,
    noting_signals,
    take_noted,
)
from deepspeed.utils.logging import logger

ENGINE_END_SECONDS = 5.0  # for the engine's own end, once all launchers have been told theirs
SSH_CHECK_SECONDS = 20.0
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def run_nodes(
    args: argparse.Namespace,
    active: dict[str, list[int]],
    world_info: str,
    export_envs: list[str],
) -> int:
    """Start the job over the engine that the flags name; return its exit code, as `launch.run`."""
    args.coordinator = ""  # known once there is a coordinator; the engine is refused before
    runner = make_runner(args, world_info, active)
    if runner.name in (PDSH_LAUNCHER, SSH_LAUNCHER) and not args.no_ssh_check:
        check_ssh(
            list(active),
            args.ssh_port,
            runner.launcher_args() if runner.name == SSH_LAUNCHER else [],
        )
    coordinator = Coordinator(
        _labels(runner, active), own_addresses(list(active)), args.master_addr
    )
    args.coordinator = coordinator.address.encode()
    environment = dict(os.environ)
    # startup: importing this package must not look for devices
    from deepspeed.accelerator import get_accelerator

    prefixes = [*export_envs, *get_accelerator().export_envs()]
    for key, value in forwarded_environment(environment, prefixes).items():
        runner.add_export(key, value)
    commands = runner.get_cmds(environment, active)
    logger.info(
        "starting over %s: %s",
        runner.name,
        ", ".join(f"{host} ({len(slots)})" for host, slots in active.items()),
    )
    coordinator.start()
    with (
        noting_signals(),
        pid_file(os.getpid() if args.save_pid else None),
        children_ended() as success,
        contextlib.closing(coordinator),
    ):
        verdict = _run_engine(coordinator, commands, environment, list(active))
        success[0] = verdict.code == 0
    write_verdict(verdict)
    return verdict.code


def _labels(runner: MultiNodeRunner, active: dict[str, list[int]]) -> list[str]:
    """Return one name per launcher."""
    if runner.rank_variables is None:
        return [f"node {node_rank} ({host})" for node_rank, host in enumerate(active)]
    hosts = [host for host, slots in active.items() for _ in slots]
    return [f"the launcher of rank {rank} ({host})" for rank, host in enumerate(hosts)]


def _run_engine(
    coordinator: Coordinator,
    commands: list[list[str]],
    environment: dict[str, str],
    hosts: list[str],
) -> Verdict:
    """Start the engine's commands, wait for the job's verdict, and see the engine's end."""
    processes: list[subprocess.Popen[bytes]] = []
    with _signals_stop(coordinator):
        for command in commands:
            # Values of variables stand in it, which may be secret: for debugging only.
            logger.debug("starting: %s", " ".join(command))
            # A session of its own: the terminal's Ctrl-C is for this process, which passes it on in
            # order.
            processes.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
                )
            )
        watchers = [
            threading.Thread(
                target=_watch,
                args=(coordinator, index, len(commands), process, hosts),
                name="deepspeed-engine",
                daemon=True,
            )
            for index, process in enumerate(processes)
        ]
        for watcher in watchers:
            watcher.start()
        verdict = coordinator.wait()
        deadline = time.monotonic() + ENGINE_END_SECONDS
        for watcher in watchers:
            watcher.join(max(0.0, deadline - time.monotonic()))
        _kill_left(processes)
        for watcher in watchers:
            watcher.join()
    if verdict is None:
        raise AssertionError("the coordinator ended without a verdict")
    return verdict


def _watch(
    coordinator: Coordinator,
    index: int,
    count: int,
    process: "subprocess.Popen[bytes]",
    hosts: list[str],
) -> None:
    """Wait for one of the engine's commands; who has not reported by its end never will."""
    code = process.wait()
    program = (
        os.path.basename(str(process.args[0])) if isinstance(process.args, list) else "the engine"
    )
    subject = f"node {index} ({hosts[index]})" if count > 1 else program
    how = (
        f"{describe_exit(code)} of {program} before all nodes had reported; what it wrote is above"
    )
    coordinator.fail(
        index if count > 1 else None, subject, how, 128 - code if code < 0 else code or 1
    )


def _kill_left(processes: "list[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _signals_stop(coordinator: Coordinator) -> Iterator[None]:
    """Pass signals to the whole job; a second one ends it at once."""
    first: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if first and now - first[0] < MIN_APART_SECONDS:
            return
        coordinator.stop(number)
        first.append(now)

    previous = {number: signal.signal(number, handle) for number in ending_signals()}
    for noted in take_noted():
        coordinator.stop(noted)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_by_hand(
    args: argparse.Namespace, plan: LaunchPlan, active: dict[str, list[int]], world_info: str
) -> int:
    """Run this node's part of a job whose nodes the user starts one by one (--no_ssh).

    Node 0 is where the launchers meet: at the port above the master's, which each node knows
    without being told.
    """
    if args.node_rank < 0:
        raise ValueError(
            f"--node_rank={args.node_rank}: --no_ssh needs each node's position in the hostfile, "
            "from 0"
        )
    if not args.master_addr:
        raise ValueError("--master_addr is missing: --no_ssh needs the address of node 0")
    master_port = args.master_port if args.master_port_given else TORCH_DISTRIBUTED_DEFAULT_PORT
    port = master_port + 1
    # Nodes with other hosts or slots in mind have another word and are sent away.
    token = hashlib.sha256(world_info.encode()).hexdigest()[:16]
    address = CoordinatorAddress([args.master_addr], port, token)
    place = replace(place_of_node(active, args.node_rank, address.encode()), reports=True)
    plan = replace(plan, master_addr=args.master_addr, master_port=master_port, place=place)
    if args.node_rank != 0:
        return run(plan)
    try:
        labels = [f"node {node_rank} ({host})" for node_rank, host in enumerate(active)]
        coordinator = Coordinator(labels, [], args.master_addr, port, token)
    except OSError as error:
        raise ValueError(
            f"--master_port={master_port}: the port above it, {port}, at which the nodes report, "
            f"cannot be opened ({error.strerror}); name another --master_port on all nodes"
        ) from error
    coordinator.start()
    with contextlib.closing(coordinator):
        return run(plan)


def check_ssh(hosts: list[str], port: int | None, extra: list[str]) -> None:
    """Try to run a command on each host."""

    def attempt(host: str) -> str | None:
        command = [
            *ssh_command(port),
            *extra,
            "-o",
            f"ConnectTimeout={int(SSH_CHECK_SECONDS)}",
            host,
            "true",
        ]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=2 * SSH_CHECK_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"{host}: no answer within {2 * SSH_CHECK_SECONDS:g} seconds"
        return (
            f"{host}: {done.stderr.strip() or describe_exit(done.returncode)}"
            if done.returncode
            else None
        )

    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        problems = [problem for problem in pool.map(attempt, hosts) if problem]
    if problems:
        raise ValueError(
            f"passwordless ssh does not work: {'; '.join(problems)}; set it up (a key, a known "
            "host), or launch with --no_ssh on each node; --no_ssh_check leaves this check out"
        )


def own_addresses(hosts: list[str]) -> list[str]:
    """Return this machine's addresses in the order in which the nodes shall try them.

    First come those by which this machine itself would go to a host, then all others, the loopback
    last: it is right for launchers on this machine, and refused elsewhere.
    """
    if os.environ.get(ADDRESS_VARIABLE):
        return [address.strip() for address in os.environ[ADDRESS_VARIABLE].split(",")]
    import psutil  # startup: needed only in a job over several nodes

    routed = [address for host in hosts if (address := address_towards(host)) is not None]
    families = (socket.AF_INET, socket.AF_INET6)
    others = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in families
    ]
    found = dict.fromkeys(
        address for address in [*routed, *others] if not address.startswith(("127.", "::1", "fe80"))
    )
    return [*found, LOCAL_MASTER_ADDR]


# The variables that go along


def forwarded_environment(environment: Mapping[str, str], prefixes: list[str]) -> dict[str, str]:
    """Return the variables that all nodes get; those of settings files win."""
    chosen = {
        key: value
        for key, value in environment.items()
        if key.startswith(tuple(prefixes)) and _NAME.fullmatch(key)
    }
    # `python -m` on a node finds what it finds here: the current folder too.
    chosen["PYTHONPATH"] = os.pathsep.join(
        filter(None, [os.getcwd(), environment.get("PYTHONPATH", "")])
    )
    for folder in DEEPSPEED_ENVIRONMENT_PATHS:
        path = Path(folder) / DEEPSPEED_ENVIRONMENT_NAME
        if path.is_file():
            chosen.update(parse_environment_file(path.read_text(encoding="utf-8"), str(path)))
    return chosen


def parse_environment_file(text: str, path: str) -> dict[str, str]:
    """Read `KEY=VALUE` lines; values are taken as they stand, `#` starts a comment line."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        key, equals, value = stripped.partition("=")
        if not equals or not _NAME.fullmatch(key.strip()):
            raise ValueError(f"{path}: bad line {line!r}; write KEY=VALUE")
        found[key.strip()] = value.strip()
    return found
