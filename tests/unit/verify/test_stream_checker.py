"""Each rule of the stream checker by name, its words, and its bookkeeping."""

from typing import Any

import pytest
import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.accelerator.stream_trace import Access
from deepspeed.utils import memory_names
from deepspeed.verify import StreamChecker, StreamRaceError, check_streams
from deepspeed.verify.streams.accesses import AccessMap, Launch, Use
from deepspeed.verify.streams.check import (
    disable_stream_checking,
    enable_stream_checking,
    raise_findings,
)
from deepspeed.verify.streams.checker import SWEEP_INTERVAL
from deepspeed.verify.streams.findings import Kind

A, B, C = "<stream a>", "<stream b>", "<stream c>"


class Event:
    pass


class Script:
    """A checker with a shorter way to say who does what; addresses are storage * 1000 + offset."""

    def __init__(self, **kwargs: Any) -> None:
        self.checker = StreamChecker(**kwargs)

    def write(self, stream: Any, start: int = 0, end: int = 8, storage: int = 0) -> None:
        self.checker.launched(
            "write", stream, [Access(storage, start, end, True, storage * 1000 + start)]
        )

    def read(self, stream: Any, start: int = 0, end: int = 8, storage: int = 0) -> None:
        self.checker.launched(
            "read", stream, [Access(storage, start, end, False, storage * 1000 + start)]
        )

    def wait(self, waiting: Any, waited: Any) -> None:
        event = Event()
        self.checker.event_recorded(event, waited)
        self.checker.event_waited(event, waiting)

    @property
    def kinds(self) -> list[Kind]:
        return [finding.kind for finding in self.checker.findings]


@pytest.fixture
def script() -> Script:
    return Script()


class TestOrder:
    def test_a_read_that_does_not_wait_for_the_write(self, script: Script) -> None:
        # Kills: reads that are checked against nothing.
        script.write(A)
        script.read(B)
        assert script.kinds == [Kind.RACE]

    def test_a_write_that_does_not_wait_for_a_read(self, script: Script) -> None:
        # Kills: a bucket that is reused while its last reader is under way.
        script.read(A)
        script.write(B)
        assert script.kinds == [Kind.RACE]

    def test_two_reads_need_no_order(self, script: Script) -> None:
        # Kills: alarms for every shared tensor.
        script.read(A)
        script.read(B)
        assert script.kinds == []

    def test_disjoint_slices_of_one_buffer(self, script: Script) -> None:
        # Kills: storages compared as a whole; two streams may fill one bucket.
        script.write(A, 0, 4)
        script.write(B, 4, 8)
        assert script.kinds == []
        script.read(C, 3, 5)
        assert len(script.kinds) == 2

    def test_a_wait_covers_what_was_issued_before_it_only(self, script: Script) -> None:
        # Kills: an edge between streams that is taken to last.
        script.wait(B, A)
        script.write(A)
        script.read(B)
        assert script.kinds == [Kind.RACE]

    def test_waits_are_transitive(self, script: Script) -> None:
        # Kills: clocks that carry their own stream's work only.
        script.write(A)
        script.wait(B, A)
        script.wait(C, B)
        script.read(C)
        assert script.kinds == []

    def test_a_re_recorded_event_stands_for_its_last_record(self, script: Script) -> None:
        # Kills: events that remember the first record, waits that follow an event's future.
        event = Event()
        script.checker.event_recorded(event, A)
        script.write(A)
        script.checker.event_waited(event, B)
        script.checker.event_recorded(event, A)
        script.read(B)
        assert script.kinds == [Kind.RACE]

    def test_an_event_that_was_never_recorded_is_no_wait(self, script: Script) -> None:
        # Kills: an order out of nothing, or a crash.
        script.write(A)
        script.checker.event_waited(Event(), B)
        script.read(B)
        assert script.kinds == [Kind.RACE]

    @pytest.mark.parametrize("what", ["event", "stream", "device"])
    def test_what_the_host_waited_for_precedes_later_launches(
        self, script: Script, what: str
    ) -> None:
        # Kills: a synchronize that does not reach the streams.
        event = Event()
        script.write(A)
        script.checker.event_recorded(event, A)
        {
            "event": lambda: script.checker.event_synchronized(event),
            "stream": lambda: script.checker.stream_synchronized(A),
            "device": script.checker.device_synchronized,
        }[what]()
        script.read(B)
        assert script.kinds == []

    def test_the_host_itself_has_to_wait(self, script: Script) -> None:
        # Kills: a read of page-locked memory before the copy into it is done.
        script.write(A)
        script.checker.host_accessed("item", [Access(0, 0, 4, False, 0)])
        assert script.kinds == [Kind.RACE]
        assert "the host never waits for '<stream a>'" in script.checker.report()

    def test_events_by_value(self, script: Script) -> None:
        # Kills: keys that cannot be weakly referenced (handles) being refused.
        script.write(A)
        script.checker.event_recorded(7, A)
        script.checker.event_waited(7, B)
        script.read(B)
        assert script.kinds == []


