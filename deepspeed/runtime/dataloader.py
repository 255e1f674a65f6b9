"""Training data: each data-parallel rank's share of a dataset, in batches, with a position that can
be restored. An `IterableDataset` is not split: it decides itself what each rank sees.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler

DATALOADER_CONFIG_KEYS = ("seed", "shuffle", "micro_batches")


class ResumableDistributedSampler(Sampler[int]):
    """This rank's sample indices of one epoch, from a given position on.

    The order of an epoch is that of ``torch.utils.data.DistributedSampler``: a permutation seeded
    by ``seed + epoch``, dealt to the ranks in turn, padded with its own beginning (or cut, with
    ``drop_last``) to a multiple of the ranks. The position is counted in samples over all ranks, so
    a run may resume with another number of ranks.

    With ``together`` so many samples, a micro-batch, are dealt at once, and an epoch is a multiple
    of ``micro_batches`` of them: which samples a micro-batch has does not depend on the ranks, and
    that with number ``t`` of rank ``r`` is number ``t * num_replicas + r`` of all.
    """

    def __init__(
        self,
        num_samples: int,
        num_replicas: int,
        rank: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        together: int = 1,
        micro_batches: int | None = None,
    ) -> None:
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank {rank} is not one of the {num_replicas} data-parallel ranks")
        if (micro_batches or num_replicas) % num_replicas:
            raise ValueError(
                f"{micro_batches} micro-batches cannot be dealt to {num_replicas} ranks: give a "
                "multiple of the ranks"
            )
        self.num_samples = num_samples
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.together = together
        self._in_epoch = together * micro_batches if micro_batches else 1  # it is a multiple of it
        self.epoch = 0
        self.consumed_samples = 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless it is this one: a restored position survives."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.consumed_samples = 0

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order: list[int] = torch.randperm(self.num_samples, generator=generator).tolist()
        else:
            order = list(range(self.num_samples))
        size = self._cut(self.num_samples, self._in_epoch)
        whole = itertools.islice(itertools.cycle(order), size)
        more = itertools.chain(
            itertools.islice(whole, self.consumed_samples, None), itertools.cycle(order)
        )
        left = list(itertools.islice(more, self._num_left))
        starts = range(self.rank * self.together, len(left), self.num_replicas * self.together)
        return iter([index for start in starts for index in left[start : start + self.together]])

    def __len__(self) -> int:
        return self._num_left // self.num_replicas

    @property
    def _num_left(self) -> int:
        """Samples that are left for all ranks, as many for each. In the middle of a step they are
        those of an epoch that was not stopped.
        """
        whole = self._cut(self.num_samples, self._in_epoch)
        left = max(0, whole - self.consumed_samples)
        return self._cut(left, self.together * self.num_replicas)

    def _cut(self, count: int, parts: int) -> int:
        return (count if self.drop_last else count + parts - 1) // parts * parts


class _SkippingSampler(Sampler[Any]):
    """Another sampler without its first ``skip`` samples, which are drawn but not loaded."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        self.skip = 0

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.sampler), self.skip, None)

    def __len__(self) -> int:
        if not isinstance(self.sampler, Sized):
            raise TypeError(f"{type(self.sampler).__name__} has no length")
        return max(0, len(self.sampler) - self.skip)


