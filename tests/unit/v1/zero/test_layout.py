"""Who owns what in memory follows from the buckets; what is in files does not.

Buckets that are reduced onto several ranks are cut evenly between them. State is exchanged when it
is saved and loaded, so that files are as ever.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.sharding import exchange
from deepspeed.runtime.zero.sharded_state import CheckpointMismatchError
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
)
from unit.common import DistributedTest
from unit.models import config_of, drawn, seeded
from unit.one_process import go_through
from unit.v1.gathering import collectives
from unit.v1.looping import each

SMALL, WHOLE = 70, 10**9


class Net(nn.Sequential):
    """Odd sizes in two groups, one of them with a parameter without elements."""

    def __init__(self) -> None:
        layers = nn.Linear(7, 13), nn.Linear(13, 5, bias=False), nn.Linear(5, 11)
        super().__init__(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
        self.empty = nn.Parameter(torch.zeros(0, 3))


def start(bucket: int, stage: int = 2, precision: str = "fp32", **zero: Any) -> Any:
    model = seeded(Net)
    params = list(model.parameters())
    groups = [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:]}]
    scale = {"fp16": {"enabled": True, "loss_scale": 64}} if precision == "fp16" else {}
    zero = {"reduce_bucket_size": bucket, **zero}
    # It does not clip: the norm is summed in the order of the layout, and would round otherwise.
    config = config_of(stage, 2, precision=precision, zero_optimization=zero, **scale)
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, first: int, last: int) -> None:
    """Steps `first` to `last` of a run, with other data on each rank."""
    dtype = next(engine.module.parameters()).dtype
    rows = (drawn(100 * step + dist.get_rank(), 2, 7).to(dtype) for step in range(first, last))
    go_through(engine, rows, lambda model, x: model(x).float().square().sum())


def full(engine: Any) -> list[torch.Tensor]:
    """Masters and moments of all parameters, whole."""
    values = []
    for param in engine.module.parameters():
        values.append(safe_get_full_fp32_param(param))
        values += [safe_get_full_optimizer_state(param, key) for key in ("exp_avg", "exp_avg_sq")]
    return values


def same(left: Any, right: Any) -> bool:
    """Whether nested state is equal bit for bit."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and (left == right or not isinstance(left, (int, float, str)))


