"""Statistics of collectives: counts, bytes, latencies and bandwidths. Users know this module as
`deepspeed.utils.comms_logging`; `logging_control` decides what is timed.
"""

import math
import sys
from collections import deque
from datetime import datetime
from typing import Any

from deepspeed.comm.collectives import all_gather_object
from deepspeed.comm.process_groups import get_rank, get_world_size, is_initialized
from deepspeed.utils.logging import log_dist
from deepspeed.utils.timer import Span

# Share of the algorithm bandwidth that crosses each link, with n ranks (the formulas of
# nccl-tests):
#   all_reduce                       2 (n - 1) / n   every byte is sent once to be reduced and once
#                                                    to be distributed
#   gather, scatter, all_gather,     (n - 1) / n     a rank's own share does not travel
#   reduce_scatter, all_to_all
#   broadcast, reduce, send, recv    1
# The size is that of the whole result (all_gather) or of the whole input (reduce_scatter,
# all_to_all).
_TWO_WAY_OPS = ("all_reduce",)
_SHARED_OPS = ("all_gather", "allgather", "reduce_scatter", "all_to_all", "gather", "scatter")


def print_rank_0(message: str) -> None:
    """Write a line to stdout on global rank 0 only."""
    if not is_initialized() or get_rank() == 0:
        sys.stdout.write(message + "\n")
        sys.stdout.flush()


def convert_size(size_bytes: int) -> str:
    """Bytes in a readable unit with two decimals at most: ``3.91 KB``."""
    if size_bytes == 0:
        return "0B"
    units = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")
    power = min(int(math.log(size_bytes, 1024)), len(units) - 1)
    return f"{round(size_bytes / 1024**power, 2)} {units[power]}"


def calc_bw_log(
    comm_op: str, size: int, duration: float, num_ranks: int | None = None
) -> tuple[float, float]:
    """Algorithm and bus bandwidth of one operation.

    Args:
        comm_op: the operation's name.
        size: its message in bytes: the whole result of a gather, the whole input of a scatter, the
            tensor otherwise.
        duration: its latency in milliseconds.
        num_ranks: the ranks that took part; None means the whole world.

    Returns:
        Both in gigabits per second.
    """
    if num_ranks is None:
        num_ranks = get_world_size() if is_initialized() else 1
    if duration <= 0:
        return 0.0, 0.0
    algorithm = size * 8 / (duration * 1e6)  # bits / (ms * 1e6) = gigabits / s
    share = (num_ranks - 1) / num_ranks
    if comm_op.startswith(_TWO_WAY_OPS) or comm_op == "inference_all_reduce":
        return algorithm, algorithm * 2 * share
    if comm_op.startswith(_SHARED_OPS):
        return algorithm, algorithm * share
    return algorithm, algorithm


Statistics = dict[str, dict[int, dict[str, Any]]]
"""Of each record name and message size."""

# Titles of columns and what stands in them.
_SUMMARY = {
    "Total Latency(ms)": "total_latency_ms",
    "Avg Latency(ms)": "avg_latency_ms",
    "tput_avg (Gbps)": "tput_avg_gbps",
    "busbw_avg (Gbps)": "busbw_avg_gbps",
}
_STRAGGLER = {
    "Total comm lat(ms)": "total_comm_lat_ms",
    "Total straggler(ms)": "total_straggler_ms",
    "Avg comm lat(ms)": "avg_comm_lat_ms",
    "Avg straggler(ms)": "avg_straggler_ms",
}


def _row(*cells: str) -> str:
    return "".join(f"{cell:<20}" for cell in cells)


