"""Which cores a rank is bound to, and the ``numactl`` command that binds it.

Reads the machine's topology from the kernel; runs nothing.
"""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

NODE_DIRECTORY = Path("/sys/devices/system/node")


def check_for_numactl_pkg() -> bool:
    """Whether ``numactl`` is installed."""
    return shutil.which("numactl") is not None


def parse_range(rng: str) -> range:
    """``5`` or ``3-7`` as a range of integers, the end included."""
    matched = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", rng)
    if matched is None:
        raise ValueError(
            f"Bad range: {rng!r} is neither a number nor two numbers with a dash between them"
        )
    start = int(matched.group(1))
    end = int(matched.group(2) or start)
    if end < start:
        raise ValueError(f"Bad range: {rng!r}, range end must larger than or equal to start")
    return range(start, end + 1)


def parse_range_list(range_str: str) -> list[int]:
    """``0-3,7`` as a list of integers."""
    numbers: list[int] = []
    for part in range_str.split(","):
        found = parse_range(part)
        if numbers and found.start <= numbers[-1]:
            raise ValueError(
                f"Bad range: {range_str!r}, sub ranges must not overlap with each other and should "
                "be in ascend order"
            )
        numbers.extend(found)
    return numbers


def get_numa_cores(directory: Path = NODE_DIRECTORY) -> list[list[int]]:
    """The cores of each NUMA node, by node number; empty where the kernel does not say."""
    nodes: dict[int, list[int]] = {}
    for path in directory.glob("node[0-9]*/cpulist"):
        text = path.read_text(encoding="ascii").strip()
        nodes[int(path.parent.name.removeprefix("node"))] = parse_range_list(text) if text else []
    return [nodes[number] for number in sorted(nodes)]


def _cores_to_share(bind_core_list: str | None) -> list[int]:
    if bind_core_list is not None:
        return parse_range_list(bind_core_list)
    if hasattr(os, "sched_getaffinity"):
        # What this process may use: fewer than the machine has inside of a container or a batch
        # job.
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _memory_binding(cores: Sequence[int], nodes: Sequence[Sequence[int]]) -> list[str]:
    """numactl's option that keeps memory near ``cores``; none for one node, or if they span all."""
    touched = [number for number, node in enumerate(nodes) if set(cores) & set(node)]
    if not touched or len(nodes) < 2 or len(touched) == len(nodes):
        return []
    return ["-m", ",".join(str(number) for number in touched)]


def get_numactl_cmd(
    bind_core_list: str | None, num_local_procs: int, local_rank: int
) -> tuple[int, list[str]]:
    """The cores per rank and the command prefix that binds one rank to its equal, contiguous share
    of them.

    Args:
        bind_core_list: the cores to share, like ``0-3,7``; None means all that this process may
            use.
        num_local_procs: ranks on this machine.
        local_rank: which of them.

    Raises:
        ValueError: there are fewer cores than ranks, or KMP_AFFINITY is set, which numactl would
            contradict.
    """
    if "KMP_AFFINITY" in os.environ:
        raise ValueError(
            "KMP_AFFINITY is set and contradicts binding ranks to cores: unset one of the two"
        )
    cores = _cores_to_share(bind_core_list)
    per_rank = len(cores) // num_local_procs
    if per_rank < 1:
        raise ValueError(
            f"{num_local_procs} ranks cannot share {len(cores)} cores: at least one core is needed "
            "for each"
        )
    own = cores[per_rank * local_rank : per_rank * (local_rank + 1)]
    command = ["numactl", "-C", ",".join(str(core) for core in own)]
    return per_rank, [*command, *_memory_binding(own, get_numa_cores())]
