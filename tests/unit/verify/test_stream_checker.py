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
from deepspeed.verify.streams.check import disable_stream_checking as disable
from deepspeed.verify.streams.check import enable_stream_checking as enable
from deepspeed.verify.streams.check import raise_findings
from deepspeed.verify.streams.checker import SWEEP_INTERVAL
from deepspeed.verify.streams.findings import Kind

A, B, C = "<stream a>", "<stream b>", "<stream c>"


class Event:
    pass


EVENT, OTHER = Event(), Event()
Step = tuple[Any, ...]


class Script:
    """A checker with a shorter way to say who does what; addresses are storage * 1000 + offset."""

    def __init__(self, *steps: Step, **kwargs: Any) -> None:
        self.checker = StreamChecker(**kwargs)
        self.play(*steps)

    def play(self, *steps: Step) -> None:
        """Each is the name of a method of this or the checker, and its arguments."""
        for name, *args in steps:
            getattr(self if hasattr(self, name) else self.checker, name)(*args)

    def write(self, stream: Any, start: int = 0, end: int = 8, storage: int = 0) -> None:
        access = Access(storage, start, end, True, storage * 1000 + start)
        self.checker.launched("write", stream, [access])

    def read(self, stream: Any, start: int = 0, end: int = 8, storage: int = 0) -> None:
        access = Access(storage, start, end, False, storage * 1000 + start)
        self.checker.launched("read", stream, [access])

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


RACE, LIFETIME = [Kind.RACE], [Kind.LIFETIME]
WRITE, READ = ("write", A), ("read", B)
USED = ("allocated", 1, 8, A), ("wait", B, A), ("read", B, 0, 8, 1)
"""Memory of one stream that another uses."""
FREED = *USED, ("freed", 1)
REUSED = ("freed", 1), ("allocated", 2, 8, A)

# What is found, and the steps.
RULES: dict[str, tuple[Any, ...]] = {
    # Kills: reads that are checked against nothing.
    "a read that does not wait for the write": (RACE, WRITE, READ),
    # Kills: a bucket that is reused while its last reader is under way.
    "a write that does not wait for a read": (RACE, ("read", A), ("write", B)),
    # Kills: alarms for every shared tensor.
    "two reads need no order": ([], ("read", A), READ),
    # Kills: storages compared as a whole; two streams may fill one bucket.
    "disjoint slices of one buffer": ([], ("write", A, 0, 4), ("write", B, 4, 8)),
    "and a read of both": (RACE * 2, ("write", A, 0, 4), ("write", B, 4, 8), ("read", C, 3, 5)),
    # Kills: an edge between streams that is taken to last.
    "a wait covers what was issued before it": (RACE, ("wait", B, A), WRITE, READ),
    # Kills: clocks that carry their own stream's work only.
    "waits are transitive": ([], WRITE, ("wait", B, A), ("wait", C, B), ("read", C)),
    # Kills: events that remember the first record, waits that follow an event's future.
    "a re-recorded event stands for its last record": (
        *(RACE, ("event_recorded", EVENT, A), WRITE, ("event_waited", EVENT, B)),
        *(("event_recorded", EVENT, A), READ),
    ),
    # Kills: an order out of nothing, or a crash.
    "an event that was never recorded": (RACE, WRITE, ("event_waited", OTHER, B), READ),
    # Kills: a synchronize that does not reach the streams.
    "the host waited for an event": (
        *([], WRITE, ("event_recorded", EVENT, A), ("event_synchronized", EVENT), READ),
    ),
    "the host waited for a stream": ([], WRITE, ("stream_synchronized", A), READ),
    "the host waited for the device": ([], WRITE, ("device_synchronized",), READ),
    # Kills: keys that cannot be weakly referenced (handles) being refused.
    "events by value": ([], WRITE, ("event_recorded", 7, A), ("event_waited", 7, B), READ),
    # Kills: a keep-alive that is dropped, a free before the event.
    "memory that another stream uses is freed": ([], *FREED),
    "and handed out": (LIFETIME, *USED, *REUSED),
    # Kills: alarms at the free; the wait may come between it and the next allocation.
    "the allocating stream has waited": ([], *FREED, ("wait", A, B), ("allocated", 2, 8, A)),
    # Kills: one pool for all streams.
    "other streams get other memory": ([], *FREED, ("allocated", 2, 8, C)),
    # Kills: record_stream ignored.
    "record_stream excuses what was issued": ([], *USED, ("stream_recorded", 1, B), *REUSED),
    # Kills: any record_stream taken for all.
    "record_stream of another": (LIFETIME, *USED, ("stream_recorded", 1, C), *REUSED),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.replace(" ", "-"))
