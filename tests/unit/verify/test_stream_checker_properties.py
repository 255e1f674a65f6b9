"""The stream checker against brute force: it reports exactly when two orders differ."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unit.verify import stream_programs as programs
from unit.verify.stream_programs import Alloc, Free, Op, Range, Record, RecordStream, Step, Wait

streams = st.integers(0, programs.STREAMS - 1)
events = st.integers(0, programs.EVENTS - 1)
memories = st.integers(0, 2)


@st.composite
def ranges(draw: st.DrawFn) -> Range:
    """Mostly the whole memory, so that accesses meet; otherwise a part."""
    memory = draw(memories)
    if draw(st.booleans()):
        return Range(memory, 0, programs.NBYTES)
    start = draw(st.integers(0, programs.NBYTES - 1))
    return Range(memory, start, draw(st.integers(start + 1, programs.NBYTES)))


operators = st.one_of(
    st.builds(Op, streams, st.none(), ranges()),
    st.builds(Op, streams, ranges(), st.none()),
    st.builds(Op, streams, ranges(), ranges()),
)
orderings = st.one_of(
    st.builds(Record, events, streams),
    st.builds(Wait, events, streams),
    st.builds(programs.SyncEvent, events),
    st.builds(programs.SyncStream, streams),
    st.builds(programs.SyncDevice),
)
lifetimes = st.one_of(
    st.builds(Free, memories), st.builds(Alloc, streams), st.builds(RecordStream, memories, streams)
)
steps = st.one_of(
    operators,
    operators,
    orderings,
    lifetimes,
    st.builds(programs.HostAccess, ranges(), st.booleans()),
)
EXAMPLES = 600


@st.composite
def handovers(draw: st.DrawFn) -> list[Step]:
    """Like a bucket: a write, perhaps an edge, another access, perhaps freed and reused."""
    producer, consumer, event = draw(streams), draw(streams), draw(events)
    edge: list[Step] = [Record(event, producer), Wait(event, consumer)]
    program: list[Step] = [draw(st.builds(Op, st.just(producer), st.none(), ranges())), *edge]
    program.append(draw(st.builds(Op, st.just(consumer), ranges(), st.none())))
    program += [Free(draw(memories)), Alloc(draw(streams))]
    # One step replaced or inserted is what a mutation is.
    position = draw(st.integers(0, len(program)))
    if draw(st.booleans()):
        program[position : position + 1] = [draw(steps)]
    else:
        program.insert(position, draw(steps))
    return program


def agree(program: list[Step]) -> None:
    checker = programs.checked(program)
    assert bool(checker.findings) == programs.orders_differ(program), checker.report()


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(st.lists(steps, max_size=7))
@example([Op(0, None, Range(0, 0, 2)), Op(1, None, Range(0, 2, 4))])
@example([Op(1, Range(0, 0, 4), None), Free(0), Alloc(0)])
@example([Op(1, Range(0, 0, 4), None), RecordStream(0, 1), Free(0), Alloc(0)])
def test_any_program(program: list[Step]) -> None:
    # Kills: any rule dropped or weakened (missed races), any wait not honoured (false alarms).
    agree(program)


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(handovers())
def test_a_handover_with_one_change(program: list[Step]) -> None:
    # Kills the same where random programs seldom get: an edge almost right, reused memory.
    agree(program)


WHOLE, ORDERED = Range(0, 0, 4), [Record(0, 0), Wait(0, 1)]
WRITTEN, USED = Op(0, None, WHOLE), [Op(1, WHOLE, None), Free(0)]
DIFFER: list[tuple[list[Step], bool]] = [
    ([WRITTEN, Op(1, WHOLE, None)], True),
    ([WRITTEN, *ORDERED, Op(1, WHOLE, None)], False),
    ([Op(0, WHOLE, None), Op(1, WHOLE, None)], False),
    ([*USED, Alloc(0)], True),
    ([*USED, Alloc(1)], False),
]


@pytest.mark.parametrize("program, differs", DIFFER)
def test_brute_force_itself(program: list[Step], differs: bool) -> None:
    # Kills: an oracle that sees no order, or no difference, at all.
    assert programs.orders_differ(program) is differs
