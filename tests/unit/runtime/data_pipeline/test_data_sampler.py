"""Which samples a step gets, and the files that say how difficult they are."""

import struct
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from unit.common import DistributedTest
from unit.models import config_of, sgd

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.checkpointing.process_files import restore_position
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    dataset_exists,
    write_metric_index,
)
from deepspeed.runtime.dataloader import DeepSpeedDataLoader

SAMPLES = 40
NUMBERS = list(torch.arange(float(SAMPLES))[:, None])
ON = {"enabled": True}
# Sample i is as hard as that: 8 samples each of 1 to 5.
HARDNESS = numpy.random.default_rng(3).permutation(numpy.arange(SAMPLES) % 5 + 1)


def metric(folder: Path, values: Any = HARDNESS, name: str = "hard", **keys: Any) -> dict[str, Any]:
    """A metric's block, with its files."""
    samples, levels = str(folder / f"{name}_samples"), str(folder / f"{name}_values")
    write_metric_index(values, samples, levels)
    return {
        "index_to_sample_path": samples,
        "index_to_metric_path": levels,
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": 2,
        "max_difficulty": 5,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [2, 4, 5], "max_step": [3, 5]},
        **keys,
    }


def efficiency(metrics: dict[str, Any], num_epochs: int = 3, **keys: Any) -> dict[str, Any]:
    curriculum = {"enabled": True, "curriculum_metrics": metrics}
    sampling = {"enabled": True, "num_epochs": num_epochs, "curriculum_learning": curriculum}
    return {"enabled": True, "seed": 7, "data_sampling": {**sampling, **keys}}


def steps_of(
    config: dict[str, Any], ranks: int, micro: int, accumulation: int, consumed: int = 0
) -> list[list[int]]:
    """The samples of each step, in the order of the global batch."""
    streams = []
    for rank in range(ranks):
        steps = {"gradient_accumulation_steps": accumulation}
        sampler = DeepSpeedDataSampler(config, SAMPLES, micro, rank, ranks, **steps)
        sampler.consumed_samples = consumed
        length = len(sampler)
        streams.append(list(sampler))
        assert len(streams[-1]) == length
    batches = [sum(together, []) for together in zip(*streams, strict=True)]
    starts = range(0, len(batches), accumulation)
    return [sum(batches[i : i + accumulation], []) for i in starts]


def test_every_cut_of_the_global_batch_gets_the_same_samples(tmp_path: Path) -> None:
    # Kills: an order that depends on ranks or micro-batches, a position that forgets where a
    # difficulty began, another order after resuming.
    config = efficiency({"hard": metric(tmp_path)})
    whole = steps_of(config, 1, 8, 1)
    assert len(whole) == 3 * SAMPLES // 8
    for cut in ((1, 4, 2), (2, 4, 1), (2, 2, 2), (4, 1, 2), (8, 1, 1)):
        assert steps_of(config, *cut) == whole
    for done in range(len(whole)):
        assert steps_of(config, 2, 2, 2, consumed=8 * done) == whole[done:]
    assert steps_of({**config, "seed": 8}, 1, 8, 1) != whole


def test_samples_are_as_hard_as_the_step_and_come_once_in_a_pass(tmp_path: Path) -> None:
    # Kills: harder samples too early, samples that never come, one that comes twice before others
    # came once, the same order in each pass.
    whole = steps_of(efficiency({"hard": metric(tmp_path)}), 1, 8, 1)
    easy, middle, everything = whole[:3], sum(whole[3:5], []), whole[5:15]
    assert sorted(sum(easy[:2], [])) == numpy.flatnonzero(HARDNESS <= 2).tolist()
    assert set(easy[2]) <= set(numpy.flatnonzero(HARDNESS <= 2).tolist())
    assert all(HARDNESS[i] <= 4 for i in middle) and len(set(middle)) == 16
    assert max(HARDNESS[i] for i in middle) > 2
    first, second = sum(everything[:5], []), sum(everything[5:], [])
    assert sorted(first) == sorted(second) == list(range(SAMPLES)) and first != second
    back = metric(tmp_path, schedule_config={"difficulty": [5, 2, 5], "max_step": [2, 4]})
    whole = steps_of(efficiency({"hard": back}), 1, 8, 1)
    assert whole[:2] != whole[4:6]  # another order of the same samples