def test_rule(rule: str) -> None:
    kinds, *steps = RULES[rule]
    assert Script(*steps).kinds == kinds


class TestWords:
    def test_the_host_itself_has_to_wait(self, script: Script) -> None:
        # Kills: a read of page-locked memory before the copy into it is done.
        script.play(("write", A), ("host_accessed", "item", [Access(0, 0, 4, False, 0)]))
        assert script.kinds == [Kind.RACE]
        assert "the host never waits for '<stream a>'" in script.checker.report()

    def test_the_finding_says_where_memory_was_freed(self, script: Script) -> None:
        # Kills: a stack left out for memory that more than its own stream has used.
        script.play(*USED)
        script.checker.freed(1)
        script.checker.allocated(2, 8, A)
        freed_at = script.checker.findings[0].freed_at[0][0].co_name
        assert freed_at == "test_the_finding_says_where_memory_was_freed"
        edge = "'<stream a>' never waits for '<stream b>', which read bytes 0..8"
        assert edge in script.checker.report()

    def test_fresh_memory_is_ready_on_the_stream_it_was_allocated_for(self, script: Script) -> None:
        # Kills: memory used elsewhere while its former owner's work is under way.
        script.play(("allocated", 1, 8, A), ("write", B, 0, 8, 1))
        assert script.kinds == [Kind.RACE]
        assert "former owner" in script.checker.report()

    def test_the_missing_edge(self) -> None:
        # Kills: a report that names the wrong side, range or memory.
        script = Script(name_of={4: "ipg bucket 1"}.get)
        script.write(A)
        script.read(B, 4, 6)
        (finding,) = script.checker.findings
        wrote = "which wrote bytes 4..6 of ipg bucket 1"
        assert finding.edge == f"'<stream b>' never waits for '<stream a>', {wrote}"
        assert f"{__file__}:" in finding.describe()
        assert "in test_the_missing_edge" in finding.describe()

    def test_a_stale_wait_is_told_from_none(self) -> None:
        # Kills: "never waits" where there is a wait, at the wrong place.
        script = Script(("write", A), ("wait", B, A), ("write", A), ("read", B))
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
            use = Use(Launch("op", A, 1, ()), Access(0, 0, 8, False, 0))
            accesses.record(use, lambda earlier: True)
        assert len(accesses.uses()) == 1

    def test_a_sweep_forgets_what_the_host_waited_for(self, script: Script) -> None:
        # Kills: memory that grows with the training.
        for storage in range(SWEEP_INTERVAL - 1):
            script.write(A, storage=storage)
        script.checker.stream_synchronized(A)
        script.write(B, storage=0)
        remembered = [memory for memory in script.checker._memory.values() if len(memory.accesses)]
        assert len(remembered) == 1


def race(sim: Any) -> None:
    value = torch.zeros(8)
    with sim.stream(sim.Stream()):
        value.mul_(2)


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
            wrote = "which wrote bytes 16..24 of second half"
            assert finding.edge == f"<default stream> never waits for {side!r}, {wrote}"

    @pytest.mark.parametrize("own", [None, KeyError])
    def test_raises_at_the_end(self, own: type[Exception] | None) -> None:
        # Kills: findings that nobody hears of; a report that hides why the block itself failed.
        with simulate() as sim, pytest.raises(own or StreamRaceError) as raised:
            with check_streams():
                race(sim)
                if own is not None:
                    raise own
        assert own is not None or "never waits for" in str(raised.value)

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
                assert enable() is enable()
                race(sim)
                with pytest.raises(StreamRaceError):
                    raise_findings()
                raise_findings()
            finally:
                disable()
            raise_findings()


def test_a_device_without_streams() -> None:
    # Kills: a check that passes because it saw nothing.
    if not get_accelerator().resolves_data_dependency():
        pytest.skip("this accelerator has streams")
    with pytest.raises(RuntimeError, match="DS_ACCELERATOR=sim"), check_streams():
        pass
