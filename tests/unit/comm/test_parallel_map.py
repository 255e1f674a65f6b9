"""The map that an engine owns: its axes, what `groups` shows of it, several in one process."""

import operator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm import comm as operations
from deepspeed.comm.parallel_map import ParallelMap, make_mesh
from deepspeed.moe.layer import MoE
from deepspeed.runtime.pipe import topology as topologies
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid
from deepspeed.utils import groups
from unit.common import DistributedTest
from unit.models import config_of, drawn
from unit.v1.sequence.test_training import make_mpu
from unit.v1.tensor.megatron import Mpu

# What each of upstream's getters asks of the map.
GETTERS = {
    "_get_data_parallel_group": "data.group",
    "_get_data_parallel_group_ranks": "data.ranks",
    "_get_sequence_data_parallel_group": "replicas.group",
    "_get_broadcast_src_rank": "replicas.first_rank",
    "get_tensor_model_parallel_group": "tensor.group",
    "get_tensor_model_parallel_src_rank": "tensor.first_rank",
    "get_model_parallel_group": "model.group",
}
SIZED = {
    **{"_get_data": "data", "_get_sequence": "sequence", "_get_sequence_data": "replicas"},
    **{"get_tensor_model": "tensor", "get_model": "model"},
}
for _getter, _axis in SIZED.items():
    GETTERS[f"{_getter}_parallel_world_size"] = f"{_axis}.size"
    GETTERS[f"{_getter}_parallel_rank"] = f"{_axis}.rank"


def start(model: nn.Module | None = None, seed: int = 1, **more: Any) -> Any:
    """An engine whose optimizer state is sharded over its own replicas."""
    torch.manual_seed(seed)
    model = model or nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
    config = config_of(1, 2, optimizer=optimizer, zero_optimization=more.pop("zero", {}))
    return deepspeed.initialize(model=model, config=config, **more)[0]


def train(engine: Any, step: int) -> None:
    """One step on other data for each data-parallel rank."""
    data = drawn(100 * step + engine.parallel_map.data.rank, 2, 6)
    engine.backward(engine(data).square().mean())
    engine.step()


def weights(engine: Any) -> torch.Tensor:
    """All parameters of this rank."""
    return torch.cat([param.detach().flatten().clone() for param in engine.module.parameters()])


def pipeline(num_stages: int) -> PipelineModule:
    """Two layers."""
    layers = [nn.Linear(6, 6), nn.Linear(6, 6)]
    return PipelineModule(layers, num_stages=num_stages, loss_fn=nn.functional.mse_loss)


class TestCoordinates(DistributedTest):
    world_size = 4

    def test_plain(self) -> None:
        assert str(ParallelMap()) == f"rank {dist.get_rank()}: data {dist.get_rank()} of 4"

    def test_pipeline_and_data(self) -> None:
        rank, grid = dist.get_rank(), PipelineParallelGrid(PipeDataParallelTopology(2, 2))
        told = str(ParallelMap(grid))
        assert told == grid.describe(rank)
        assert told == f"rank {rank}: pipe {rank // 2} of 2, data {rank % 2} of 2"

    def test_pipeline_and_slices(self) -> None:
        rank = dist.get_rank()
        topology = topologies.PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
        here = ParallelMap(PipelineParallelGrid(topology))
        places = f"pipe {rank // 2} of 2, data 0 of 1, tensor {rank % 2} of 2"
        assert str(here) == f"rank {rank}: {places}"
        assert (here.model.size, here.model.rank) == (4, rank)
        assert here.pipe.ranks == [rank % 2, rank % 2 + 2] and here.tensor.size == 2

    def test_sequence_and_data(self) -> None:
        rank = dist.get_rank()
        places = f"data {rank // 2} of 2, sequence {rank % 2} of 2"
        assert str(ParallelMap(mesh=make_mesh(2, 2))) == f"rank {rank}: {places}"
        # An mpu that knows sequences only: who shares the data is known once it was asked.
        here = ParallelMap(make_mpu(2, 2))
        assert str(here) == f"rank {rank}: data ?, sequence {rank % 2} of 2"
        assert here.data.ranks == [rank % 2, rank % 2 + 2]
        assert str(here) == f"rank {rank}: {places}"

    def test_experts(self) -> None:
        rank, here = dist.get_rank(), ParallelMap()
        here.make_experts(2)
        experts = f"ep_size_2: expert {rank % 2} of 2, data {rank // 2} of 2"
        assert str(here) == f"rank {rank}: data {rank} of 4; {experts}"

    def test_one_rank_alone_may_ask(self) -> None:
        # Kills: a description that communicates, which would wait for ranks that do not ask.
        mpu = make_mpu(2, 2)
        if dist.get_rank() == 0:
            assert str(ParallelMap(mpu)) == "rank 0: data ?, sequence 0 of 2"


