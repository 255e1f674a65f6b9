"""Elastic launches: how many nodes may take part, and where they meet.

Owns: reading the elastic flags, and the set-up of the rendezvous. Does not own: the rendezvous
(`rendezvous`), the agent that restarts processes (torch's, through `agent`), nor what a restart
goes on from (the script loads its last checkpoint). Called by: `runner` and `launch`, which read
flags, and `agent`.
"""

import os
import socket
from dataclasses import dataclass
from typing import Any

from deepspeed.launcher.constants import LOCAL_MASTER_ADDR, TORCH_DISTRIBUTED_DEFAULT_PORT

MAX_RESTARTS = 100
"""Failures that one node may restart from, as upstream has it; nodes that come do not count."""
QUICK_FAILURES = 3
"""So many in a row, each soon after its start, and a node gives up: the next would be the same."""
QUICK_FAILURE_SECONDS = 30.0  # what is soon after a start
RENDEZVOUS_BACKEND = "deepspeed-c10d"  # the name under which torch finds `rendezvous`
LAST_CALL_SECONDS = 5  # how long a round that has enough nodes waits for more before it begins


@dataclass(frozen=True)
class Elastic:
    """Between how many nodes a job may run."""

    min_nodes: int
    max_nodes: int


def elastic_of(min_nodes: int, max_nodes: int, known_nodes: int) -> Elastic:
    """Return the limits that the flags mean; -1 is for a flag that was left out."""
    for name, value in (("min_elastic_nodes", min_nodes), ("max_elastic_nodes", max_nodes)):
        if value != -1 and value < 1:
            raise ValueError(f"--{name}={value}: give a positive number")
    least = 1 if min_nodes == -1 else min_nodes
    most = max(known_nodes, least) if max_nodes == -1 else max_nodes
    if least > most:
        raise ValueError(
            f"--min_elastic_nodes={least} is above --max_elastic_nodes={most}; exchange them or "
            "raise the latter"
        )
    return Elastic(least, most)


def rendezvous_settings(
    elastic: Elastic, master_addr: str, master_port: int | None
) -> dict[str, Any]:
    """Return the part of torch's `LaunchConfig` that says where nodes meet.

    One of the agents serves the rendezvous: the first that can listen on it, so the address must
    be one node's own.
    """
    port = TORCH_DISTRIBUTED_DEFAULT_PORT if master_port is None else master_port
    # Every round of processes needs a store of its own: in the agents' store, which outlives them,
    # they would find the addresses of processes that are gone and fail to connect.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return {
        "min_nodes": elastic.min_nodes,
        "max_nodes": elastic.max_nodes,
        "max_restarts": MAX_RESTARTS,
        "rdzv_backend": RENDEZVOUS_BACKEND,
        "rdzv_endpoint": f"{master_addr}:{port}",
        "rdzv_configs": {"last_call_timeout": LAST_CALL_SECONDS},
        # All nodes must say the same word; two jobs cannot have the same port.
        "run_id": f"deepspeed-{port}",
        "local_addr": address_towards(master_addr, port),
    }


def address_towards(host: str, port: int) -> str:
    """Return this machine's address as `host` sees it; its name need not be known to every node."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            # A datagram socket sends nothing here; connecting only chooses a route.
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return LOCAL_MASTER_ADDR
