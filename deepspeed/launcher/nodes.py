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
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FrameType

from deepspeed.launcher import constants
from deepspeed.launcher.failures import describe_exit
from deepspeed.launcher.job.coordinator import Coordinator, CoordinatorAddress, Verdict
from deepspeed.launcher.launch import pid_file, run, write_verdict
from deepspeed.launcher.multinode_runner import MultiNodeRunner, make_runner, ssh_command
from deepspeed.launcher.plan import LaunchPlan, address_towards, place_of_node
from deepspeed.launcher.process_tree import children_ended
from deepspeed.launcher.signals import MIN_APART_SECONDS, ending_signals, noting_signals, take_noted
from deepspeed.utils.logging import logger

ENGINE_END_SECONDS = 5.0  # for the engine's own end, once all launchers have been told theirs
SSH_CHECK_SECONDS = 20.0
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def run_nodes(
    args: argparse.Namespace, active: dict[str, list[int]], world_info: str, export_envs: list[str]
) -> int:
    """Start the job over the engine that the flags name; return its exit code, as `launch.run`."""
    args.coordinator = ""  # known once there is a coordinator; the engine is refused before
    runner, hosts = make_runner(args, world_info, active), list(active)
    if runner.name in (constants.PDSH_LAUNCHER, constants.SSH_LAUNCHER) and not args.no_ssh_check:
        extra = runner.launcher_args() if runner.name == constants.SSH_LAUNCHER else []
        check_ssh(hosts, args.ssh_port, extra)
    coordinator = Coordinator(_labels(runner, active), own_addresses(hosts), args.master_addr)
    args.coordinator = coordinator.address.encode()
    environment = dict(os.environ)
    # startup: importing this package must not look for devices
    from deepspeed.accelerator import get_accelerator

    prefixes = [*export_envs, *get_accelerator().export_envs()]
    for key, value in forwarded_environment(environment, prefixes).items():
        runner.add_export(key, value)
    commands = runner.get_cmds(environment, active)
    counts = ", ".join(f"{host} ({len(slots)})" for host, slots in active.items())
    logger.info("starting over %s: %s", runner.name, counts)
    coordinator.start()
    with (
        noting_signals(),
        pid_file(os.getpid() if args.save_pid else None),
        children_ended() as success,
        contextlib.closing(coordinator),
    ):
        verdict = _run_engine(coordinator, commands, environment, hosts)
        success[0] = verdict.code == 0
    write_verdict(verdict)
    return verdict.code


def _labels(runner: MultiNodeRunner, active: dict[str, list[int]]) -> list[str]:
    """Return one name per launcher."""
    if runner.rank_variables is None:
        return node_labels(active)
    hosts = [host for host, slots in active.items() for _ in slots]
    return [f"the launcher of rank {rank} ({host})" for rank, host in enumerate(hosts)]


def node_labels(hosts: Iterable[str]) -> list[str]:
    """Return each node's name in messages."""
    return [f"node {node_rank} ({host})" for node_rank, host in enumerate(hosts)]


def _run_engine(
    coordinator: Coordinator, commands: list[list[str]], env: dict[str, str], hosts: list[str]
) -> Verdict:
    """Start the engine's commands, wait for the job's verdict, and see the engine's end."""
    processes: list[subprocess.Popen[bytes]] = []
    watchers = []
    with _signals_stop(coordinator):
        for index, command in enumerate(commands):
            # Values of variables stand in it, which may be secret: for debugging only.
            logger.debug("starting: %s", " ".join(command))
            # A session of its own: the terminal's Ctrl-C is for this process, which passes it on.
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, start_new_session=True
            )
            processes.append(process)
            label = node_labels(hosts)[index] if len(commands) > 1 else ""
            watched = (coordinator, index, label, process)
            name = "deepspeed-engine"
            watchers.append(threading.Thread(target=_watch, args=watched, name=name, daemon=True))
        for watcher in watchers:
            watcher.start()
        verdict = coordinator.wait()
        deadline = time.monotonic() + ENGINE_END_SECONDS
        for watcher in watchers:
            watcher.join(max(0.0, deadline - time.monotonic()))
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for watcher in watchers:
            watcher.join()
    if verdict is None:
        raise AssertionError("the coordinator ended without a verdict")
    return verdict