def test_without_process_groups_there_are_no_coordinates() -> None:
    assert str(ParallelMap()) == "no process group yet"


class TestGetters(DistributedTest):
    world_size = 4

    def check(self, parallel_map: ParallelMap) -> None:
        for getter, path in GETTERS.items():
            assert getattr(groups, getter)() == operator.attrgetter(path)(parallel_map), getter

    def test_they_show_the_map_in_force(self) -> None:
        # Kills: a getter with an answer of its own.
        self.check(ParallelMap())
        for mpu in (Mpu(2), PipelineParallelGrid(PipeDataParallelTopology(2, 2)), make_mpu(2, 2)):
            groups.mpu = mpu
            self.check(ParallelMap(mpu))
        groups.mpu, groups.mesh_device = None, make_mesh(2, 2)
        self.check(ParallelMap(mesh=groups.mesh_device))
        engine = start(mpu=mpu)
        assert groups.current() is engine.parallel_map and groups.mpu is mpu
        assert groups.mesh_device is None
        self.check(engine.parallel_map)

    def test_experts(self) -> None:
        groups.initialize(ep_size=2)
        axes = groups.current().experts("ep_size_2")
        assert groups._get_expert_parallel_group("ep_size_2") is axes.expert.group
        assert groups._get_expert_data_parallel_group("ep_size_2") is axes.data.group
        assert groups._get_expert_data_parallel_group_dict() == {"ep_size_2": axes.data.group}

    def test_a_client_may_assign_in_any_way(self) -> None:
        mpu = Mpu(2)
        with mock.patch.object(groups, "mpu", mpu):
            assert groups.get_data_parallel_world_size() == 2
        assert groups.mpu is None and groups.get_data_parallel_world_size() == 4
        groups.set_tensor_model_parallel_rank(1)
        assert groups.get_model_parallel_rank() == 1 and groups.current().model.rank == 0
        groups.set_tensor_model_parallel_rank(None)
        assert groups.get_model_parallel_rank() == 0


