"""Groups of ranks: experts, shared shards, and the collectives of a start."""

import importlib
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import DeepSpeedConfigError
from deepspeed import comm as dist
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups, safe_get_full_grad
from deepspeed.utils.tensor_fragment import safe_get_full_grads
from unit.common import DistributedTest
from unit.models import config_of, sgd
from unit.v1.gathering import collectives
from unit.v1.groups.stages import SYSTEMS, master, world_collectives
from unit.v1.looping import each
from unit.v1.tensor.megatron import Mpu

LR = 0.5
DENSE, EXPERT = 7, 11
EP = 2


class Model(nn.Module):
    """Gradients are the inputs: powers of two, so that every sum is exact in every precision."""

    def __init__(self) -> None:
        super().__init__()
        rank = dist.get_rank()
        self.dense = nn.Parameter(torch.full((DENSE,), 1.0 + rank))
        self.expert = nn.Parameter(torch.full((EXPERT,), 10.0 + rank))
        self.expert.allreduce = False
        self.expert.group_name = f"ep_size_{EP}"

    def forward(self, dense: float, expert: float) -> torch.Tensor:
        return dense * self.dense.float().sum() + expert * self.expert.float().sum()


def start(system: str, split: bool = True, schedule: bool = False, **more: Any) -> Any:
    groups._create_expert_and_data_parallel(EP)
    model = Model()
    config = config_of(0, 1, **{**SYSTEMS[system], **more})
    given: Any = [{"params": list(model.parameters())}]
    if split:
        given = split_params_into_different_moe_groups_for_optimizer(given)
    optimizer = torch.optim.SGD(given, lr=LR)
    if schedule:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def filled(found: torch.Tensor, numel: int, wanted: float) -> bool:
    return torch.equal(found, torch.full((numel,), wanted))


