"""Settings of reduction: divisions, sums, dtypes, layouts, optimizers of whole parameters."""

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from unit.common import DistributedTest
from unit.v1.looping import each
from unit.v1.zero.usage import (
    LR,
    STAGES,
    TOLERANCE,
    assert_close,
    config_of,
    data,
    inputs,
    loss_of,
    make_engine,
    make_net,
    reference_params,
)


class TestReductionSettings(DistributedTest):
    """Keys that say where a division stands or what travels."""

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
        for index in range(3):
            loss = loss_of(engine(data(index)))
            loss.backward() if plain else engine.backward(loss)
            engine.step()
        assert_close(engine, reference_params([[0, 1, 2]]))
        engine.destroy()

    @each(stage=STAGES, precision=("fp32", "bf16+fp32"))
    def test_sum_instead_of_mean(self, stage: int, precision: str) -> None:
        # Kills: "sum" that still divides by the world, or that clips and reports by the mean.
        engine = make_engine(stage, 2, precision, gradient_allreduce_op="sum")
        for index in range(2):
            engine.backward(loss_of(engine(inputs(engine, index))))
            engine.step()
        initial = dict(make_net().named_parameters())
        mean = reference_params([[0, 1]])
        world = dist.get_world_size()
        wanted = {
            name: value.detach() + world * (mean[name] - value.detach())
            for name, value in initial.items()
        }
        assert_close(engine, wanted, TOLERANCE[precision])
        norm = sum(
            ((mean[n] - v.detach()) / LR * world).square().sum() for n, v in initial.items()
        ).sqrt()
        assert float(engine.get_global_grad_norm()) == pytest.approx(
            norm.item(), rel=1e-4 if precision == "fp32" else 2e-2
        )

    @each(
        stage=STAGES,
        settings=[("fp32", "bf16", 1e-3), ("bf16", "fp32", 5e-3), ("fp32", "fp16", 1e-4)],
    )
    def test_communication_data_type(self, stage: int, settings: tuple[str, str, float]) -> None:
        # Kills: a key that is ignored: bf16 on the wire must round an fp32 gradient, fp32 must not
        # break a bf16 model.
        precision, travels, tolerance = settings
        engine = make_engine(stage, precision=precision, communication_data_type=travels)
        engine.backward(loss_of(engine(inputs(engine, 0))))
        engine.step()
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
        engine = make_engine(
            stage, model=model, zero={"ignore_unused_parameters": False, "overlap_comm": False}
        )
        with pytest.raises(RuntimeError, match="spare.weight.*ignore_unused_parameters"):
            engine.backward(loss_of(engine(data(0))))

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
        for index in range(4):
            engine.backward(loss_of(engine(data(index))))
            engine.step()
        assert_close(engine, reference_params([[0, 1], [2, 3]]))


class TestWholeParameterOptimizers(DistributedTest):
    """Lamb looks at whole parameters."""

    world_size = 2

    @each(precision=("fp32", "bf16", "bf16+fp32"))
    def test_lamb_without_zero_sees_whole_parameters(self, precision: str) -> None:
        # Kills: bf16 with fp32 accumulation handing Lamb a shard at stage 0 (its trust ratio would
        # be the shard's).
        lamb = {"optimizer": {"type": "Lamb", "params": {"lr": 0.05}}}
        engine = deepspeed.initialize(
            model=make_net(), config=config_of(0, precision=precision, **lamb)
        )[0]
        updated = [
            param for group in engine.basic_optimizer.param_groups for param in group["params"]
        ]
        assert [param.shape for param in updated] == [
            param.shape for param in engine.module.parameters()
        ]
        engine.backward(loss_of(engine(inputs(engine, 0))))
        engine.step()
        assert engine.was_step_applied()
