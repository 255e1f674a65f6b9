"""What an engine trains on: loaders, and how difficult the data of a step may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from deepspeed import comm as dist
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.runtime.data_pipeline.curriculum_scheduler import (
    ARGUMENT,
    CUSTOM,
    SEQLEN,
    CurriculumScheduler,
)
from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.runtime.engine_parts.engine_state import EngineState
from deepspeed.utils.logging import warn_once


class EngineData:
    """Loaders, samplers and curricula of one engine."""

    def __init__(self, engine: EngineState) -> None:
        self._engine = engine

    def deepspeed_io(
        self,
        dataset: object,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: object = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Make a loader of this rank's part of `dataset`, resumable if it is the training one."""
        batch_size = batch_size or self._engine._config.train_micro_batch_size_per_gpu
        if data_sampler is None and route == "train":
            data_sampler = self._sampler_of(dataset, batch_size)
            if data_sampler is not None:
                sampling = self._engine._config.tree.data_efficiency.data_sampling
                pin_memory = sampling.pin_memory
                num_local_io_workers = num_local_io_workers or sampling.num_workers
        order = {}
        if self._engine._config.tree.reproducibility.world_size_invariant:
            steps = self._engine._config.gradient_accumulation_steps
            order["micro_batches"] = steps * self._engine.dp_world_size
        return DeepSpeedDataLoader(
            dataset=dataset,
            batch_size=batch_size,
            deepspeed_dataloader_config=order,
            pin_memory=pin_memory and self._engine.device.type != "cpu",
            collate_fn=collate_fn or self._engine.collate_fn,
            local_rank=self._engine.local_rank,
            tput_timer=self._engine.timers.throughput if route == "train" else None,
            num_local_io_workers=num_local_io_workers,
            data_sampler=data_sampler,
            data_parallel_world_size=self._engine.dp_world_size,
            data_parallel_rank=dist.get_rank(group=self._engine.data_parallel_group),
            dataloader_drop_last=self._engine._config.tree.dataloader_drop_last,
        )

    @property
    def _chooses_samples(self) -> bool:
        block = self._engine._config.tree.data_efficiency
        return block.enabled and block.data_sampling.enabled

    def warn_of_no_data(self) -> None:
        if self._chooses_samples and self._engine.training_dataloader is None:
            warn_once(
                "data_efficiency.data_sampling orders what deepspeed.initialize(training_data=...) "
                "or engine.deepspeed_io(dataset) loads; this engine was given no training_data"
            )

    def _sampler_of(self, dataset: Any, micro_batch: int) -> DeepSpeedDataSampler | None:
        """Make what `data_efficiency.data_sampling` orders a dataset by, if it is on."""
        block = self._engine._config.tree.data_efficiency
        if not self._chooses_samples:
            return None
        if not self.is_map_style_dataset(dataset):
            raise DeepSpeedConfigError(
                "data_efficiency.data_sampling.enabled: true chooses samples by their number, "
                f"which a {type(dataset).__name__} does not have; use a dataset with __getitem__ "
                "and __len__, or false"
            )
        return DeepSpeedDataSampler(
            block.model_dump(),
            len(dataset),
            micro_batch,
            self._engine.parallel_map.data.rank,
            self._engine.parallel_map.data.size,
            gradient_accumulation_steps=self._engine._config.gradient_accumulation_steps,
        )

    @staticmethod
    def is_map_style_dataset(obj: object) -> bool:
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: object) -> bool:
        return isinstance(obj, IterableDataset)

    def arguments_of_curriculum(self) -> dict[str, Any]:
        """Go to the difficulty of the step at hand, and return what the model is given for it."""
        scheduler = self._engine.curriculum_scheduler_legacy
        if scheduler is None:
            return {}
        difficulty = scheduler.update_difficulty(self._engine.global_steps + 1)
        is_length = self._engine._config.tree.curriculum_learning.curriculum_type == SEQLEN
        return {ARGUMENT: difficulty} if is_length else {}

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: Mapping[str, Callable[[int], int]]
    ) -> None:
        """Give custom schedules their functions of the step, which counts from 1.

        `schedule_func_dict` has functions under the `curriculum_type` of `curriculum_learning`, or
        the names of metrics that `training_dataloader` chooses samples by.
        """
        custom = {
            name: scheduler
            for name, scheduler in self._schedulers().items()
            if scheduler.get_state()["schedule_type"] == CUSTOM
        }
        unknown = sorted(schedule_func_dict.keys() - custom.keys())
        if unknown:
            raise DeepSpeedConfigError(
                f"set_custom_curriculum_learning_schedule: {unknown[0]!r} has no schedule_type "
                f'"custom"; those that have are {sorted(custom)}'
            )
        for name, function in schedule_func_dict.items():
            custom[name].set_custom_get_difficulty(function)

    def _schedulers(self) -> dict[str, CurriculumScheduler]:
        found: dict[str, CurriculumScheduler] = {}
        sampler = getattr(self._engine.training_dataloader, "data_sampler", None)
        if isinstance(sampler, DeepSpeedDataSampler):
            found |= {name: metric.scheduler for name, metric in sampler.metrics.items()}
        if self._engine.curriculum_scheduler_legacy is not None:
            found[self._engine._config.tree.curriculum_learning.curriculum_type] = (
                self._engine.curriculum_scheduler_legacy
            )
        return found

    def set_data_post_process_func(
        self, post_process_func: Callable[[Any, dict[str, Any]], Any]
    ) -> None:
        """Pass every batch of `training_dataloader` through a function, with the state of the
        sampler (`current_difficulties`, `curriculum_step`): to cut sequences, say. Refused unless
        `data_efficiency.data_sampling` orders that loader.
        """
        loader = self._engine.training_dataloader
        if not isinstance(getattr(loader, "data_sampler", None), DeepSpeedDataSampler):
            raise DeepSpeedConfigError(
                "set_data_post_process_func needs deepspeed.initialize(training_data=...) and "
                "data_efficiency.data_sampling.enabled: true, whose sampler has a state; otherwise "
                "process batches where they are read"
            )
        loader.post_process_func = post_process_func