def test_percentiles_one_cluster_and_several_metrics(tmp_path: Path) -> None:
    # Kills: percentiles of the values instead of the samples, a metric of one cluster that chooses,
    # samples that only one of two metrics lets through.
    percents = {"min_difficulty": 25, "max_difficulty": 100, "difficulty_type": "percentile"}
    schedule = {"difficulty": [25, 100], "max_step": [2]}
    shares = metric(tmp_path, **percents, schedule_config=schedule)
    easiest = sorted(range(SAMPLES), key=lambda i: (HARDNESS[i], i))[: SAMPLES // 4]
    found = steps_of(efficiency({"hard": shares}), 1, 5, 1)
    assert sorted(sum(found[:2], [])) == sorted(easiest)
    assert sorted(sum(found[2:10], [])) == list(range(SAMPLES))
    one = metric(tmp_path, clustering_type="single_cluster")
    assert sorted(sum(steps_of(efficiency({"hard": one}), 1, 8, 1)[:5], [])) == list(range(SAMPLES))
    evens = metric(tmp_path, values=numpy.arange(SAMPLES) % 2 * 9 + 1, name="odd")
    both = steps_of(efficiency({"hard": metric(tmp_path), "odd": evens}), 1, 4, 1)
    assert all(HARDNESS[i] <= 2 and i % 2 == 0 for i in sum(both[:3], []))


def test_files_are_those_of_upstream_and_are_checked(tmp_path: Path) -> None:
    # Kills: another layout, places in numbers instead of bytes, files that are cut off.
    name = str(tmp_path / "data")
    builder = MMapIndexedDatasetBuilder(name + ".bin", numpy.int32)
    for item in ([1, 2, 3], torch.tensor([], dtype=torch.int32), numpy.array([4, 5])):
        builder.add_item(item)
        builder.end_document()
    builder.finalize(name + ".idx")
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 3, 4)
    index += struct.pack("<3i", 3, 0, 2) + struct.pack("<3q", 0, 12, 12)
    index += struct.pack("<4q", 0, 1, 2, 3)
    assert Path(name + ".idx").read_bytes() == index
    assert Path(name + ".bin").read_bytes() == struct.pack("<5i", 1, 2, 3, 4, 5)
    data = MMapIndexedDataset(name)
    assert [data[i].tolist() for i in range(len(data))] == [[1, 2, 3], [], [4, 5]]
    assert dataset_exists(name) and not dataset_exists(name + "x")
    with pytest.raises(IndexError, match="item 3 of 3"):
        data[3]
    for content, said in (
        (index[:-1], "is cut off"),
        (b"{}", "is no index"),
        (index, "tells of 5"),
    ):
        Path(name + ".idx").write_bytes(content)
        Path(name + ".bin").write_bytes(struct.pack("<4i", 1, 2, 3, 4))
        with pytest.raises(ValueError, match=said):
            MMapIndexedDataset(name)


