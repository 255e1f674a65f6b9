"""The rendezvous of the nodes of an elastic job, torch's dynamic one, which also notices nodes that
fall silent, and the agent, torch's, which gives up when processes fail soon after their start.

torch's agents start a round of processes again when one fails or a node comes; behind a pulled
cable nothing fails. The peers of a lost node wait in a collective for as long as that may take,
half an hour by default, and the lost node's agent waits for the rendezvous for as long as TCP
tries. What a restart goes on from is the script's: it loads its last checkpoint.
"""

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch.distributed.launcher.api
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.utils.distributed import create_c10d_store

from deepspeed.launcher import constants
from deepspeed.launcher.job.coordinator import beat_interval
from deepspeed.launcher.plan import Elastic, address_towards
from deepspeed.utils.logging import logger

MAX_RESTARTS = 100  # failures that one node may restart from, as upstream; new nodes do not count
# So many in a row, each soon after its start, and a node gives up: the next would be the same.
QUICK_FAILURES = 3
QUICK_FAILURE_SECONDS = 30.0  # what is soon after a start
RENDEZVOUS_BACKEND = "deepspeed-c10d"  # the name under which torch finds `rendezvous`
LAST_CALL_SECONDS = 5  # how long a round that has enough nodes waits for more before it begins
ON_CUT = "on_cut"  # configuration's key of what to do when the rendezvous has not answered in time
END_SECONDS = 2.0
_GAVE_UP = "gave-up"  # takes the place of the beat's number in a node's sign of life


@dataclass
class Round:
    """One round of processes as this node sees it: its nodes, and when each was last heard."""

    word: str
    rank: int
    nodes: int
    lost: bool = False
    gave_up: bool = False
    words: dict[int, str] = field(default_factory=dict)
    heard: dict[int, float] = field(default_factory=dict)

    def key(self, rank: int) -> str:
        """Where a node of this round leaves its signs of life."""
        return f"deepspeed/alive/{self.word}/{rank}"

    def listen(self, other: int, word: str, timeout: float) -> None:
        """Note a node's latest sign of life ("" before its first), and whether it is too old."""
        now = time.monotonic()
        name = f"node {other} ({word.split()[0]})" if word else f"node {other}"
        # Clocks of nodes are not compared: that the word changes is the sign.
        if other not in self.heard or word != self.words[other]:
            self.words[other], self.heard[other] = word, now
            if word.endswith(_GAVE_UP) and not self.gave_up:
                self.gave_up = True
                logger.warning("%s has given up: its output says why", name)
        elif now - self.heard[other] > timeout and not self.lost:
            self.lost = True
            text = "%s has given no sign of life for %g seconds: starting again without it"
            logger.warning(text, name, timeout)


class NodeWatch:
    """Tells the other nodes that this one lives, and listens for them and for the rendezvous.

    On threads, not in the agent's loop: that stands still while processes are stopped, at the end,
    and behind a cut. `on_cut` is called on a thread when the rendezvous has not answered for
    `timeout` seconds.
    """

    def __init__(self, endpoint: str, timeout: float, on_cut: Callable[[], None]) -> None:
        self.round: Round | None = None
        self._endpoint = endpoint
        self._timeout = timeout
        self._on_cut = on_cut
        self._answers = 0
        self._ended = threading.Event()
        self._exchanging, answers = (
            threading.Thread(target=target, name="deepspeed-nodes", daemon=True)
            for target in (self._exchange, self._await_answers)
        )
        self._exchanging.start()
        answers.start()
        # Also where a signal ends the agent, which then does not shut the rendezvous down; see
        # [Note: threads at exit] of `deepspeed.comm.watch.lookout`.
        atexit.register(self.end)

    def tell_giving_up(self) -> None:
        """Tell the round's other nodes that this one, which may serve them, gives up."""
        if self.round is not None and self.round.nodes > 1:
            self.round.gave_up = True
            # The next beat says it, and the others listen at their next.
            time.sleep(3 * beat_interval(self._timeout))

    def end(self) -> None:
        """Stop. A call to the rendezvous is waited for a moment only: it may be out of reach."""
        self._ended.set()
        self._exchanging.join(END_SECONDS)

    def _exchange(self) -> None:
        host, _, port = self._endpoint.rpartition(":")
        beat = 0
        try:
            # A connection of its own: the agent's is busy while the agent waits there.
            place = host.strip("[]"), int(port)
            store = create_c10d_store(False, *place, timeout=self._timeout, wait_for_workers=False)
            while not self._ended.wait(beat_interval(self._timeout)):
                beat += 1
                seen = self.round or Round("", 0, 1)
                word = _GAVE_UP if seen.gave_up else beat
                store.set(seen.key(seen.rank), f"{socket.gethostname()} {word}")
                for other in set(range(seen.nodes)) - {seen.rank}:
                    key = seen.key(other)
                    word = store.get(key).decode() if store.check([key]) else ""
                    seen.listen(other, word, self._timeout)
                # A question, for the answer: setting waits for none.
                store.check([seen.key(seen.rank)])
                self._answers += 1
        except (RuntimeError, TimeoutError) as error:
            # The rendezvous is gone. The agent finds that out by itself, and ends.
            logger.debug("no signs of life any more: %s", error)
            self._ended.set()

    def _await_answers(self) -> None:
        interval = beat_interval(self._timeout)
        answers, silence = -1, 0.0
        while not self._ended.wait(interval):
            # Waits are counted, not the clock read: a suspended node has heard nothing either, and
            # may go on.
            silence = silence + interval if answers == self._answers else 0.0
            answers = self._answers
            if silence > self._timeout:
                self._on_cut()
                return