class _Pass:
    """The iterator of a loader's pass: `iter()` of it goes on, of the loader starts anew.

    It asks the loader for every batch, so that it follows a position restored meanwhile.
    """

    def __init__(self, loader: DeepSpeedDataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        return next(self._loader)


class DeepSpeedDataLoader:
    """Batches of one rank, whose position is part of a checkpoint.

    Every pass over the loader is one epoch, shuffled anew. ``state_dict`` counts the batches handed
    out, so a run that restores it continues with the very next batch: none is lost, none repeated.
    Starting anew before the end repeats that epoch from its beginning, as in torch.

    Args:
        dataset: With or without random access.
        batch_size: Samples per batch on this rank.
        pin_memory: Load into page-locked memory (not on hosts without a device).
        local_rank: No effect: the share of data follows from the data-parallel rank alone.
        tput_timer: Throughput timer, to ``start()`` before each fetch; or None.
        collate_fn: Makes a batch of samples.
        num_local_io_workers: Worker processes; None for none.
        data_sampler: Order of samples to use instead; it must know its rank by itself.
        data_parallel_world_size, data_parallel_rank: None for the default process group's.
        dataloader_drop_last: Drop the last incomplete batch.
        deepspeed_dataloader_config: ``seed`` (0), ``shuffle`` (true), and ``micro_batches`` of a
            step over all ranks, which are then kept together (`ResumableDistributedSampler`).

    Attributes:
        post_process_func: Called as ``fn(batch, state)`` with each batch that a
            `DeepSpeedDataSampler` has chosen, and its ``state_dict()`` of that step; what it
            returns is handed out.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Any = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Mapping[str, Any] | None = None,
    ) -> None:
        settings = dict(deepspeed_dataloader_config or {})
        unknown = sorted(set(settings) - set(DATALOADER_CONFIG_KEYS))
        if unknown:
            raise ValueError(
                f"deepspeed_dataloader_config: unknown keys {unknown}; known: "
                f"{DATALOADER_CONFIG_KEYS}"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.tput_timer = tput_timer
        self.dataloader_drop_last = dataloader_drop_last
        self.seed = int(settings.get("seed", 0))
        self.epoch = 0
        self._batches_done = 0
        self._samples_done = 0
        self._running: Iterator[Any] | None = None
        self.post_process_func: Callable[[Any, dict[str, Any]], Any] | None = None
        self._world, self._rank = _data_parallel_place(data_parallel_world_size, data_parallel_rank)
        self._micro_batches = settings.get("micro_batches")
        self.data_sampler = self._make_sampler(data_sampler, bool(settings.get("shuffle", True)))
        # Its own generator: torch's loader draws a seed from the global one at the start of each
        # pass, so that a resumed run, which starts one pass more, would see other random numbers
        # (dropout) than one that never stopped.
        self._generator = torch.Generator()
        batches: dict[str, Any] = (
            {"batch_sampler": self.data_sampler}
            if isinstance(self.data_sampler, DeepSpeedDataSampler)
            else {
                "batch_size": batch_size,
                "sampler": self.data_sampler,
                "drop_last": dataloader_drop_last,
            }
        )
        self.dataloader: DataLoader[Any] = DataLoader(
            dataset,
            **batches,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and get_accelerator().device_name() != "cpu",
            generator=self._generator,
        )

    def _make_sampler(self, given: Any, shuffle: bool) -> Sampler[Any] | None:
        if isinstance(self.dataset, IterableDataset):
            if given is not None:
                raise ValueError("data_sampler cannot order an IterableDataset; leave it out")
            return None
        if isinstance(given, DeepSpeedDataSampler):
            return given
        if given is not None:
            return _SkippingSampler(given)
        return self._own_sampler(shuffle)

    def _own_sampler(self, shuffle: bool) -> ResumableDistributedSampler:
        place = (len(self.dataset), self._world, self._rank)
        order = (shuffle, self.seed, self.dataloader_drop_last)
        dealt = () if self._micro_batches is None else (self.batch_size, self._micro_batches)
        return ResumableDistributedSampler(*place, *order, *dealt)

    def __len__(self) -> int:
        """Return the batches of a whole epoch (TypeError for a dataset without a length)."""
        if isinstance(self.data_sampler, DeepSpeedDataSampler):
            return self.data_sampler.num_micro_batches
        if isinstance(self.data_sampler, ResumableDistributedSampler):
            samples = len(self._own_sampler(shuffle=False))
        elif isinstance(self.data_sampler, _SkippingSampler):
            samples = len(self.data_sampler) + self.data_sampler.skip
        else:
            samples = len(self.dataset)
        whole_batches, rest = divmod(samples, self.batch_size)
        return whole_batches + (rest > 0 and not self.dataloader_drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless it is this one."""
        if epoch != self.epoch:
            self._go_to(epoch, batches=0, samples=0)

    def __iter__(self) -> Iterator[Any]:
        # A pass that handed out batches is given up; a position that was just restored is kept. A
        # curriculum is one pass, however often the script begins to read.
        begun_anew = self._running is not None and self._batches_done
        if begun_anew and not isinstance(self.data_sampler, DeepSpeedDataSampler):
            self._go_to(self.epoch, batches=0, samples=0)
        self._running = self._run()
        return _Pass(self)

    def __next__(self) -> Any:
        if self._running is None:
            self._running = self._run()
        if self.tput_timer is not None:
            self.tput_timer.start()
        return next(self._running)

    def _run(self) -> Iterator[Any]:
        """Yield the batches left in this epoch, then go to the next one."""
        self._position_sampler()
        self._generator.manual_seed(self.seed + self.epoch)
        batches = iter(self.dataloader)
        if self.data_sampler is None:
            # Without random access the batches up to the position have to be read to be skipped.
            batches = itertools.islice(batches, self._batches_done, None)  # type: ignore[assignment]  # any iterator
        for batch in batches:
            # Counted before it is handed out: a checkpoint written meanwhile holds it as used.
            state = self._sampler_state()
            self._batches_done += 1
            self._samples_done += self.batch_size * self._world
            if self.post_process_func is not None and state is not None:
                batch = self.post_process_func(batch, state)
            yield batch
        self._go_to(self.epoch + 1, batches=0, samples=0)

    def _sampler_state(self) -> dict[str, Any] | None:
        """The sampler's state at the loader's position: it is asked ahead by workers."""
        if not isinstance(self.data_sampler, DeepSpeedDataSampler):
            return None
        return self.data_sampler.state_at(self._samples_done)

    def _go_to(self, epoch: int, batches: int, samples: int) -> None:
        self.epoch = epoch
        self._batches_done = batches
        self._samples_done = samples

    def _position_sampler(self) -> None:
        if isinstance(self.data_sampler, DeepSpeedDataSampler):
            self.data_sampler.consumed_samples = self._samples_done
        elif isinstance(self.data_sampler, ResumableDistributedSampler):
            self.data_sampler.seed = self.seed
            self.data_sampler.set_epoch(self.epoch)
            self.data_sampler.consumed_samples = self._samples_done
        elif isinstance(self.data_sampler, _SkippingSampler):
            if hasattr(self.data_sampler.sampler, "set_epoch"):
                self.data_sampler.sampler.set_epoch(self.epoch)
            self.data_sampler.skip = self._batches_done * self.batch_size

    def state_dict(self) -> dict[str, Any]:
        """Return the position: epoch, and batches (of this rank) and samples (of all ranks) handed
        out in it; and a `DeepSpeedDataSampler`'s.
        """
        return {
            "epoch": self.epoch,
            "batches": self._batches_done,
            "consumed_samples": self._samples_done,
            "seed": self.seed,
            "num_samples": len(self.dataset) if self.data_sampler is not None else None,
            "data_sampler": self._sampler_state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a position; the next batch is the first one that had not been handed out. A
        ValueError refuses a dataset of another length.
        """
        length = len(self.dataset) if self.data_sampler is not None else None
        if state_dict["num_samples"] != length:
            raise ValueError(
                f"the dataset has {length} samples, but {state_dict['num_samples']} when the "
                "position was saved, so its order cannot be continued; resume with the same data, "
                "or without restoring the dataloader"
            )
        sampler = state_dict.get("data_sampler")
        if isinstance(self.data_sampler, DeepSpeedDataSampler) and sampler is not None:
            self.data_sampler.load_state_dict(sampler)
        self._running = None
        self.seed = state_dict["seed"]
        self._go_to(state_dict["epoch"], state_dict["batches"], state_dict["consumed_samples"])
        if self._at_end():
            self._go_to(self.epoch + 1, batches=0, samples=0)

    def _at_end(self) -> bool:
        """Return whether the epoch has no batch left: saved before the loop noticed."""
        if self.data_sampler is None:
            return False
        self._position_sampler()
        left = len(self.data_sampler)  # type: ignore[arg-type]  # all samplers have a length
        if isinstance(self.data_sampler, DeepSpeedDataSampler):
            return left == 0
        return left < self.batch_size if self.dataloader_drop_last else left == 0


def _data_parallel_place(world: int | None, rank: int | None) -> tuple[int, int]:
    started = dist.is_initialized()
    if world is None:
        world = dist.get_world_size() if started else 1
    if rank is None:
        rank = dist.get_rank() if started else 0
    return world, rank


class RepeatingLoader:
    """A loader that starts over at its end, for training by steps instead of epochs."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        # Not started here: a position restored before the first batch must still be honoured.
        self.data_iter: Iterator[Any] | None = None

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __next__(self) -> Any:
        if self.data_iter is None:
            self.data_iter = iter(self.loader)
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state_dict)
        self.data_iter = None
