"""`DeepSpeedDataSampler`: batches of samples that may be as difficult as the step says.

[Note: the order of samples]
A metric gives every sample a number; at step t, samples are eligible whose number is at most t's
difficulty (of several metrics, at most each one's). As long as the difficulties stay, the eligible
samples are gone through in a random order, all of them before any comes again; when they change,
another order of more samples begins. The order is seeded by the step at which it began, so which
samples a step gets follows from its number and the seed alone: it is the same for any number of
ranks with the same global batch, and a run goes on from a checkpoint by its position.

Micro-batch m of rank r has the samples `[(m N + r) b, (m N + r + 1) b)` of the global batch, with N
data-parallel ranks and b samples per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
from torch.utils.data import Sampler

from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset

VALUE, PERCENTILE = "value", "percentile"
SINGLE_CLUSTER, SCHEDULE_BASED = "single_cluster", "schedule_based"
METRICS = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"


class Metric:
    """One metric: its schedule, and the samples by their number.

    `chooses` is whether samples are chosen by it. A metric of one cluster has a difficulty, for
    whoever cuts samples to it, and lets every sample through.
    """

    def __init__(self, name: str, config: Mapping[str, Any], num_samples: int) -> None:
        self._name = f"{METRICS}.{name}"
        self.scheduler = CurriculumScheduler(config, block=self._name)
        self._largest: int = config["max_difficulty"]
        clusters = self._one_of(config, "clustering_type", (SINGLE_CLUSTER, SCHEDULE_BASED))
        self.chooses = clusters == SCHEDULE_BASED
        if not self.chooses:
            return
        self._by = self._one_of(config, "difficulty_type", (VALUE, PERCENTILE))
        samples = self._open(config, "index_to_sample_path")
        self._order = samples.everything  # by the metric, the easiest first
        if self._order.size != num_samples:
            raise DeepSpeedConfigError(
                f"{self._name}.index_to_sample_path: {config['index_to_sample_path']!r} has "
                f"{self._order.size} samples, and the dataset {num_samples}; make the index from "
                "this dataset"
            )
        self._ends = numpy.cumsum(samples.sizes, dtype=numpy.int64)
        if self._by == VALUE:
            self._levels = self._open(config, "index_to_metric_path").everything
            if len(self._levels) != len(samples) or (numpy.diff(self._levels) < 0).any():
                raise DeepSpeedConfigError(
                    f"{self._name}.index_to_metric_path: {config['index_to_metric_path']!r} does "
                    f"not have {len(samples)} values in their order, one per item of "
                    "index_to_sample_path; make both anew (write_metric_index)"
                )

    def _one_of(self, config: Mapping[str, Any], key: str, known: tuple[str, ...]) -> str:
        value = config.get(key)
        if value not in known:
            raise DeepSpeedConfigError(f"{self._name}.{key}: {value!r}: expected one of {known}")
        return str(value)

    def _open(self, config: Mapping[str, Any], key: str) -> MMapIndexedDataset:
        path = config.get(key)
        if not path:
            raise DeepSpeedConfigError(f"{self._name}.{key} is missing; samples are chosen by it")
        try:
            return MMapIndexedDataset(path)
        except (OSError, ValueError) as error:
            raise DeepSpeedConfigError(
                f"{self._name}.{key}: {path!r} cannot be read: {error}; name the files without "
                "suffix, as write_metric_index wrote them"
            ) from error

    def eligible(self, difficulty: int) -> Any:
        """List the samples at most so difficult, 1-d, the easiest first; refuse that none is."""
        if self._by == VALUE:
            num_levels = int(numpy.searchsorted(self._levels, difficulty, side="right"))
            count = int(self._ends[num_levels - 1]) if num_levels else 0
        elif difficulty >= self._largest:
            count = self._order.size
        else:
            count = self._order.size * difficulty // self._largest
        if not count:
            raise DeepSpeedConfigError(
                f"{self._name}: no sample is as easy as difficulty {difficulty}; raise "
                "min_difficulty"
            )
        return self._order[:count]


class DeepSpeedDataSampler(Sampler[list[int]]):
    """This rank's micro-batches, as lists of samples; a loader's `batch_sampler`.

    Args:
        data_efficiency_config: The block `data_efficiency`, as a dict.
        one_epoch_total_samples: Samples of the dataset.
        micro_batch_size: Samples per micro-batch and rank.
        data_parallel_rank, data_parallel_size: This rank's place.
        data_parallel_group, global_rank: No effect: nothing is communicated.
        gradient_accumulation_steps: Micro-batches per step.
        drop_last: No effect: the last batches that would be incomplete are left out.

    Attributes:
        consumed_samples: Samples of all ranks before the next micro-batch that iterating gives.
        global_batch_size: Samples per step.
    """

    def __init__(
        self,
        data_efficiency_config: Mapping[str, Any],
        one_epoch_total_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_parallel_group: object = None,
        gradient_accumulation_steps: int = 1,
        global_rank: int = 0,
        drop_last: bool = True,
    ) -> None:
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(
                f"rank {data_parallel_rank} is not one of the {data_parallel_size} data-parallel "
                "ranks"
            )
        sampling = data_efficiency_config["data_sampling"]
        self._seed = int(data_efficiency_config["seed"])
        self._num_samples = one_epoch_total_samples
        self._micro, self._rank = micro_batch_size, data_parallel_rank
        self._slice = micro_batch_size * data_parallel_size
        self._accumulation = gradient_accumulation_steps
        self.global_batch_size = self._slice * gradient_accumulation_steps
        self._num_steps = sampling["num_epochs"] * one_epoch_total_samples // self.global_batch_size
        curriculum = sampling["curriculum_learning"]
        blocks = curriculum["curriculum_metrics"] if curriculum["enabled"] else {}
        self.metrics = {
            name: Metric(name, block, one_epoch_total_samples) for name, block in blocks.items()
        }
        self.consumed_samples = 0

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: Mapping[str, Callable[[int], int]]
    ) -> None:
        """Give metrics of custom schedules their functions of the step, the same on all ranks."""
        for name, function in schedule_func_dict.items():
            self.metrics[name].scheduler.set_custom_get_difficulty(function)

    def difficulties(self, step: int, choosing: bool = False) -> dict[str, int]:
        """Tell the difficulty of all metrics, or those that choose samples, at a step, from 1."""
        return {
            name: m.scheduler.get_difficulty(step)
            for name, m in self.metrics.items()
            if m.chooses or not choosing
        }

    @property
    def num_micro_batches(self) -> int:
        return self._num_steps * self._accumulation

    def __len__(self) -> int:
        return self.num_micro_batches - self.consumed_samples // self._slice

    def __iter__(self) -> Iterator[list[int]]:
        first = self.consumed_samples // self._slice
        orders = _Orders(self)
        for micro in range(first, self.num_micro_batches):
            step, place = divmod(micro, self._accumulation)
            begin = place * self._slice + self._rank * self._micro
            yield orders.batch(step + 1)[begin : begin + self._micro]

    def eligible(self, difficulties: Mapping[str, int]) -> Any:
        """List the samples that all metrics that choose let through, 1-d; refuse that none is."""
        chosen = [self.metrics[name].eligible(level) for name, level in difficulties.items()]
        if not chosen:
            return numpy.arange(self._num_samples)
        pool = chosen[0]
        for other in chosen[1:]:
            pool = numpy.intersect1d(pool, other)
        if not pool.size:
            raise DeepSpeedConfigError(
                f"{METRICS}: no sample is as easy as all of {dict(difficulties)}; raise a "
                "min_difficulty"
            )
        return pool

    def shuffled(self, size: int, begun_at: int, number_of_pass: int) -> Any:
        seeds = (self._seed, begun_at, number_of_pass)
        return numpy.random.default_rng(seeds).permutation(size)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the difficulties there."""
        return self.state_at(self.consumed_samples)

    def state_at(self, consumed_samples: int) -> dict[str, Any]:
        step = consumed_samples // self.global_batch_size + 1
        return {
            "consumed_samples": consumed_samples,
            "curriculum_step": step,
            "current_difficulties": self.difficulties(step),
            "global_batch_size": self.global_batch_size,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a position; refuse one of another global batch, whose steps get other samples."""
        saved = state_dict["global_batch_size"]
        if saved != self.global_batch_size:
            raise ValueError(
                f"data_efficiency.data_sampling: the position was saved with {saved} samples per "
                f"step, and there are {self.global_batch_size} now, with which a step gets other "
                "samples; resume with the same train_batch_size"
            )
        self.consumed_samples = state_dict["consumed_samples"]


class _Orders:
    """The global batches of a sampler, asked for in the order of steps."""

    def __init__(self, sampler: DeepSpeedDataSampler) -> None:
        self._sampler = sampler
        self._seen_step = 0
        self._batch: list[int] = []
        self._difficulties: dict[str, int] | None = None
        self._begun_at = 1
        self._pool: Any = None
        self._pass = -1
        self._order: Any = None

    def batch(self, step: int) -> list[int]:
        if step != self._seen_step:
            self._go_to(step)
            size = self._sampler.global_batch_size
            begin = (step - self._begun_at) * size
            self._batch = [self._sample(begin + i) for i in range(size)]
        return self._batch

    def _go_to(self, step: int) -> None:
        """Find the step at which the difficulties of `step` began."""
        for each in range(self._seen_step + 1, step + 1):
            difficulties = self._sampler.difficulties(each, choosing=True)
            if difficulties != self._difficulties:
                self._difficulties, self._begun_at, self._pool = difficulties, each, None
        self._seen_step = step
        if self._pool is None:
            self._pool = self._sampler.eligible(self._difficulties or {})
            self._pass = -1

    def _sample(self, position: int) -> int:
        number_of_pass, place = divmod(position, len(self._pool))
        if number_of_pass != self._pass:
            self._pass = number_of_pass
            self._order = self._sampler.shuffled(len(self._pool), self._begun_at, number_of_pass)
        return int(self._pool[self._order[place]])