class WatchedRendezvous(RendezvousHandler):
    """torch's dynamic rendezvous, whose round ends also when a node is lost or gives up."""

    def __init__(self, inner: RendezvousHandler, watch: NodeWatch) -> None:
        self._inner = inner
        self._watch = watch

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the nodes of a new round, and watch them from then on."""
        self._watch.round = None
        info = self._inner.next_rendezvous()
        # Where the round's processes meet: a port that was free when it began, so no other round
        # has the same.
        place = info.bootstrap_store_info
        if place is None:
            remedy = "use torch's own agent (torchrun)"
            raise RuntimeError(f"torch's rendezvous names no place where processes meet; {remedy}")
        word = f"{place.master_addr}:{place.master_port}"
        self._watch.round = Round(word, info.rank, info.world_size)
        return info

    def give_up(self) -> None:
        """Have the job be over, for all nodes of the round."""
        self._inner.set_closed()
        self._watch.tell_giving_up()

    def num_nodes_waiting(self) -> int:
        """Return for how many nodes a new round shall begin; a lost node asks for one too."""
        return self._inner.num_nodes_waiting() or int(self._asks_for_an_end())

    def _asks_for_an_end(self) -> bool:
        seen = self._watch.round
        # After its processes' good end a node closes the rendezvous and goes: that is no loss.
        return seen is not None and (seen.gave_up or (seen.lost and not self._inner.is_closed()))

    def shutdown(self) -> bool:
        """End the rendezvous for all nodes."""
        self._watch.end()
        return self._inner.shutdown()

    def get_backend(self) -> str:
        return RENDEZVOUS_BACKEND

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    @property
    def use_agent_store(self) -> bool:
        return self._inner.use_agent_store


def register() -> None:
    """Make the rendezvous and the agent torch's, for launches of this process."""
    rendezvous_handler_registry.register(RENDEZVOUS_BACKEND, _create)
    torch.distributed.launcher.api.LocalElasticAgent = PatientAgent  # type: ignore[misc]  # a class by another of its kind


def _create(params: RendezvousParameters) -> RendezvousHandler:
    limits = (params.min_nodes, params.max_nodes, params.local_addr)
    inner = RendezvousParameters("c10d", params.endpoint, params.run_id, *limits, **params.config)
    # The node that serves does so once its rendezvous is there; before, nobody could be asked.
    rendezvous = rendezvous_handler_registry.create_handler(inner)
    watch = NodeWatch(params.endpoint, constants.node_timeout(), params.config[ON_CUT])
    return WatchedRendezvous(rendezvous, watch)


def rendezvous_settings(
    elastic: Elastic, master_addr: str, master_port: int | None
) -> dict[str, Any]:
    """Return the part of torch's `LaunchConfig` that says where nodes meet. One of the agents
    serves it, the first that can listen there, so the address must be one node's own.
    """
    port = constants.TORCH_DISTRIBUTED_DEFAULT_PORT if master_port is None else master_port
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
        "local_addr": address_towards(master_addr, port) or constants.LOCAL_MASTER_ADDR,
    }


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
        soon, many = QUICK_FAILURE_SECONDS, QUICK_FAILURES
        if time.monotonic() - self._started_at >= soon:
            self._quick_failures = 0
            return
        if rendezvous.num_nodes_waiting():
            # A node has come, and these are its peers' ends; or another failed before, and counts.
            return
        self._quick_failures += 1
        if self._quick_failures == many:
            text = "the processes have failed within %g seconds of their start %d times in a row: "
            logger.error(text + "not starting them again", soon, many)
            self._remaining_restarts = 0
            rendezvous.give_up()