def test_what_makes_no_sense(tmp_path: Path) -> None:
    other = metric(tmp_path, values=HARDNESS % 3, name="other")["index_to_metric_path"]
    whole = "expected a whole number of at least 1"
    for change, said in (
        ({"difficulty_type": "values"}, "difficulty_type: 'values': expected one of"),
        ({"clustering_type": None}, "clustering_type: None: expected one of"),
        ({"index_to_sample_path": None}, "index_to_sample_path is missing"),
        ({"index_to_sample_path": "nowhere"}, "cannot be read"),
        ({"schedule_type": "linear"}, "curriculum_metrics.hard.schedule_type: 'linear'"),
        ({"min_difficulty": 0}, f"min_difficulty: 0: {whole}"),
        ({"index_to_metric_path": other}, "does not have 5 values"),
        # Files that do not fit.
        ({"values": HARDNESS[1:]}, "has 39 samples, and the dataset 40"),
        ({"values": HARDNESS + 5}, "no sample is as easy as difficulty 2"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=said):
            steps_of(efficiency({"hard": metric(tmp_path, **change)}), 1, 8, 1)


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    # Kills: a position that is forgotten when other ranks take over, a loader that begins its pass
    # anew whenever the script begins to read.
    config = efficiency({"hard": metric(tmp_path)})
    whole = steps_of(config, 1, 8, 1)

    def loader(ranks: int, rank: int) -> DeepSpeedDataLoader:
        micro = 8 // ranks
        sampler = DeepSpeedDataSampler(config, SAMPLES, micro, rank, ranks)
        split = {"data_parallel_world_size": ranks, "data_parallel_rank": rank}
        return DeepSpeedDataLoader(NUMBERS, micro, False, 0, None, data_sampler=sampler, **split)

    two = [loader(2, rank) for rank in range(2)]
    for step in range(6):
        batches = [next(iter(each)).flatten().int().tolist() for each in two]
        assert sum(batches, []) == whole[step]
    one = loader(1, 0)
    restore_position({"dataloader": two[1].state_dict()}, one)
    assert len(one) == len(whole) == 15
    assert [batch.flatten().int().tolist() for batch in one] == whole[6:]
    one.load_state_dict({**one.state_dict(), "consumed_samples": 120, "batches": 15})
    assert one.epoch == 2 and next(one).flatten().int().tolist() == whole[0]


class TestEngine(DistributedTest):
    world_size = 2

    def make_engine(self, block: dict[str, Any], **keys: Any) -> Any:
        config = config_of(0, 2, 2, optimizer=sgd(1e-4), data_efficiency=block) | keys
        model = torch.nn.Linear(1, 1)
        return deepspeed.initialize(model=model, config=config, training_data=NUMBERS)[0]

    def read(self, engine: Any, steps: int) -> list[list[int]]:
        """This rank's samples of each step, which are trained on."""
        batches, found = iter(engine.training_dataloader), []
        for _ in range(2 * steps):
            batch = next(batches)
            found.append(batch.flatten().int().tolist())
            engine.backward(engine(batch).mean())
            engine.step()
        return [first + second for first, second in zip(found[::2], found[1::2], strict=True)]

    def test_goes_on_from_a_checkpoint(self, tmpdir: Any) -> None:
        # Kills: a position that counts what workers have read ahead, a loader that begins anew, a
        # state of another step for whoever cuts samples.
        folder, rank = Path(str(tmpdir)), dist.get_rank()
        block = efficiency({"hard": metric(folder.parent, name=f"{folder.name}{rank}")})
        truth = [
            step[2 * rank : 2 * rank + 2] + step[4 + 2 * rank : 6 + 2 * rank]
            for step in steps_of(block, 1, 8, 1)
        ]
        block["data_sampling"]["num_workers"] = 1
        engine = self.make_engine(block)
        states: list[dict[str, Any]] = []
        engine.set_data_post_process_func(lambda batch, state: states.append(state) or batch)
        assert self.read(engine, 4) == truth[:4]
        assert [s["current_difficulties"]["hard"] for s in states] == [2] * 6 + [4] * 2
        engine.save_checkpoint(str(folder / "saved"))
        assert self.read(engine, 3) == truth[4:7]
        engine.destroy()
        resumed = self.make_engine(block)
        resumed.load_checkpoint(str(folder / "saved"))
        assert self.read(resumed, 3) == truth[4:7]
        resumed.destroy()
        other = self.make_engine(block, gradient_accumulation_steps=1)
        with pytest.raises(Exception, match="saved with 8 samples per step, and there are 4"):
            other.load_checkpoint(str(folder / "saved"))

    def test_functions_are_asked_and_the_rest_is_refused(self, tmpdir: Any) -> None:
        folder = Path(str(tmpdir)).parent
        custom = {"schedule_type": "custom", "schedule_config": {}, "max_difficulty": 9}
        name = f"custom{dist.get_rank()}"
        block = efficiency({"hard": metric(folder, name=name, **custom)})
        engine = self.make_engine(block)
        engine.set_custom_curriculum_learning_schedule({"hard": lambda step: step + 2})
        for step, seen in enumerate(self.read(engine, 3), start=1):
            assert all(HARDNESS[i] <= step + 2 for i in seen)
        engine.destroy()
        plain = self.make_engine({"enabled": True, "data_sampling": {"enabled": False}})
        with pytest.raises(DeepSpeedConfigError, match="data_sampling.enabled: true"):
            plain.set_data_post_process_func(lambda batch, state: batch)
        plain.destroy()
        for key, inner in (("data_routing", ON), ("data_sampling", {"dynamic_batching": ON})):
            with pytest.raises(DeepSpeedConfigError, match=f"data_efficiency.{key}"):
                self.make_engine({"enabled": True, key: inner})
