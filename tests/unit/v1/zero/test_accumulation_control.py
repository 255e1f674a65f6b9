"""How scripts decide when a step is taken."""

from __future__ import annotations

import pytest
import torch

from unit.common import DistributedTest
from unit.v1.looping import each
from unit.v1.zero.usage import (
    STAGES,
    TOLERANCE,
    assert_close,
    data,
    inputs,
    loss_of,
    make_engine,
    params_of,
    reference_params,
)


class TestAccumulationControl(DistributedTest):
    """Who says what the boundary is."""

    world_size = 2

    @each(stage=STAGES, precision=("fp32", "bf16+fp32"))
    def test_no_sync(self, stage: int, precision: str) -> None:
        # Kills: a collective inside no_sync, a gradient of the block that the next reduction drops
        # or averages twice.
        engine = make_engine(stage, 3, precision)
        for index in range(6):
            if index % 3 == 2:
                engine.backward(loss_of(engine(inputs(engine, index))))
            else:
                before = dict(params_of(engine))
                with engine.no_sync():
                    engine.backward(loss_of(engine(inputs(engine, index))))
                    with pytest.raises(RuntimeError, match="no_sync"):
                        engine.step()
                assert all(
                    torch.equal(value, dict(params_of(engine))[name])
                    for name, value in before.items()
                )
            engine.step()
        assert_close(engine, reference_params([[0, 1, 2], [3, 4, 5]]), TOLERANCE[precision])

    @each(stage=STAGES, precision=("fp32", "bf16", "bf16+fp32"))
    def test_boundary_set_from_outside(self, stage: int, precision: str) -> None:
        # Kills: a second count of micro-batches beside the caller's; dividing although the caller
        # did (accelerate's way).
        engine = make_engine(stage, 1, precision)
        for index in range(6):
            last = index % 3 == 2
            engine.set_gradient_accumulation_boundary(last)
            assert engine.is_gradient_accumulation_boundary() is last
            engine.backward(loss_of(engine(inputs(engine, index))) / 3, scale_wrt_gas=False)
            if last:
                engine.step()
        assert engine.global_steps == 2
        assert_close(engine, reference_params([[0, 1, 2], [3, 4, 5]]), TOLERANCE[precision])

    @each(stage=STAGES)
    def test_unmanaged_accumulation(self, stage: int) -> None:
        # Kills: dividing or counting by gradient_accumulation_steps when the caller said that it
        # does so.
        engine = make_engine(
            stage, 4, zero={"overlap_comm": stage == 2}, managed_gradient_accumulation=False
        )
        for step in range(2):
            for index in range(2):
                engine.backward(loss_of(engine(data(2 * step + index))) / 2)
            engine.step()
        assert engine.global_steps == 2
        assert_close(engine, reference_params([[0, 1], [2, 3]]))

    @each(stage=STAGES)
    def test_the_optimizer_is_stepped_by_itself(self, stage: int) -> None:
        # Kills: weights that go apart without a word where gradients wait for a boundary that only
        # engine.step() reaches (Fabric calls the optimizer's step).
        for accumulation in (1, 2):
            engine = make_engine(stage, accumulation, "bf16+fp32" if stage == 0 else "fp32")
            for index in range(2):
                loss = loss_of(engine(inputs(engine, index)))
                engine.backward(loss / 2 if accumulation == 1 else loss)
            if accumulation == 2 and stage < 2:
                with pytest.raises(RuntimeError, match=r"call engine\.step\(\) after"):
                    engine.optimizer.step()
                continue
            engine.optimizer.step()
            assert_close(
                engine, reference_params([[0, 1]]), TOLERANCE["bf16+fp32" if stage == 0 else "fp32"]
            )

    def test_calls_that_mean_nothing(self) -> None:
        # Kills: a loss that starts no gradient, a boundary that nobody looks at. Upstream asserts.
        engine = make_engine(0)
        output = engine(data(0))
        for wrong in (output, 1.0, torch.tensor(1.0), output.mean().detach()):
            with pytest.raises(AssertionError, match=r"engine\.scale\(loss\): expected a scalar"):
                engine.scale(wrong)
        for wrong in (output, 1.0):
            with pytest.raises(AssertionError, match=r"backward\(loss\): expected a scalar"):
                engine.backward(wrong)
        engine.backward(loss_of(output))
        engine.step()
        assert_close(engine, reference_params([[0]]))
        own = make_engine(0, zero={"overlap_comm": False}, managed_gradient_accumulation=False)
        with pytest.raises(AssertionError, match="managed_gradient_accumulation: false"):
            own.set_gradient_accumulation_boundary(True)
        with (
            pytest.raises(AssertionError, match="managed_gradient_accumulation: false"),
            own.coalesce_grad_reduction(),
        ):
            pass
        for stage in (0, 1):
            with pytest.raises(AssertionError, match=r"zero_optimization\.overlap_comm: true at"):
                make_engine(stage, managed_gradient_accumulation=False)

    @each(stage=STAGES)
    def test_coalesced_reduction(self, stage: int) -> None:
        # Kills: a block that forgets to reduce at its end, or does so for each backward.
        engine = make_engine(stage)
        with engine.coalesce_grad_reduction():
            engine.backward(loss_of(engine(data(0))) / 2)
            engine.backward(loss_of(engine(data(1))) / 2)
        engine.step()
        assert_close(engine, reference_params([[0, 1]]))
