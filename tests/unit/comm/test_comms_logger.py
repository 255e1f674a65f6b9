"""The comms logger: what it times, its formulas, its summary."""

import contextlib
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.comm.watch import observation
from deepspeed.utils.comms_logging import CommsLogger, calc_bw_log, convert_size
from unit.common import DistributedTest, needs_newer_gloo

BUS_SHARES = {
    **dict.fromkeys(("all_reduce", "inference_all_reduce", "all_reduce_coalesced"), 2 * 3 / 4),
    **dict.fromkeys(("all_gather_into_tensor", "reduce_scatter_tensor"), 3 / 4),
    **dict.fromkeys(("all_to_all_single", "gather", "scatter"), 3 / 4),
    **dict.fromkeys(("broadcast", "reduce", "send", "isend"), 1),
}


@pytest.mark.parametrize("operation", BUS_SHARES)
def test_bandwidths(operation: str) -> None:
    # One million bytes in two milliseconds are four gigabits per second.
    algorithm, bus = calc_bw_log(operation, 1_000_000, 2.0, num_ranks=4)
    assert (algorithm, bus) == pytest.approx((4.0, 4.0 * BUS_SHARES[operation]))


def test_sizes_are_readable() -> None:
    sizes = [convert_size(n) for n in (0, 1023, 4000, 123456789)]
    assert sizes == ["0B", "1023.0 B", "3.91 KB", "117.74 MB"]


def test_summary_of_what_was_recorded() -> None:
    log = CommsLogger()
    assert not log.has_data()
    for latency in (1.0, 3.0):
        log.append("all_reduce", "gradients", latency, 1000, num_ranks=2)
    log.append("broadcast", "weights", 2.0, 500, num_ranks=2)
    assert log.get_operation_names() == ["gradients", "weights"] and log.get_total_operations() == 3
    entry = log.get_operation_summary("gradients")[1000]
    assert (entry["count"], entry["total_latency_ms"], entry["avg_latency_ms"]) == (2, 4.0, 2.0)
    assert entry["tput_avg_gbps"] == pytest.approx((0.008 + 0.008 / 3) / 2)
    assert entry["msg_size_str"] == "1000.0 B"
    raw = log.get_raw_data()
    raw["gradients"][1000][1].append(9.0)
    assert log.get_raw_data()["gradients"][1000][1] == [1.0, 3.0]  # a copy


def test_records_can_be_put_there() -> None:
    # Scripts forget what was recorded by an assignment; what is not read yet goes too.
    ended: Any = SimpleNamespace(is_over=lambda: False, get_elapsed_msec=lambda: 1.0)
    log = CommsLogger()
    log.append("broadcast", "weights", 2.0, 500, num_ranks=2)
    log.append_span("broadcast", "weights", ended, 500, 2)
    log.comms_dict = {}
    assert not log.has_data()
    kept = {"mine": {8: [1, [1.0], [2.0], [3.0]]}}
    log.comms_dict = kept
    log.append("broadcast", "weights", 2.0, 500, num_ranks=2)
    assert log.comms_dict is kept and log.get_operation_names() == ["mine", "weights"]
    log.reset_data()
    assert not log.has_data() and log.get_operation_summary("gradients") == {}


def test_stragglers_are_what_exceeds_the_fastest_rank() -> None:
    everyone: list[Any] = [{"op": {8: [1.0, 5.0]}}, {"op": {8: [2.0, 2.0]}}, {"op": {8: [0.1]}}, {}]
    entry = CommsLogger._straggler_entry("op", 8, [1.0, 5.0], everyone)
    # The third rank took part in other calls and does not count: min(1, 2) + min(5, 2) = 3 of 6.
    assert entry["total_comm_lat_ms"] == 3.0 and entry["total_straggler_ms"] == 3.0


def test_choice_of_operations() -> None:
    log = CommsLogger()
    assert not log.wants("all_reduce")
    log.start_profiling_comms()
    assert log.wants("all_reduce")
    log.stop_profiling_comms()
    assert not log.wants("all_reduce") and log.wants("all_reduce", prof=True)
    log.start_profiling_op(["all_reduce"])
    assert log.wants("all_reduce")
    log.stop_profiling_op(["all_reduce"])
    assert not log.wants("all_reduce")