class TestSeveralEngines(DistributedTest):
    world_size = 4

    def test_each_trains_over_its_own_ranks(self, tmp_path: Any) -> None:
        # Kills: an engine that asks for the ranks of the engine made last, in training or saving.
        ways = [{"mesh_param": (2, 2)}, {"mpu": Mpu(2)}, {"mesh_param": (4, 1)}]
        alone = []
        for seed, way in enumerate(ways):
            engine = start(seed=seed, **way)
            for step in range(3):
                train(engine, step)
            alone.append(weights(engine))
            engine.destroy()
        engines = [start(seed=seed, **way) for seed, way in enumerate(ways)]
        for step in range(3):
            for engine in engines:
                train(engine, step)
        for engine, wanted in zip(engines, alone, strict=True):
            assert torch.equal(weights(engine), wanted)
        assert [engine.dp_world_size for engine in engines] == [2, 2, 4]
        assert [engine.parallel_map.tensor.size for engine in engines] == [1, 2, 1]
        for number, engine in enumerate(engines):
            engine.save_checkpoint(str(tmp_path / str(number)), tag="t")
        part = f"{dist.get_rank() % 2:02d}"
        for number, name in enumerate(("00", part, "00")):
            file = tmp_path / str(number) / "t" / f"mp_rank_{name}_model_states.pt"
            state = torch.load(file, weights_only=False)
            sizes = [(4, 1), (2, 2), (4, 1)]
            assert (state["dp_world_size"], state["mp_world_size"]) == sizes[number]

    def test_a_plain_one_beside_a_pipeline(self) -> None:
        # Kills: gradients of a plain model averaged over the ranks of one stage.
        first = start(pipeline(2))
        told = r"\(rank \d: pipe . of 2, data . of 2\).*mesh_param=\(4, 1\)"
        with pytest.raises(ValueError, match=told):
            start()
        second = start(mesh_param=(4, 1))
        assert second.parallel_map.replicas.size == 4 and first.parallel_map.replicas.size == 2
        train(second, 0)
        same = [torch.empty_like(weights(second)) for _ in range(4)]
        dist.all_gather(same, weights(second))
        assert all(torch.equal(same[0], other) for other in same)
        second.destroy()
        assert groups.mpu is first.mpu
        first.destroy()
        third = start()
        assert third.parallel_map.replicas.size == 4

    def test_experts_of_both(self) -> None:
        # Kills: expert groups by name alone, which are those of whoever made the name first.
        rank, mpu = dist.get_rank(), Mpu(2)

        def layer(sharded: bool) -> MoE:
            return MoE(6, nn.Linear(6, 6), 2, ep_size=2, enable_expert_tensor_parallelism=sharded)

        plain = start(nn.Sequential(layer(False)))
        first = start(nn.Sequential(layer(True)), mpu=mpu)
        for engine, experts, replicas, parts in (
            (plain, [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2], 1),
            (first, [rank % 2, rank % 2 + 2], [rank], 2),
        ):
            axes = engine.parallel_map.experts("ep_size_2")
            assert (axes.expert.ranks, axes.data.ranks) == (experts, replicas)
            assert engine.module[0].parallel_map is engine.parallel_map
            assert engine.parallel_map.tensor.size == parts
            assert engine.module[0].global_expert_ids.start == experts.index(rank)

    def test_equal_ones_share_their_groups(self) -> None:
        # Kills: communicators made anew for each engine.
        how: dict[str, Any] = {"mesh_param": (2, 2), "zero": {"num_optimizer_instances": 2}}
        first = start(**how)
        with mock.patch.object(operations, "new_group", side_effect=AssertionError("a new group")):
            second = start(**how)
        assert second.parallel_map is first.parallel_map
        first.destroy()
        first.destroy()
        assert groups.current() is second.parallel_map and groups.mesh_device is not None
        second.destroy()
        assert groups.mesh_device is None

    def test_nothing_stays_behind(self) -> None:
        # In whatever order they go.
        before = groups.current()
        engines = [start(mpu=Mpu(2)), start(mesh_param=(2, 2)), start(pipeline(2))]
        assert groups.mpu is engines[2].mpu
        engines[1].destroy()
        assert groups.mpu is engines[2].mpu
        engines[2].destroy()
        assert groups.current() is engines[0].parallel_map
        engines[0].destroy()
        assert groups.current() is before and (groups.mpu, groups.mesh_device) == (None, None)

    def test_what_a_client_assigns_is_the_clients(self) -> None:
        mpu = SimpleNamespace(get_data_parallel_group=dist.get_world_group)
        engine = start(mpu=Mpu(2))
        groups.mpu = mpu
        assert groups.get_data_parallel_world_size() == 4 and engine.parallel_map.data.size == 2
        engine.destroy()
        assert groups.mpu is mpu
        second = start()
        assert second.parallel_map.mpu is mpu
        second.destroy()
        groups.mpu = None
        third = start(mpu=Mpu(2))
        with mock.patch.object(groups, "mpu", mpu):
            assert groups.get_data_parallel_world_size() == 4
        assert groups.current() is third.parallel_map
        third.destroy()
        assert groups.mpu is None