class CommsLogger:
    """Keeps latencies and bandwidths of operations by name and message size.

    Attributes:
        enabled: whether anything is timed.
        verbose: whether each operation is logged as it is recorded.
        debug: whether record names carry the calling function.
        prof_ops: the operations that are timed.
        prof_all: whether all of them are.
    """

    def __init__(self) -> None:
        self._recorded: dict[str, dict[int, list[Any]]] = {}
        # Operations whose time the device may not know yet, in the order of their ends: operation,
        # record name, time, bytes, ranks.
        self._unread: deque[tuple[str, str, Span, int, int | None]] = deque()
        self.enabled = False
        self.verbose = False
        self.debug = False
        self.prof_all = True
        self.prof_ops: list[str] = []

    @property
    def comms_dict(self) -> dict[str, dict[int, list[Any]]]:
        """``{record name: {message bytes: [count, latencies in ms, algorithm Gbps, bus Gbps]}}`` of
        everything so far; waits for the last of it.
        """
        self._read(all_of_them=True)
        return self._recorded

    @comms_dict.setter
    def comms_dict(self, recorded: dict[str, dict[int, list[Any]]]) -> None:
        """Go on from these records, such as none; what was recorded is forgotten."""
        self._unread.clear()
        self._recorded = recorded

    def _read(self, all_of_them: bool = False) -> None:
        unread = self._unread
        while unread and (all_of_them or unread[0][2].is_over()):
            raw_name, record_name, span, msg_size, num_ranks = unread.popleft()
            self.append(raw_name, record_name, span.get_elapsed_msec(), msg_size, num_ranks)

    def append_span(
        self,
        raw_name: str,
        record_name: str,
        span: Span,
        msg_size: int,
        num_ranks: int | None = None,
    ) -> None:
        """`append` once the time of `span`, which stands for the latency, is known or asked for."""
        self._unread.append((raw_name, record_name, span, msg_size, num_ranks))
        self._read()

    def configure(self, comms_config: Any) -> None:
        """Take the ``comms_logger`` section, or an object that has it under that name."""
        section = getattr(comms_config, "comms_logger", comms_config)
        self.enabled = bool(section.enabled)
        self.verbose = bool(section.verbose)
        self.debug = bool(section.debug)
        self.prof_all = bool(section.prof_all)
        self.prof_ops = list(section.prof_ops)

    def wants(self, log_name: str, prof: bool = False) -> bool:
        """Whether an operation with this name is to be timed."""
        return self.enabled and (self.prof_all or prof or log_name in self.prof_ops)

    def start_profiling_comms(self) -> None:
        """Time every operation from now on."""
        self.enabled = True
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Time only the operations in ``prof_ops`` from now on."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: list[str]) -> None:
        """Time these operations from now on."""
        self.prof_ops = sorted({*self.prof_ops, *op_name_list})

    def stop_profiling_op(self, op_name_list: list[str]) -> None:
        """Stop timing these operations by name (``prof_all`` still times them)."""
        self.prof_ops = [name for name in self.prof_ops if name not in op_name_list]

    def append(
        self,
        raw_name: str,
        record_name: str,
        latency: float,
        msg_size: int,
        num_ranks: int | None = None,
    ) -> None:
        """Record one finished operation.

        Args:
            raw_name: the operation, for the bandwidth formula.
            record_name: the name it is listed under.
            latency: milliseconds.
            msg_size: bytes; see `calc_bw_log`.
            num_ranks: the ranks that took part; None means the whole world.
        """
        algorithm, bus = calc_bw_log(raw_name, msg_size, latency, num_ranks)
        entry = self._recorded.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        entry[0] += 1
        for values, value in zip(entry[1:], (latency, algorithm, bus), strict=True):
            values.append(value)
        if self.verbose:
            log_dist(
                f"comm op: {record_name} | time (ms): {latency:.2f} | msg size: "
                f"{convert_size(msg_size)} | algbw (Gbps): {algorithm:.2f} | busbw (Gbps): "
                f"{bus:.2f}",
                ranks=[0],
            )

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        return {
            name: {
                size: [entry[0], *(list(values) for values in entry[1:])]
                for size, entry in by_size.items()
            }
            for name, by_size in self.comms_dict.items()
        }

    def has_data(self) -> bool:
        return bool(self.comms_dict)

    def reset_data(self) -> None:
        """Forget what was recorded."""
        self.comms_dict = {}

    def get_operation_names(self) -> list[str]:
        """The record names, in the order of their first appearance."""
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        """How many operations were recorded."""
        return sum(entry[0] for by_size in self.comms_dict.values() for entry in by_size.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]]:
        """The statistics of one record name by message size; empty if never recorded."""
        return {
            size: {
                "count": count,
                "total_latency_ms": sum(latencies),
                "avg_latency_ms": sum(latencies) / count,
                "tput_avg_gbps": sum(algorithm) / count,
                "busbw_avg_gbps": sum(bus) / count,
                "msg_size_bytes": size,
                "msg_size_str": convert_size(size),
            }
            for size, (count, latencies, algorithm, bus) in self.comms_dict.get(
                operation_name, {}
            ).items()
        }

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print the statistics on rank 0 and return them if asked to.

        Args:
            print_log: whether to print.
            show_straggler: also split each latency into communication (the shortest over the ranks)
                and waiting for the slowest rank. Collective: all ranks must call.
            return_dict: return ``summary``, ``straggler_analysis`` and ``metadata``.
        """
        summary = {name: self.get_operation_summary(name) for name in self.comms_dict}
        stragglers = self._straggler_analysis() if show_straggler else None
        if print_log:
            print_rank_0(_table("", _SUMMARY, summary))
            if stragglers is not None:
                print_rank_0(_table("Breakdown with straggler effect", _STRAGGLER, stragglers))
        if not return_dict:
            return None
        initialized = is_initialized()
        metadata = {
            "world_size": get_world_size() if initialized else 1,
            "rank": get_rank() if initialized else 0,
            "timestamp": datetime.now().isoformat(),
        }
        return {"summary": summary, "straggler_analysis": stragglers, "metadata": metadata}

    def _straggler_analysis(self) -> Statistics:
        mine = {
            name: {size: entry[1] for size, entry in sizes.items()}
            for name, sizes in self.comms_dict.items()
        }
        everyone: list[Any] = [mine]
        if is_initialized():
            everyone = [None] * get_world_size()
            # One exchange of everything: ranks need not have recorded the same operations, so a
            # collective per operation could not be matched.
            all_gather_object(everyone, mine)
        return {
            name: {
                size: self._straggler_entry(name, size, own, everyone)
                for size, own in sizes.items()
            }
            for name, sizes in mine.items()
        }

    @staticmethod
    def _straggler_entry(
        name: str, size: int, own: list[float], everyone: list[Any]
    ) -> dict[str, Any]:
        # A rank with another count took part in other calls: its i-th latency is not the i-th of
        # ours.
        peers = [
            one[name][size] for one in everyone if len(one.get(name, {}).get(size, ())) == len(own)
        ]
        communication = sum(min(latencies) for latencies in zip(*peers, strict=True))
        waiting = sum(own) - communication
        return {
            "count": len(own),
            "total_comm_lat_ms": communication,
            "total_straggler_ms": waiting,
            "avg_comm_lat_ms": communication / len(own),
            "avg_straggler_ms": waiting / len(own),
            "msg_size_bytes": size,
            "msg_size_str": convert_size(size),
        }


def _table(title: str, columns: dict[str, str], entries: Statistics) -> str:
    lines = [title] if title else []
    lines.append(_row("Comm. Op", "Message Size", "Count", *columns))
    for name, by_size in entries.items():
        lines.append(name)
        for _, entry in sorted(by_size.items()):
            values = [f"{entry[key]:.2f}" for key in columns.values()]
            lines.append(_row("", entry["msg_size_str"], str(entry["count"]), *values))
    return "\n".join(lines)