def _watch(
    coordinator: Coordinator, index: int, label: str, process: "subprocess.Popen[bytes]"
) -> None:
    """Wait for one of the engine's commands; who has not reported by its end never will. `label`
    names the node that it was for, and is empty for a command for all.
    """
    code = process.wait()
    program = os.path.basename(process.args[0]) if isinstance(process.args, list) else "the engine"
    why = f"{describe_exit(code)} of {program} before all nodes had reported"
    member = index if label else None
    exit_code = 128 - code if code < 0 else code or 1
    coordinator.fail(member, label or program, f"{why}; what it wrote is above", exit_code)


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
    """Run this node's part of a job whose nodes the user starts one by one (--no_ssh), and which
    meet at node 0, at the port above the master's: each node knows it without being told.
    """
    if args.node_rank < 0:
        text = "--no_ssh needs each node's position in the hostfile, from 0"
        raise ValueError(f"--node_rank={args.node_rank}: {text}")
    if not args.master_addr:
        raise ValueError("--master_addr is missing: --no_ssh needs the address of node 0")
    default_port = constants.TORCH_DISTRIBUTED_DEFAULT_PORT
    master_port = args.master_port if args.master_port_given else default_port
    port = master_port + 1
    # Nodes with other hosts or slots in mind have another word and are sent away.
    token = hashlib.sha256(world_info.encode()).hexdigest()[:16]
    address = CoordinatorAddress([args.master_addr], port, token)
    place = replace(place_of_node(active, args.node_rank, address.encode()), reports=True)
    plan = replace(plan, master_addr=args.master_addr, master_port=master_port, place=place)
    if args.node_rank != 0:
        return run(plan)
    try:
        coordinator = Coordinator(node_labels(active), [], args.master_addr, port, token)
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
        patience = f"ConnectTimeout={int(SSH_CHECK_SECONDS)}"
        command = [*ssh_command(port), *extra, "-o", patience, host, "true"]
        most = 2 * SSH_CHECK_SECONDS
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=most
            )
        except subprocess.TimeoutExpired:
            return f"{host}: no answer within {most:g} seconds"
        said = done.stderr.strip() or describe_exit(done.returncode)
        return f"{host}: {said}" if done.returncode else None

    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        problems = [problem for problem in pool.map(attempt, hosts) if problem]
    if problems:
        raise ValueError(
            f"passwordless ssh does not work: {'; '.join(problems)}; set it up (a key, a known "
            "host), or launch with --no_ssh on each node; --no_ssh_check leaves this check out"
        )


def own_addresses(hosts: list[str]) -> list[str]:
    """Return this machine's addresses in the order in which the nodes shall try them: those by
    which it goes to a host itself, all others, and the loopback, right on this machine alone.
    """
    if os.environ.get(constants.ADDRESS_VARIABLE):
        return [address.strip() for address in os.environ[constants.ADDRESS_VARIABLE].split(",")]
    import psutil  # startup: needed only in a job over several nodes

    routed = [address for host in hosts if (address := address_towards(host)) is not None]
    families = (socket.AF_INET, socket.AF_INET6)
    found = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    others = [entry.address for entry in found if entry.family in families]
    near = ("127.", "::1", "fe80")
    far = [address for address in [*routed, *others] if not address.startswith(near)]
    return [*dict.fromkeys(far), constants.LOCAL_MASTER_ADDR]


# The variables that go along


def forwarded_environment(environment: Mapping[str, str], prefixes: list[str]) -> dict[str, str]:
    """Return the variables that all nodes get; those of settings files win."""
    begins = tuple(prefixes)
    known = environment.items()
    chosen = {key: text for key, text in known if key.startswith(begins) and _NAME.fullmatch(key)}
    # `python -m` on a node finds what it finds here: the current folder too.
    folders = [os.getcwd(), environment.get("PYTHONPATH", "")]
    chosen["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    for folder in constants.DEEPSPEED_ENVIRONMENT_PATHS:
        path = Path(folder) / constants.DEEPSPEED_ENVIRONMENT_NAME
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
