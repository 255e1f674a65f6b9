"""Which device slots of which hosts a launch uses: hostfiles, --include, --exclude, and devices.

A slot is the number of a physical device, as in the accelerator's visibility variable; where that
names devices otherwise (by UUID), it is the position there.
"""

import os
import re

from deepspeed.utils.logging import logger

# Open MPI's form has a limit behind the slots, up to which a starter may fill a host.
_HOSTFILE_ENTRY = re.compile(
    r"(?P<host>\S+)\s+slots=(?P<slots>\d+)(?:\s+max[-_]slots=(?P<most>\d+))?"
)


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Read slots by host from an MPI-style hostfile; None when there is no such file.

    Raises:
        ValueError: a line does not parse, a host occurs twice, or no host is named.
    """
    if not os.path.isfile(hostfile_path):
        logger.debug("no hostfile at %s: using this machine only", hostfile_path)
        return None
    # Editors of other systems begin a file with a byte-order mark.
    with open(hostfile_path, encoding="utf-8-sig") as stream:
        return _parse_hostfile(stream.read().splitlines(), hostfile_path)


def _parse_hostfile(hostfile_lines: list[str], path: str = "(lines)") -> dict[str, int]:
    """`fetch_hostfile` of lines; upstream's name, in `runner` too."""
    pool: dict[str, int] = {}
    for line in (raw.partition("#")[0].strip() for raw in hostfile_lines):
        if not line:
            continue
        entry = _HOSTFILE_ENTRY.fullmatch(line)
        if entry is None:
            remedy = "write `<host> slots=<number>`"
            raise ValueError(f"Hostfile {path} contains a bad entry: {line!r}; {remedy}")
        if entry["host"] in pool:
            text = f"multiple entries for {entry['host']}; keep one of them"
            raise ValueError(f"Hostfile {path} contains {text}")
        pool[entry["host"]] = int(entry["slots"])
        if entry["most"] is not None and int(entry["most"]) < pool[entry["host"]]:
            text = f"more slots than max_slots: {line!r}; make slots the smaller number"
            raise ValueError(f"Hostfile {path} contains {text}")
    if not pool:
        text = "is empty or not formatted correctly; write `<host> slots=<number>` lines"
        raise ValueError(f"Hostfile {path} {text}")
    return pool


def parse_node_config(node_config: str) -> tuple[str, list[int]]:
    """Split `NAME[:SLOT[,SLOT ...]]` into host and slots, none for all; ValueError otherwise."""
    host, colon, slots = node_config.strip().partition(":")
    if not colon:
        return host, []
    numbers = slots.split(",")
    if not host or not all(number.strip().isdigit() for number in numbers):
        remedy = "write NAME or NAME:SLOT[,SLOT ...], e.g. localhost:0,2"
        raise ValueError(f"bad node specification {node_config!r}; {remedy}")
    return host, [int(number) for number in numbers]


def parse_node_config_list(node_config_list: str) -> dict[str, list[int]]:
    """Split `NODE_SPEC[@NODE_SPEC ...]` into slots by host, as `parse_node_config` reads each part.

    A host that occurs twice has the slots of both, each once and in rising order, or all.
    """
    nodes: dict[str, list[int]] = {}
    for part in node_config_list.split("@"):
        host, slots = parse_node_config(part)
        if host in nodes:
            slots = sorted({*nodes[host], *slots}) if nodes[host] and slots else []
        nodes[host] = slots
    return nodes


def check_filters(include_str: str, exclude_str: str) -> None:
    """Refuse slots to use and slots not to use together."""
    if include_str and exclude_str:
        remedy = "give --include or --exclude, not both"
        raise ValueError(f"include_str and exclude_str are mutually exclusive; {remedy}")