class TestLifetime:
    def use_elsewhere(self, script: Script) -> None:
        script.checker.allocated(1, 8, A)
        script.wait(B, A)
        script.read(B, storage=1)

    def test_memory_handed_out_while_another_stream_uses_it(self, script: Script) -> None:
        # Kills: a keep-alive that is dropped, a free before the event.
        self.use_elsewhere(script)
        script.checker.freed(1)
        assert script.kinds == []
        script.checker.allocated(2, 8, A)
        assert script.kinds == [Kind.LIFETIME]

    def test_the_finding_says_where_memory_was_freed(self, script: Script) -> None:
        # Kills: a stack left out for memory that more than its own stream has used.
        self.use_elsewhere(script)
        script.checker.freed(1)
        script.checker.allocated(2, 8, A)
        assert (
            script.checker.findings[0].freed_at[0][0].co_name
            == "test_the_finding_says_where_memory_was_freed"
        )
        assert (
            "'<stream a>' never waits for '<stream b>', which read bytes 0..8"
            in script.checker.report()
        )

    def test_the_allocating_stream_has_waited_by_then(self, script: Script) -> None:
        # Kills: alarms at the free; the wait may come between it and the next allocation.
        self.use_elsewhere(script)
        script.checker.freed(1)
        script.wait(A, B)
        script.checker.allocated(2, 8, A)
        assert script.kinds == []

    def test_other_streams_get_other_memory(self, script: Script) -> None:
        # Kills: one pool for all streams.
        self.use_elsewhere(script)
        script.checker.freed(1)
        script.checker.allocated(2, 8, C)
        assert script.kinds == []

    def test_record_stream_excuses_what_was_issued_by_then(self, script: Script) -> None:
        # Kills: record_stream ignored.
        self.use_elsewhere(script)
        script.checker.stream_recorded(1, B)
        script.checker.freed(1)
        script.checker.allocated(2, 8, A)
        assert script.kinds == []

    def test_record_stream_of_another_stream_excuses_nothing(self, script: Script) -> None:
        # Kills: any record_stream taken for all.
        self.use_elsewhere(script)
        script.checker.stream_recorded(1, C)
        script.checker.freed(1)
        script.checker.allocated(2, 8, A)
        assert script.kinds == [Kind.LIFETIME]

    def test_fresh_memory_is_ready_on_the_stream_it_was_allocated_for(self, script: Script) -> None:
        # Kills: memory used elsewhere while its former owner's work is under way.
        script.checker.allocated(1, 8, A)
        script.write(B, storage=1)
        assert script.kinds == [Kind.RACE]
        assert "former owner" in script.checker.report()


class TestWords:
    def test_the_missing_edge(self) -> None:
        # Kills: a report that names the wrong side, range or memory.
        script = Script(name_of={4: "ipg bucket 1"}.get)
        script.write(A)
        script.read(B, 4, 6)
        (finding,) = script.checker.findings
        assert (
            finding.edge
            == "'<stream b>' never waits for '<stream a>', which wrote bytes 4..6 of ipg bucket 1"
        )
        assert f"{__file__}:" in finding.describe()
        assert "in test_the_missing_edge" in finding.describe()

    def test_a_stale_wait_is_told_from_none(self, script: Script) -> None:
        # Kills: "never waits" where there is a wait, at the wrong place.
        script.write(A)
        script.wait(B, A)
        script.write(A)
        script.read(B)
        assert "it waits for earlier work of '<stream a>' only" in script.checker.findings[0].edge

    def test_the_same_places_are_one_finding(self, script: Script) -> None:
        # Kills: a report as long as the training.
        for storage in range(5):
            script.write(A, storage=storage)
            script.read(B, storage=storage)
        (finding,) = script.checker.findings
        assert finding.count == 5

    def test_raising_starts_anew(self, script: Script) -> None:
        # Kills: a finding raised at every later step again.
        script.write(A)
        script.read(B)
        with pytest.raises(StreamRaceError, match="1 stream hazard") as error:
            script.checker.raise_findings()
        assert len(error.value.findings) == 1
        script.checker.raise_findings()


