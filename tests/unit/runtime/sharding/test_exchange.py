"""What shards send each other when a group's layout changes, as integers."""

import itertools
import random

from deepspeed.runtime.sharding.exchange import Run, in_rounds, kept, overlaps
from deepspeed.runtime.sharding.fragments import FragmentTable


def layouts(seed: int = 5) -> list[tuple[FragmentTable, FragmentTable]]:
    generator = random.Random(seed)
    found = []
    for world in (1, 2, 3, 5, 37) * 6:
        numels = [generator.choice((0, 1, 3, 7, 16, 129)) for _ in range(generator.randrange(1, 9))]
        params = list(range(len(numels)))
        generator.shuffle(params)
        first = generator.randrange(len(params) + 1)
        sections = [sorted(params[:first]), sorted(params[first:])]
        found.append(
            (FragmentTable.build(numels, world, 2), FragmentTable.build(numels, world, 8, sections))
        )
    return found


def values(table: FragmentTable) -> list[list[int]]:
    """Each shard with a number for each element of each parameter; padding is 0."""
    first = [1 + sum(table.numels[:param]) for param in range(len(table.numels))]
    shards = [[0] * table.shard_numel for _ in range(table.num_shards)]
    for shard, content in enumerate(shards):
        for fragment in table.of_shard(shard):
            start = first[fragment.param] + fragment.param_start
            content[fragment.in_shard] = range(start, start + fragment.numel)
    return shards


def moved(source: FragmentTable, target: FragmentTable, limit: int) -> list[list[int]]:
    """Move shards from `source` to `target` by messages of at most `limit` elements."""
    count, there = source.num_shards, values(source)
    result = [[0] * target.shard_numel for _ in range(count)]
    rounds = -(-max(source.shard_numel, 1) // limit)
    sent = [in_rounds(overlaps(source, target, rank), limit, rounds) for rank in range(count)]
    received = [in_rounds(overlaps(target, source, rank), limit, rounds) for rank in range(count)]
    for number in range(rounds):
        messages = {
            (rank, peer): [
                value
                for run in sent[rank][number]
                if run.peer == peer
                for value in there[rank][run.start : run.start + run.numel]
            ]
            for rank in range(count)
            for peer in range(count)
        }
        assert all(len(message) <= limit for message in messages.values())
        for rank in range(count):
            for run in received[rank][number]:
                message = messages[run.peer, rank]
                result[rank][run.start : run.start + run.numel] = message[: run.numel]
                messages[run.peer, rank] = message[run.numel :]
        assert not any(messages.values()), "a message is longer than its receiver knows"
    return result


def test_every_element_arrives_at_its_place_in_both_directions():
    # Kills: an element that is sent twice or not at all, ends of a message that disagree in length
    # or order, rounds that cut the two ends differently.
    for files, memory in layouts():
        for limit in (1, 5, 1000):
            assert moved(memory, files, limit) == values(files)
            assert moved(files, memory, limit) == values(memory)


def test_what_a_rank_has_in_both_layouts_is_copied_to_its_place():
    # Kills: runs that each side has cut otherwise paired off as they are, an element left out.
    generator = random.Random(3)
    for files, memory in layouts():
        for rank in range(files.num_shards):
            ends = [
                [run for run in overlaps(*tables, rank) if run.peer == rank]
                for tables in ((memory, files), (files, memory))
            ]
            own, there = values(memory)[rank], values(files)[rank]
            copied = list(kept(*ends))
            assert sum(numel for _, _, numel in copied) == sum(run.numel for run in ends[1])
            for source, target, numel in copied:
                assert own[source : source + numel] == there[target : target + numel]
    # The same elements, cut elsewhere on either side.
    for _ in range(20):
        cuts = [sorted({0, 30, *generator.sample(range(31), 4)}) for _ in range(2)]
        sides = [
            [Run(0, 100 * side + start, end - start) for start, end in itertools.pairwise(points)]
            for side, points in enumerate(cuts)
        ]
        found = [
            (source + at, target + at)
            for source, target, numel in kept(*sides)
            for at in range(numel)
        ]
        assert found == [(at, 100 + at) for at in range(30)]


def test_neighbours_travel_as_one_run():
    # Kills: a copy for each parameter where the layouts agree: most of a large model's do.
    table = FragmentTable.build([4] * 10, 2, 2)
    assert overlaps(table, table, 1) == [Run(1, 0, 20)]


def test_what_a_shard_sends_costs_no_more_with_more_shards():
    # Kills: a loop over all shards for each fragment.
    numels = [10**6] * 40
    files = FragmentTable.build(numels, 10**6, 2)
    memory = FragmentTable.build(numels, 10**6, 8, [[i, i + 1] for i in range(0, 40, 2)])
    assert sum(run.numel for run in overlaps(files, memory, 10**5)) == files.shard_numel
