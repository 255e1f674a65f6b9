"""Order, completeness and exact resumption of training data."""

from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset, SequentialSampler

from deepspeed.runtime.dataloader import (
    DeepSpeedDataLoader,
    RepeatingLoader,
    ResumableDistributedSampler,
)


class Stream(IterableDataset):
    """0, 1, 2, ... without random access."""

    def __iter__(self):
        return iter(range(10))


def loader(length=23, batch=4, rank=0, world=2, timer=None, dataset=None, **kwargs):
    ranks = {"data_parallel_world_size": world, "data_parallel_rank": rank}
    data = dataset or list(torch.arange(length))
    return DeepSpeedDataLoader(data, batch, False, -1, timer, **ranks, **kwargs)


def values(batches):
    return [batch.tolist() for batch in batches]


def resumed(stopped, *args, **kwargs):
    """A new loader that goes on where another one is."""
    made = loader(*args, **kwargs)
    made.load_state_dict(stopped.state_dict())
    return made


@pytest.mark.parametrize("length", [0, 1, 5, 23, 24])
@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("drop_last", [False, True])
def test_order_is_that_of_torchs_distributed_sampler(length, world, drop_last):
    if length == 0 and not drop_last:
        expected = [[]] * world
    else:
        expected = []
        for rank in range(world):
            theirs = DistributedSampler(range(length), world, rank, seed=3, drop_last=drop_last)
            theirs.set_epoch(2)
            expected.append(list(theirs))
    for rank in range(world):
        ours = ResumableDistributedSampler(length, world, rank, seed=3, drop_last=drop_last)
        ours.set_epoch(2)
        assert list(ours) == expected[rank] and len(ours) == len(expected[rank])


@pytest.mark.parametrize("length, drop_last", [(24, True), (29, True), (29, False)])
def test_micro_batches_do_not_depend_on_ranks(length, drop_last):
    """Kills: samples dealt one by one, an epoch that ends where ranks end."""

    def micro_batches(world):
        place = {"seed": 3, "drop_last": drop_last, "together": 2, "micro_batches": 6}
        samplers = [ResumableDistributedSampler(length, world, r, **place) for r in range(world)]
        dealt = [list(one) for one in samplers]
        assert [len(one) for one in samplers] == [len(one) for one in dealt]
        count = len(dealt[0]) // 2
        return [dealt[r][2 * t : 2 * t + 2] for t in range(count) for r in range(world)]

    alone = micro_batches(1)
    assert len(alone) == (18 if not drop_last else 12)
    assert micro_batches(2) == micro_batches(3) == micro_batches(6) == alone
    with pytest.raises(ValueError, match="cannot be dealt to 4 ranks"):
        ResumableDistributedSampler(length, 4, 0, together=2, micro_batches=6)


def test_an_epoch_is_complete_and_the_next_one_is_shuffled_anew():
    ranks = [loader(24, rank=rank) for rank in (0, 1)]
    epochs = [[values(one) for one in ranks] for _ in range(2)]
    for epoch in epochs:
        assert sorted(sum(sum(epoch, []), [])) == list(range(24))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("drop_last, workers", [(False, 0), (True, 0), (True, 1)])
def test_length_counts_the_batches(drop_last, workers):
    one = loader(23, dataloader_drop_last=drop_last, num_local_io_workers=workers)
    assert len(values(one)) == len(one) == (2 if drop_last else 3)