class TestLayout(DistributedTest):
    world_size = 3

    @each(kind=[(1, "fp32"), (2, "bf16"), (1, "fp16")])
    def test_state_is_that_of_one_bucket(
        self, kind: tuple[int, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: state that is saved as it lies in memory, or exchanged to the wrong place; a state
        # that is loaded as it lies in files.
        monkeypatch.setattr(exchange, "ROUND_NUMEL", 20)
        engines = [start(bucket, *kind) for bucket in (SMALL, WHOLE)]
        small, whole = engines
        assert [len(group.table.sections) for group in small.optimizer.groups] == [2, 2]
        assert [len(group.table.sections) for group in whole.optimizer.groups] == [1, 1]
        for engine in engines:
            train(engine, 0, 2)
        states = [engine.optimizer.state_dict() for engine in engines]
        assert same(*states)
        train(whole, 2, 3)
        small.optimizer.load_state_dict(whole.optimizer.state_dict())
        assert same(*(full(engine) for engine in engines))

    @each(key=("elastic_checkpoint", "round_robin_gradients"))
    def test_folders_travel_between_bucket_sizes(self, key: str, tmpdir: Any) -> None:
        # Kills: an elastic state, or one of dealt parameters, that is padded or cut as in memory.
        folder = str(tmpdir.join(key))
        engine = start(SMALL, **{key: True})
        train(engine, 0, 2)
        engine.save_checkpoint(folder)
        expected, continued = full(engine), []
        for bucket in (SMALL, WHOLE):
            other = start(bucket, **{key: True})
            other.load_checkpoint(folder)
            assert same(full(other), expected)
            train(other, 2, 3)
            continued.append(full(other))
        assert same(*continued)

    def test_a_state_that_does_not_fit_one_rank_and_what_stays_local(self) -> None:
        # Kills: one rank that raises before the exchange while the others wait for its part.
        engine = start(SMALL)
        train(engine, 0, 1)
        state = engine.optimizer.state_dict()
        before = full(engine)
        if dist.get_rank() == 1:
            state["partition_count"] = [7, 7]
        with pytest.raises(CheckpointMismatchError):
            engine.optimizer.load_state_dict(state)
        state["partition_count"] = [dist.get_world_size()] * 2
        if dist.get_rank() == 0:
            state["base_optimizer_state"]["state"][0].pop("exp_avg")
        with pytest.raises(CheckpointMismatchError, match="different optimizer state"):
            engine.optimizer.load_state_dict(state)
        assert same(full(engine), before)
        # Kills: an exchange, or an agreement on one, where files and memory have one layout.
        engine = start(WHOLE)
        train(engine, 0, 1)
        with collectives() as names:
            engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        assert names == []
        # Kills: a fragment that is looked up by the layout of files, a value that is set at the
        # wrong place.
        engine = start(SMALL)
        for index, param in enumerate(engine.module.parameters()):
            value = torch.arange(float(param.numel())).view(param.shape) + 1000 * index
            safe_set_full_fp32_param(param, value)
            with collectives() as names:
                own = safe_get_local_fp32_param(param)
            assert names == []
            assert torch.equal(safe_get_full_fp32_param(param), value)
            owned = torch.zeros(1) if own is None else own.double().sum().view(1)
            total = owned.double()
            dist.all_reduce(total)
            assert total.item() == value.double().sum().item()
        train(engine, 0, 1)

    def test_masters_are_loaded_by_all_ranks_or_none(self, tmpdir: Any) -> None:
        # Kills: a rank that finds no state, and may do without, while the others wait for its part.
        engine = start(SMALL, precision="bf16")
        train(engine, 0, 1)
        engine.save_checkpoint(str(tmpdir), tag="a")
        dist.barrier()
        other = start(SMALL, precision="bf16")
        other._config.tree.checkpoint.verify = "off"
        if dist.get_rank() == 1:
            Path(str(tmpdir), "a", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
        dist.barrier()
        other.load_checkpoint(str(tmpdir), tag="a", load_optimizer_states=False)
        for param in other.module.parameters():
            assert torch.equal(safe_get_full_fp32_param(param), param.float())

    def test_one_reduce_scatter_per_bucket_and_one_gather_per_section(self) -> None:
        # Kills: a reduction per owner, a gather per piece or into a list.
        with simulate():
            engine = start(SMALL)
            train(engine, 0, 1)
            with collectives() as names:
                train(engine, 1, 2)
            num_buckets = len(engine.optimizer.plans)
            assert num_buckets == 4
            assert [name for name in names if name != "all_reduce"] == [
                *["reduce_scatter_tensor"] * num_buckets,
                *["all_gather_into_tensor"] * num_buckets,
            ]
            for group in engine.optimizer.groups:
                size = group.flat.element_size()
                for section in group.table.sections:
                    assert section.part_numel * size % 16 == 0 == section.start * size % 16

    @each(reduce_scatter=(True, False))
    def test_padding_stays_zero(self, reduce_scatter: bool) -> None:
        # Kills: padding of a bucket that is sent as it was allocated, which the simulation poisons
        # with NaN, or as a larger bucket left it.
        with simulate():
            engine = start(SMALL, precision="bf16", reduce_scatter=reduce_scatter)
            for step in range(3):
                inputs = torch.randn(2, 7).bfloat16()
                engine.backward(engine(inputs).float().square().sum())
                params = engine.module.parameters()
                assert all(safe_get_full_grad(param).isfinite().all() for param in params)
                for group in engine.optimizer.groups:
                    padding = torch.ones(group.table.shard_numel, dtype=torch.bool)
                    for fragment in group.table.of_shard(group.shard_rank):
                        padding[fragment.in_shard] = False
                    assert not group.grad[padding].any() and not group.grad[padding].isnan().any()
                engine.step()
                assert math.isfinite(engine.get_global_grad_norm()), step
