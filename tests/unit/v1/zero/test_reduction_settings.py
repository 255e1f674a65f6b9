"""Settings of reduction, and the dtypes of its buffers."""

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from unit import models
from unit.common import DistributedTest
from unit.models import seeded
from unit.v1.looping import each
from unit.v1.zero.usage import (
    LR,
    PRECISIONS,
    STAGES,
    TOLERANCE,
    assert_close,
    check,
    config_of,
    data,
    loss_at,
    loss_of,
    make_engine,
    make_net,
    reference_params,
    train,
)

POSITIONS = 2000


class Rotary(nn.Module):
    """Turns its inputs by their positions, as language models do, and counts what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.register_buffer("inv_freq", 0.37 ** torch.arange(2.0), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen += x.abs().double().mean()
            self.steps += 1
        angle = torch.arange(len(x))[:, None] * self.inv_freq
        turned = torch.cat([angle.cos(), angle.sin()], dim=-1).to(x.dtype)
        return self.project(x) * turned


def start(stage: int, **keys: Any) -> Any:
    optimizer = {"type": "SGD", "params": {"lr": LR}}
    config = models.config_of(stage, 1, optimizer=optimizer, **keys)
    return deepspeed.initialize(model=seeded(Rotary), config=config)[0]


def dtypes(engine: Any) -> list[torch.dtype]:
    return [buffer.dtype for buffer in engine.module.buffers()]


class TestReductionSettings(DistributedTest):
    """Keys that say where a division stands, what travels, and of what dtype buffers are."""

    world_size = 2

    @each(
        stage=STAGES,
        more=[
            {"prescale_gradients": True},
            {"gradient_predivide_factor": 4.0},
            {"prescale_gradients": True, "gradient_predivide_factor": 4.0},
        ],
        plain=(False, True),
    )
    def test_where_divisions_stand(self, stage: int, more: dict[str, Any], plain: bool) -> None:
        # Kills: a division that is lost or doubled when it moves to the other side of the
        # collective.
        engine = make_engine(stage, 3, **more)
        train(engine, range(3), plain)
        check(engine, [[0, 1, 2]])
        engine.destroy()

    @each(stage=STAGES, precision=("fp32", "bf16+fp32"))
    def test_sum_instead_of_mean(self, stage: int, precision: str) -> None:
        # Kills: "sum" that still divides by the world, or that clips and reports by the mean.
        engine = make_engine(stage, 2, precision, gradient_allreduce_op="sum")
        train(engine, range(2))
        world, mean = dist.get_world_size(), reference_params([[0, 1]])
        initial = {name: value.detach() for name, value in make_net().named_parameters()}
        moved = {name: world * (mean[name] - value) for name, value in initial.items()}
        wanted = {name: value + moved[name] for name, value in initial.items()}
        assert_close(engine, wanted, TOLERANCE[precision])
        norm = torch.cat([change.flatten() for change in moved.values()]).norm() / LR
        rel = 1e-4 if precision == "fp32" else 2e-2
        assert float(engine.get_global_grad_norm()) == pytest.approx(norm.item(), rel=rel)

    @each(
        stage=STAGES,
        settings=[("fp32", "bf16", 1e-3), ("bf16", "fp32", 5e-3), ("fp32", "fp16", 1e-4)],
    )
    def test_communication_data_type(self, stage: int, settings: tuple[str, str, float]) -> None:
        # Kills: a key that is ignored: bf16 on the wire must round an fp32 gradient, fp32 must not
        # break a bf16 model.
        precision, travels, tolerance = settings
        engine = make_engine(stage, precision=precision, communication_data_type=travels)
        train(engine, [0])
        wanted = reference_params([[0]])
        assert_close(engine, wanted, tolerance)
        if precision == "fp32":
            with pytest.raises(AssertionError, match="is off by"):
                assert_close(engine, wanted)

    @each(stage=STAGES)
    def test_torch_autocast(self, stage: int) -> None:
        # Kills: a key that is ignored; the output would be fp32. Parameters and their masters stay
        # fp32.
        engine = make_engine(stage, torch_autocast={"enabled": True, "dtype": "bf16"})
        output = engine(data(0))
        assert output.dtype == torch.bfloat16
        assert all(param.dtype == torch.float32 for param in engine.module.parameters())
        engine.backward(loss_of(output))
        engine.step()

        def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return loss_of(model(x))

        assert_close(engine, reference_params([[0]], loss), 2e-3)

    @each(stage=(1, 2))
    def test_unused_parameters_are_named_if_not_ignored(self, stage: int) -> None:
        # Kills: an option without effect.
        model = make_net()
        model.spare = nn.Linear(2, 2)
        zero = {"ignore_unused_parameters": False, "overlap_comm": False}
        engine = make_engine(stage, model=model, zero=zero)
        with pytest.raises(RuntimeError, match="spare.weight.*ignore_unused_parameters"):
            engine.backward(loss_at(engine, 0))

    @each(
        stage=(1, 2),
        zero=[
            {"round_robin_gradients": True},
            {"contiguous_gradients": False},
            {"allgather_partitions": False},
        ],
    )
    def test_layout_options_change_no_number(self, stage: int, zero: dict[str, Any]) -> None:
        # Kills: an option that mixes up owners.
        engine = make_engine(stage, 2, zero={**zero, "allgather_bucket_size": 30})
        train(engine, range(4))
        check(engine, [[0, 1], [2, 3]])

    @each(stage=(1, 2), precision=("fp32", "bf16", "bf16+fp32"))
    def test_gathers_of_odd_sizes_are_refused(self, stage: int, precision: str) -> None:
        # Kills: a size that shards are no multiple of, which upstream asserts.
        config = config_of(stage, precision=precision)
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
        config["zero_optimization"]["allgather_bucket_size"] = 1001
        with pytest.raises(AssertionError, match=r"allgather_bucket_size: 1001 .*: use 1000$"):
            deepspeed.initialize(model=make_net(), config=config)
        config["zero_optimization"]["allgather_bucket_size"] = 1000
        engine = deepspeed.initialize(model=make_net(), config=config)[0]
        assert engine.optimizer.nccl_start_alignment_factor == 2

    @each(precision=("fp32", "bf16", "bf16+fp32"))
    def test_lamb_without_zero_sees_whole_parameters(self, precision: str) -> None:
        # Kills: bf16 with fp32 accumulation handing Lamb a shard at stage 0 (its trust ratio would
        # be the shard's).
        lamb = {"optimizer": {"type": "Lamb", "params": {"lr": 0.05}}}
        config = config_of(0, precision=precision, **lamb)
        engine = deepspeed.initialize(model=make_net(), config=config)[0]
        groups = engine.basic_optimizer.param_groups
        updated = [param.shape for group in groups for param in group["params"]]
        assert updated == [param.shape for param in engine.module.parameters()]
        train(engine, [0])
        assert engine.was_step_applied()

    @each(stage=(0, 1, 2, 3), precision=("bf16", "bf16+fp32", "fp16"))
    def test_kept(self, stage: int, precision: str) -> None:
        # Kills: `model.to(dtype)`, which rounds positions: bf16 has no integer above 256 but the
        # even ones, and 0.37 as 0.3691 is a turn too few at position 2000.
        engine = start(stage, **PRECISIONS[precision])
        assert dtypes(engine) == [torch.float32, torch.float64, torch.int32]
        assert next(engine.module.parameters()).dtype == engine.model_dtype
        wanted = Rotary()
        assert torch.equal(engine.module.inv_freq, wanted.inv_freq)
        with torch.no_grad():
            for param, value in zip(wanted.parameters(), (0.5, 1.0), strict=True):
                param.fill_(value)
        with deepspeed.zero.GatheredParameters(list(engine.parameters()), modifier_rank=0):
            for param, value in zip(engine.module.parameters(), (0.5, 1.0), strict=True):
                param.data.fill_(value)
        x = torch.ones(POSITIONS, 4)
        found = engine(x.to(engine.model_dtype)).float()
        assert torch.allclose(found, wanted(x), atol=0.02)
        engine.backward(found.mean())
        engine.step()
        assert engine.module.seen == 1.0 and engine.module.steps == 1
        engine.destroy()

    @each(stage=(0, 2, 3))
    def test_asked_for_and_saved(self, stage: int, tmpdir: Any) -> None:
        # Kills: a key that is read and does nothing.
        bf16 = {"enabled": True}
        low = start(stage, bf16=bf16, data_types={"buffer_dtype": "bf16", "param_dtype": "bf16"})
        assert dtypes(low) == [torch.bfloat16, torch.bfloat16, torch.int32]
        low.destroy()
        for wide in (
            start(stage, bf16=bf16, data_types={"buffer_dtype": "fp32"}),
            start(stage, data_types={"buffer_dtype": "fp32", "param_dtype": "fp32"}),
        ):
            assert dtypes(wide) == [torch.float32, torch.float32, torch.int32]
            wide.destroy()
        for precision, name in (({"bf16": bf16}, "fp32"), ({}, "bf16")):
            with pytest.raises(AssertionError, match=r"data_types\.param_dtype: .* conflicts"):
                start(stage, **precision, data_types={"param_dtype": name})
        # Kills: a buffer that is rounded on its way through a file.
        folder = str(tmpdir.join(str(stage)))
        engine = start(stage, bf16=bf16)
        engine.module.seen.fill_(1 / 3)
        engine.save_checkpoint(folder)
        other = start(stage, bf16=bf16)
        other.load_checkpoint(folder)
        assert other.module.seen == torch.tensor(1 / 3, dtype=torch.float64)
        dist.barrier()