@pytest.mark.parametrize("stop_at", [0, 1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("drop_last", [False, True])
def test_resuming_continues_with_the_very_next_batch(stop_at, drop_last):
    straight = RepeatingLoader(loader(dataloader_drop_last=drop_last))
    expected = values(next(straight) for _ in range(9))
    stopped = RepeatingLoader(loader(dataloader_drop_last=drop_last))
    values(next(stopped) for _ in range(stop_at))
    again = RepeatingLoader(loader(dataloader_drop_last=drop_last))
    again.load_state_dict(stopped.state_dict())
    assert values(next(again) for _ in range(9 - stop_at)) == expected[stop_at:]


def test_a_for_loop_resumes_in_the_middle_of_its_epoch():
    stopped = loader()
    iterator = iter(stopped)
    seen = values(next(iterator) for _ in range(2))
    again = resumed(stopped)
    assert seen + values(again) == values(loader())
    assert len(again) == 3 and again.epoch == 1


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_position_after_the_last_batch_is_the_next_epochs_beginning(drop_last):
    stopped = loader(dataloader_drop_last=drop_last)
    for _ in range(len(stopped)):
        next(stopped)
    straight = loader(dataloader_drop_last=drop_last)
    straight.set_epoch(1)
    assert values(resumed(stopped, dataloader_drop_last=drop_last)) == values(straight)


def test_a_position_restored_after_the_repeating_loader_was_made_is_honoured():
    expected, inner = values(iter(loader())), loader()
    outer = RepeatingLoader(inner)
    next(outer)
    next(iter(stopped := loader()))
    inner.load_state_dict(stopped.state_dict())
    assert values([next(outer)]) == expected[1:2]


def test_a_run_may_resume_with_another_number_of_ranks():
    done = []
    for rank in (0, 1):
        stopped = loader(24, batch=2, rank=rank, world=2)
        iterator = iter(stopped)
        done += sum(values(next(iterator) for _ in range(3)), [])
    rest = []
    for rank in range(3):
        rest += sum(values(resumed(stopped, 24, batch=1, rank=rank, world=3)), [])
    assert sorted(done + rest) == list(range(24))


def test_breaking_off_repeats_the_epoch_and_set_epoch_keeps_a_position_in_it():
    one = loader()
    for _ in one:
        break
    assert values(one) == values(loader())
    stopped = loader()
    stopped.set_epoch(4)
    next(stopped)
    again = resumed(stopped)
    again.set_epoch(4)
    assert len(values(again)) == 2
    again.set_epoch(0)
    assert values(again) == values(loader())


def test_resuming_does_not_touch_the_global_random_numbers():
    one = loader()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    values(one)
    one.load_state_dict(one.state_dict())
    values(one)
    assert torch.equal(torch.get_rng_state(), before)


def test_another_dataset_is_refused():
    with pytest.raises(ValueError, match="24 samples, but 23"):
        resumed(loader(23), 24)


def test_iterable_datasets_are_resumed_by_reading():
    straight = values(loader(dataset=Stream()))
    assert straight == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    next(stopped := loader(dataset=Stream()))
    again = resumed(stopped, dataset=Stream())
    assert values(again) == straight[1:]
    assert values(again) == straight
    with pytest.raises(TypeError):
        len(again)


def test_a_sampler_of_ones_own_is_used_and_resumed():
    sampler = SequentialSampler(range(9))
    straight = values(loader(9, data_sampler=sampler))
    assert straight == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    next(stopped := loader(9, data_sampler=sampler))
    again = resumed(stopped, 9, data_sampler=sampler)
    assert len(again) == 3 and values(again) == straight[1:]
    with pytest.raises(ValueError, match="IterableDataset"):
        loader(dataset=Stream(), data_sampler=sampler)


def test_order_without_shuffling_and_another_seed():
    plain = loader(6, batch=3, deepspeed_dataloader_config={"shuffle": False})
    assert values(plain) == [[0, 2, 4]]
    seeded = loader(deepspeed_dataloader_config={"seed": 5})
    assert values(seeded) != values(loader())
    with pytest.raises(ValueError, match="curriculum"):
        loader(deepspeed_dataloader_config={"curriculum": True})


def test_throughput_timer_and_collate_are_called():
    timer = Mock()
    assert list(loader(8, world=1, timer=timer, collate_fn=len)) == [4, 4]
    assert timer.start.call_count >= 2


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="batch_size"):
        loader(batch=0)
    with pytest.raises(ValueError, match="rank 2"):
        loader(rank=2)


def test_repeating_loader_goes_round():
    assert [next(RepeatingLoader([1]))] == [1]
    outer = RepeatingLoader([1, 2, 3])
    assert [next(outer) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    assert len(outer) == 3