class TestLogger(DistributedTest):
    world_size = 2

    def test_every_operation_is_recorded_once_with_its_size(self) -> None:
        dist.configure(enabled=True)
        tensor, double = torch.ones(4), torch.ones(8)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, log_name="mine")
        dist.broadcast(tensor, 0)
        dist.all_gather_into_tensor(double, tensor)
        dist.reduce_scatter_tensor(tensor, double)
        dist.barrier()
        handle = dist.all_reduce(double, async_op=True)
        before = dist.get_comm_operation_count()
        handle.wait()
        handle.wait()
        assert handle.is_completed()
        assert dist.get_comm_operation_count() == before + 1  # recorded by the first wait
        found = {name: sorted(sizes) for name, sizes in dist.comms_logger.get_raw_data().items()}
        assert found == {
            **{"all_reduce": [16, 32], "mine": [16], "broadcast": [16], "barrier": [0]},
            **{"all_gather_into_tensor": [32], "reduce_scatter_tensor": [32]},
        }
        assert double.tolist() == [8.0] * 8  # 1, doubled by three sums

    def test_results_are_those_of_the_unwatched_operations(self) -> None:
        dist.configure(enabled=True)
        rank = dist.get_rank()
        outs = [torch.empty(2) for _ in range(2)]
        dist.all_gather(outs, torch.full((2,), float(rank)))
        assert torch.cat(outs).tolist() == [0, 0, 1, 1]
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, rank)
        assert gathered == [0, 1]
        if rank == 0:
            dist.send(torch.ones(1), dst=1)
        else:
            assert dist.recv(torch.zeros(1), src=0) == 0
        into = torch.ones(2)
        collected = [torch.empty(2), torch.empty(2)] if rank == 0 else None
        dist.gather(into, collected, dst=0)
        dist.scatter(into, collected, src=0)
        assert into.tolist() == [1.0, 1.0]
        dist.all_to_all_single(into, torch.full((2,), float(rank)))
        assert into.tolist() == [0.0, 1.0]
        dist.reduce(into, dst=0)
        dist.monitored_barrier()
        names = set(dist.get_logged_comm_ops())
        assert {"all_gather", "all_gather_object", "gather", "scatter", "reduce"} <= names

    @needs_newer_gloo
    def test_reduce_scatter_of_a_list_is_that_of_the_unwatched_operation(self) -> None:
        dist.configure(enabled=True)
        into = torch.empty(2)
        dist.reduce_scatter(into, [torch.full((2,), float(dist.get_rank()))] * 2)
        assert into.tolist() == [1.0, 1.0]
        assert dist.get_logged_comm_ops() == ["reduce_scatter"]

    def test_summary(self) -> None:
        dist.configure(enabled=True)
        dist.all_reduce(torch.ones(1000))
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            result = dist.log_summary(show_straggler=True, return_dict=True)
        assert result is not None
        assert result["metadata"]["world_size"] == 2
        assert result["metadata"]["rank"] == dist.get_rank()
        assert list(result["summary"]) == ["all_reduce"]
        assert result["summary"]["all_reduce"][4000]["count"] == 1
        assert result["straggler_analysis"]["all_reduce"][4000]["total_straggler_ms"] >= 0
        text = shown.getvalue()
        assert ("3.91 KB" in text and "busbw_avg (Gbps)" in text) == (dist.get_rank() == 0)
        assert dist.get_comm_operation_count() == 1  # the summary's own exchange is not recorded
        assert dist.has_comm_data()
        dist.reset_log()
        assert not dist.has_comm_data() and dist.log_summary() is None

    def test_configuration_and_overrides(self) -> None:
        section = SimpleNamespace(enabled=True, verbose=False, debug=True, prof_all=False)
        section.prof_ops = ["broadcast"]
        dist.configure(SimpleNamespace(tree=SimpleNamespace(comms_logger=section)))
        dist.all_reduce(torch.ones(1))
        dist.broadcast(torch.ones(1), 0)
        caller = "[Caller Func: test_configuration_and_overrides]"
        assert dist.get_logged_comm_ops() == [f"broadcast | {caller}"]
        dist.all_reduce(torch.ones(1), prof=True)
        assert dist.get_comm_operation_count() == 2
        dist.configure(enabled=False)
        dist.all_reduce(torch.ones(1), prof=True)
        assert dist.get_comm_operation_count() == 2 and observation.chain is None

    def test_own_operations(self) -> None:
        @dist.timed_op
        def twice(tensor: torch.Tensor, group: Any = None, log_name: str = "twice") -> None:
            dist.all_reduce(tensor)
            dist.all_reduce(tensor)

        twice(torch.ones(1))
        assert dist.get_comm_operation_count() == 0
        dist.configure(enabled=True)
        twice(torch.ones(2), log_name="named")
        assert dist.comms_logger.get_raw_data()["named"][8][0] == 1
        assert dist.comms_logger.get_raw_data()["all_reduce"][8][0] == 2