class TestBookkeeping:
    def test_frees_in_the_midst_of_a_report(self) -> None:
        # Kills: a deadlock or a broken map when Python drops memory while a finding is being named.
        def name_of(address: int) -> str:
            script.checker.freed(1)
            return "x"

        script = Script(name_of=name_of)
        script.checker.allocated(1, 8, A)
        script.write(A)
        script.read(B)
        assert script.checker.findings[0].memory == "x"

    def test_segments_join_again(self) -> None:
        # Kills: a map that grows with every slice that was ever touched.
        accesses = AccessMap()
        launch = Launch("op", A, 1, ())
        for start in range(8):
            accesses.record(Use(launch, Access(0, start, start + 1, True, 0)), lambda earlier: True)
        assert len(accesses) == 8
        accesses.record(Use(launch, Access(0, 0, 8, True, 0)), lambda earlier: True)
        assert len(accesses) == 1

    def test_reads_do_not_pile_up(self) -> None:
        # Kills: a tensor that is read for a million steps and never written.
        accesses = AccessMap()
        for _ in range(100):
            accesses.record(
                Use(Launch("op", A, 1, ()), Access(0, 0, 8, False, 0)), lambda earlier: True
            )
        assert len(accesses.uses()) == 1

    def test_a_sweep_forgets_what_the_host_waited_for(self, script: Script) -> None:
        # Kills: memory that grows with the training.
        for storage in range(SWEEP_INTERVAL - 1):
            script.write(A, storage=storage)
        script.checker.stream_synchronized(A)
        script.write(B, storage=0)
        remembered = [memory for memory in script.checker._memory.values() if len(memory.accesses)]
        assert len(remembered) == 1


class TestOnTheSimulatedDevice:
    def test_a_missing_wait_is_found_and_named(self) -> None:
        # Kills: views, schemas or streams that do not arrive; names looked up at a wrong address.
        class Owner:
            def __init__(self, buffer: torch.Tensor) -> None:
                self.buffer = buffer

            def named_memory(self) -> list[tuple[str, torch.Tensor]]:
                return [("first half", self.buffer[:4]), ("second half", self.buffer[4:])]

        with simulate() as sim:
            with check_streams(raises=False) as checker:
                side = sim.Stream()
                owner = Owner(torch.zeros(8))
                memory_names.register(owner)
                side.wait_stream(sim.current_stream())
                with sim.stream(side):
                    owner.buffer[4:].mul_(2)
                owner.buffer[:4].add_(1)
                assert checker.findings == []
                owner.buffer[2:6].add_(1)
            (finding,) = checker.findings
            assert finding.edge == (
                f"<default stream> never waits for {side!r}, which wrote bytes 16..24 of second "
                "half"
            )

    def test_raises_at_the_end(self) -> None:
        # Kills: findings that nobody hears of.
        with simulate() as sim, pytest.raises(StreamRaceError, match="never waits for"):
            with check_streams():
                value = torch.zeros(8)
                with sim.stream(sim.Stream()):
                    value.mul_(2)

    def test_the_blocks_own_error_wins(self) -> None:
        # Kills: a report that hides why the block failed.
        with simulate() as sim, pytest.raises(KeyError):
            with check_streams():
                value = torch.zeros(8)
                with sim.stream(sim.Stream()):
                    value.mul_(2)
                raise KeyError

    def test_a_query_that_says_done_is_a_wait(self) -> None:
        # Kills: alarms about a keep-alive that is dropped after its event has passed.
        with simulate() as sim, check_streams():
            side, event = sim.Stream(), sim.Event()
            value = torch.zeros(8)
            side.wait_stream(sim.current_stream())
            with sim.stream(side):
                value.mul_(2)
            event.record(side)
            side.scheduler.drain(side)  # as time passes; the host is told nothing
            assert event.query()
            value.add_(1)

    def test_for_the_whole_process(self) -> None:
        # Kills: a switch that does nothing, or cannot be switched off.
        with simulate() as sim:
            try:
                assert enable_stream_checking() is enable_stream_checking()
                value = torch.zeros(8)
                with sim.stream(sim.Stream()):
                    value.mul_(2)
                with pytest.raises(StreamRaceError):
                    raise_findings()
                raise_findings()
            finally:
                disable_stream_checking()
            raise_findings()


def test_a_device_without_streams() -> None:
    # Kills: a check that passes because it saw nothing.
    if not get_accelerator().resolves_data_dependency():
        pytest.skip("this accelerator has streams")
    with pytest.raises(RuntimeError, match="DS_ACCELERATOR=sim"), check_streams():
        pass