class TestExperts(DistributedTest):
    """Four ranks, experts spread over two: ranks 0 and 2 hold the same ones, 1 and 3 others."""

    world_size = 4

    @each(system=SYSTEMS, split=[True, False])
    def test_gradient_norm_and_step(self, system: str, split: bool) -> None:
        # Kills: experts averaged over all ranks, or divided by the ranks that hold the same; shards
        # cut for the wrong ranks; experts counted once per replica, or on the first rank only; a
        # first broadcast that makes all experts alike.
        # Not split: the client's AdamW(model.parameters()), which the engine splits where groups
        # lie flat.
        groups_now = 1 + (split or system != "stage 0")
        rank = dist.get_rank()
        engine = start(system, split)
        model = engine.module
        assert filled(master(model.dense), DENSE, 1.0)
        assert filled(master(model.expert), EXPERT, 10.0 + rank % 2)
        engine.backward(engine(2.0**rank, 4.0**rank))
        dense, experts = (1 + 2 + 4 + 8) / 4, [(1 + 16) / 4, (4 + 64) / 4]
        # Experts' gradients are sums over all tokens already: the two replicas are summed, and
        # divided by all four ranks.
        assert filled(safe_get_full_grad(model.dense).float(), DENSE, dense)
        assert filled(safe_get_full_grad(model.expert).float(), EXPERT, experts[rank % 2])
        if system != "stage 0":
            both = safe_get_full_grads([model.expert, model.dense])
            assert [grad[0].item() for grad in both] == [experts[rank % 2], dense]
        with world_collectives() as calls:
            engine.step()
        sums = [call for call in calls if call[0] == "all_reduce"]
        assert sums == [("all_reduce", groups_now, torch.float32)]
        squares = [DENSE * dense**2, EXPERT * (experts[0] ** 2 + experts[1] ** 2)]
        norms = [math.sqrt(square) for square in squares]
        norm = float(engine.get_global_grad_norm())
        assert norm == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)
        if groups_now == 2:
            assert engine.get_group_grad_norms() == pytest.approx(norms, rel=1e-6)
        assert filled(master(model.dense), DENSE, 1.0 - LR * dense)
        assert filled(master(model.expert), EXPERT, 10.0 + rank % 2 - LR * experts[rank % 2])
        first = master(model.expert)[0].item()
        assert model.expert.detach().float()[0] == pytest.approx(first, rel=2**-8)
        engine.destroy()

    @each(system=["stage 0", "stage 1", "BF16_Optimizer"])
    def test_overflow_in_one_expert_skips_on_all(self, system: str) -> None:
        # Kills: a decision of the ranks that hold the expert.
        engine = start(system)
        engine.backward(engine(1.0, math.inf if dist.get_rank() == 3 else 1.0))
        engine.step()
        assert not engine.was_step_applied()
        engine.destroy()

    def test_layout_of_shards(self) -> None:
        # Kills: one number of shards for all groups; a sharding group whose ranks hold different
        # experts.
        rank = dist.get_rank()
        optimizer = start("stage 1").optimizer
        dense, expert = optimizer.groups
        assert (dense.num_shards, dense.shard_rank) == (4, rank)
        assert (expert.num_shards, expert.shard_rank) == (2, rank // 2)
        assert optimizer.partition_count == [4, 2]
        assert dist.get_all_ranks_from_group(expert.process_group) == [rank % 2, rank % 2 + 2]
        optimizer.load_state_dict(optimizer.state_dict())

    @each(stage=[0, 1, 2])
    def test_the_engine_makes_groups_of_what_it_collects(self, stage: int) -> None:
        # Kills: a mixed group that the engine itself has made.
        for parameters in (False, True):
            groups._create_expert_and_data_parallel(EP)
            model = Model()
            config = config_of(stage, 1, optimizer=sgd(LR))
            given = {"model_parameters": model.parameters()} if parameters else {}
            engine, *_ = deepspeed.initialize(model=model, config=config, **given)
            made = [group.get("moe", False) for group in engine.optimizer.param_groups]
            assert made == [False, True]
            engine.destroy()

    @each(system=[name for name in SYSTEMS if name != "stage 0"])
    def test_a_mixed_group_with_a_schedule_is_refused(self, system: str) -> None:
        # Kills: experts that are averaged over other experts' ranks without a word; a schedule that
        # sets the rate of the first of the new groups alone.
        split = "split_params_into_different_moe_groups"
        with pytest.raises(ValueError, match=f"dense parameters, experts of 'ep_size_2'.*{split}"):
            start(system, split=False, schedule=True)

    def test_instances_are_refused(self) -> None:
        # Kills: dense shards cut for instances beside experts' that are not.
        with pytest.raises(ValueError, match="num_optimizer_instances: 2 with experts"):
            start("stage 1", zero_optimization={"stage": 1, "num_optimizer_instances": 2})
        for key in ("num_optimizer_instances", "mics_shard_size", "zero_hpz_partition_size"):
            with pytest.raises(DeepSpeedConfigError, match=rf"{key}.* 2 at stage 3 with experts"):
                start("stage 1", zero_optimization={"stage": 3, key: 2})

    def test_sum_and_predivide(self) -> None:
        # Kills: a divisor that is the size of the experts' own group.
        rank = dist.get_rank()
        for more, factor in (
            ({"gradient_allreduce_op": "sum"}, 4.0),
            ({"prescale_gradients": True}, 1.0),
            ({"gradient_predivide_factor": 2.0}, 1.0),
        ):
            engine = start("stage 1", **more)
            engine.backward(engine(2.0**rank, 4.0**rank))
            wanted = factor * [(1 + 16) / 4, (4 + 64) / 4][rank % 2]
            assert filled(safe_get_full_grad(engine.module.expert), EXPERT, wanted)
            engine.destroy()


class TestShardGroups(DistributedTest):
    world_size = 4

    def test_places_and_sums(self) -> None:
        # Made without a file: type checkers do not know it.
        utils: Any = importlib.import_module("deepspeed.runtime.zero.mics_utils")
        rank = dist.get_rank()
        for size, shards, copies in ((4, 6, 0), (2, 1 if rank < 2 else 5, 2 + 2 * (rank % 2))):
            made = utils.create_mics_comm_groups(size, None)
            assert (made.param_shard_size, made.param_shard_rank) == (size, rank % size)
            assert (made.param_repli_size, made.param_repli_rank) == (4 // size, rank // size)
            # Kills: groups of every second rank where neighbours share shards.
            value = torch.tensor(float(rank))
            dist.all_reduce(value, group=made.param_shard_group)
            assert value == shards
            if size == 4:
                assert made.param_repli_group is None
                continue
            value = torch.tensor(float(rank))
            dist.all_reduce(value, group=made.param_repli_group)
            assert value == copies
        tensors = [torch.full((3,), 6.0), torch.ones(())]
        utils.scale_tensors(tensors, 4)
        assert tensors[0].tolist() == [1.5] * 3 and tensors[1] == 0.25
        with pytest.raises(ValueError, match=r"shard_size=3\): 4 data-parallel ranks"):
            utils.create_mics_comm_groups(3, None)
        with pytest.raises(ValueError, match="hierarchical_allgather=True"):
            utils.create_mics_comm_groups(2, None, hierarchical_allgather=True)


WIDTH = 8
SHALLOW, DEEP = 2, 24


def issued(layers: int, stage: int, mpu: Mpu | None) -> Counter[str]:
    """By `initialize`, for a model of so many linear layers and layer norms."""
    model = nn.Sequential()
    for _ in range(layers):
        model.append(nn.Linear(WIDTH, WIDTH))
        model.append(nn.LayerNorm(WIDTH))
        for param in model[-1].parameters():
            param.sequence_parallel = mpu is not None  # type: ignore[attr-defined]  # as Megatron marks it
    more = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    config = config_of(stage, 1, 1, "bf16", optimizer={"type": "Adam"}, **more)
    with collectives() as names:
        engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
    assert engine.module is model and next(model.parameters()).dtype == torch.bfloat16
    engine.destroy()
    return Counter(names)


class TestStart(DistributedTest):
    world_size = 2

    def test_of_data_parallel_ranks(self) -> None:
        # Kills: a parameter that is broadcast, or cut, or compared by a collective of its own.
        for stage in range(4):
            shallow, deep = issued(SHALLOW, stage, None), issued(DEEP, stage, None)
            assert deep == shallow, f"stage {stage}: {shallow} -> {deep}"

    @each(stage=(0, 1, 2))
    def test_of_tensor_parallel_ranks(self, stage: int) -> None:
        # Kills: a reduction for each layer norm that the ranks share.
        mpu = Mpu(2)
        assert issued(DEEP, stage, mpu) == issued(SHALLOW, stage, mpu)