def parse_resource_filter(
    host_info: dict[str, list[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Keep the slots that `include_str` names, or all but those of `exclude_str`.

    Both are `NODE_SPEC[@NODE_SPEC ...]`; a host without slots means all of its own. The result is
    sorted, without duplicates, in `host_info`'s order and without hosts that have no slot left.

    Raises:
        ValueError: both filters are given, or one names a host or slot that `host_info` lacks.
    """
    check_filters(include_str, exclude_str)
    if not include_str and not exclude_str:
        return host_info
    named = parse_node_config_list(include_str or exclude_str)
    for host, slots in named.items():
        if host not in host_info:
            known = ", ".join(host_info)
            raise ValueError(f"Hostname '{host}' not found in hostfile; known are {known}")
        for slot in slots:
            if slot not in host_info[host]:
                text = f"specified on host '{host}'; it has {host_info[host]}"
                raise ValueError(f"No slot '{slot}' {text}")
    kept: dict[str, list[int]] = {}
    for host, available in host_info.items():
        chosen = set(named.get(host) or available) if host in named else set()
        slots = sorted(chosen if include_str else set(available) - chosen)
        if slots:
            kept[host] = slots
    return kept


def parse_inclusion_exclusion(
    resource_pool: dict[str, int], inclusion: str, exclusion: str
) -> dict[str, list[int]]:
    """Filter slot counts by host as `parse_resource_filter` does; return slots by host."""
    slots = {host: list(range(count)) for host, count in resource_pool.items()}
    return parse_resource_filter(slots, inclusion, exclusion)


def parse_num_nodes(str_num_nodes: str, elastic_training: bool) -> tuple[int, int]:
    """Read --num_nodes: `N` as (N, -1), or `MIN:MAX` with elastic training.

    Raises:
        RuntimeError: `MIN:MAX` without elastic training, or more than two numbers.
    """
    parts = str_num_nodes.split(":")
    if len(parts) == 1:
        return int(parts[0]), -1
    if len(parts) > 2:
        raise RuntimeError(f"num_nodes {str_num_nodes} is not in MIN:MAX format")
    if not elastic_training:
        raise RuntimeError("MIN:MAX format is only supported in elastic training")
    return int(parts[0]), int(parts[1])


def parse_core_list(text: str) -> list[int]:
    """Read `1,3-5,7` as [1, 3, 4, 5, 7]."""
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            remedy = "write cores and ranges as in 1,3-5,7"
            raise ValueError(f"--bind_core_list={text}: bad part {part!r}; {remedy}")
        cores.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    if len(set(cores)) != len(cores):
        raise ValueError(f"--bind_core_list={text}: a core occurs twice")
    return cores


def split_cores(cores: list[int], num_ranks: int) -> list[list[int]]:
    """Deal `cores` in runs of equal length; what is left stays unused, so no rank is slower."""
    each = len(cores) // num_ranks
    if each == 0:
        raise ValueError(
            f"--bind_cores_to_rank: {num_ranks} ranks cannot be bound to {len(cores)} cores; "
            "start fewer ranks or name more cores with --bind_core_list"
        )
    return [cores[rank * each : (rank + 1) * each] for rank in range(num_ranks)]


# The devices of this machine


def visible_slots() -> dict[int, str]:
    """Return each usable slot with its name in the visibility variable; none on the CPU."""
    # startup: importing this package must not look for devices
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return {}
    names = _restriction(accelerator.visible_devices_envs())
    count = accelerator.device_count()
    if names is None:
        return {slot: str(slot) for slot in range(count)}
    # A list may name devices that are not there; the runtime ignores those and all behind them.
    names = names[:count]
    if all(name.isdigit() for name in names):
        return {int(name): name for name in names}
    return dict(enumerate(names))


def _restriction(variables: list[str]) -> list[str] | None:
    for variable in variables:
        if os.environ.get(variable):
            return [name.strip() for name in os.environ[variable].split(",")]
    return None


def device_environment(slots: list[int]) -> dict[str, str]:
    """Return variables that show processes the devices `slots` alone; none on the CPU."""
    usable = visible_slots()
    if not usable:
        return {}
    foreign = [slot for slot in slots if slot not in usable]
    if foreign:
        raise ValueError(f"device slots {foreign} are not usable here; usable are {list(usable)}")
    from deepspeed.accelerator import get_accelerator  # startup: see visible_slots

    value = ",".join(usable[slot] for slot in slots)
    return dict.fromkeys(get_accelerator().visible_devices_envs(), value)
