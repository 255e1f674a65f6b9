"""Gradients of parameters marked `sequence_parallel` are summed over tensor-parallel ranks once per
reduction, in one message, in order on streams, with no wait of the host, and with the ledger's
consent.
"""

from typing import Any

import pytest
import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.comm.watch.observation import CollectiveCall
from deepspeed.runtime.gradients.ledger.gradient_ledger import GradientLedgerError
from deepspeed.runtime.gradients.sequence_parts import SequenceParts
from deepspeed.verify import check_budgets, check_streams, ledger
from unit.common import DistributedTest
from unit.v1.gathering import noted
from unit.v1.looping import each, each_pair
from unit.v1.tensor.megatron import Mpu, Parallel, batch
from unit.v1.tensor.test_tensor_parallel import STEPS, TOLERANCE, check_training, master, start

ACCUMULATION = 2
NUM_MARKED = 3


def train(engine: Any, mpu: Mpu) -> list[int]:
    """Some steps; returns the sizes of the sums over tensor-parallel ranks in their backwards."""
    group, numels = mpu.get_tensor_model_parallel_group(), []

    def sums(call: CollectiveCall) -> list[int]:
        is_sum = call.name == "all_reduce" and call.group is group
        return [call.reads[0].numel()] if is_sum else []

    for step in range(STEPS):
        x, labels = batch(step, mpu.data_size, ACCUMULATION)
        for micro in range(ACCUMULATION):
            own = x[mpu.data_rank, micro].to(engine.model_dtype), labels[mpu.data_rank, micro]
            loss = engine(*own)
            with noted(sums) as found:
                engine.backward(loss)
            numels += found
            engine.step()
    return numels


class TestAlone(DistributedTest):
    """Two tensor-parallel ranks, no data parallelism."""

    world_size = 2

    @each(stage=[0, 1, 2, 3])
    def test_one_message_per_reduction(self, stage: int) -> None:
        # Kills: a message per parameter, or in micro-batches that reduce nothing.
        mpu = Mpu(2)
        more = {"sequence_parallel": True, "gradient_accumulation_steps": ACCUMULATION}
        engine = start(mpu, stage, "fp32", **more)
        numels = train(engine, mpu)
        marked = sum(param.numel() for param in engine._sequence_parts.params)
        assert len(engine._sequence_parts.params) == NUM_MARKED
        # The model's own backward sums activations, which are larger.
        own = [numel for numel in numels if numel == marked]
        assert len(own) == STEPS * (ACCUMULATION if stage >= 2 else 1)
        assert len(numels) - len(own) == STEPS * ACCUMULATION
        engine.destroy()

    @each(stage=[1, 2, 3])
    def test_other_buckets_do_not_wait(self, stage: int) -> None:
        # Kills: layer norms among other parameters, whose buckets would leave after backward too.
        engine = start(Mpu(2), stage, "fp32", sequence_parallel=True)
        marked = set(engine._sequence_parts.params)
        kinds = [marked.issuperset(bucket.params) for bucket in engine.optimizer.ipg_buckets]
        mixed = [marked.intersection(bucket.params) for bucket in engine.optimizer.ipg_buckets]
        assert [bool(some) for some in mixed] == kinds
        # In the order of sending.
        assert kinds == sorted(kinds) and not all(kinds)
        engine.destroy()
        assert not any(hasattr(param, "ds_has_parts") for param in marked)

    def test_asked_for_twice(self) -> None:
        # Kills: parts summed again by a trainer that reduces once more after backward, as
        # Megatron's does.
        mpu = Mpu(2)
        engine = start(mpu, 0, "fp32", sequence_parallel=True)
        x, labels = batch(0, 1, 1)
        engine.backward(engine(x[0, 0], labels[0, 0]))
        before = [param.grad.clone() for param in engine.module.parameters()]
        engine.allreduce_gradients()
        for param, grad in zip(engine.module.parameters(), before, strict=True):
            assert torch.equal(param.grad, grad)
        engine.destroy()

    @each(stage=[0, 1])
    def test_a_window_that_is_resumed(self, tmpdir: Any, stage: int) -> None:
        # Kills: parts of a checkpoint's gradients that are taken for summed.
        mpu = Mpu(2)
        engine, again = (start(mpu, stage, "fp32", sequence_parallel=True) for _ in range(2))
        x, labels = batch(0, 1, 1)
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(engine(x[0, 0], labels[0, 0]))
        engine.save_checkpoint(str(tmpdir.join(str(stage))))
        again.load_checkpoint(str(tmpdir.join(str(stage))))
        for one in (engine, again):
            one.set_gradient_accumulation_boundary(True)
            one.step()
        pairs = zip(engine.module.parameters(), again.module.parameters(), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs)
        engine.destroy()
        again.destroy()

    @each(stage=[0, 2, 3])
    def test_a_parameter_that_is_not_used(self, stage: int) -> None:
        # Kills: a gradient of zeros in the shape of what a sharded parameter shows.
        mpu = Mpu(2)
        model = Parallel(mpu, sequence_parallel=True)
        model.unused = torch.nn.Parameter(torch.ones(7))
        model.unused.sequence_parallel = True  # type: ignore[attr-defined]  # a mark
        engine = start(mpu, stage, "fp32", model=model)
        train(engine, mpu)
        assert torch.equal(master(model.unused), torch.ones(7))
        engine.destroy()

    @each_pair(stage=[0, 1, 2, 3], precision=["fp32", "bf16-fp32"], schedule=[0, 1])
    def test_on_streams(self, stage: int, precision: str, schedule: int) -> None:
        # Kills: a sum that reads gradients before they are there, or buckets that leave before it
        # is; a host that waits for it.
        with simulate(schedule=schedule, backward_streams=2), check_streams(), check_budgets():
            mpu = Mpu(2)
            more = {"sequence_parallel": True, "gradient_accumulation_steps": ACCUMULATION}
            engine = start(mpu, stage, precision, **more)
            check_training(engine, mpu, 0.0, TOLERANCE[precision], ACCUMULATION, ends=False)
            with get_accelerator().count_host_waits() as waits:
                x, labels = batch(0, 1, ACCUMULATION)
                for micro in range(ACCUMULATION):
                    engine.backward(engine(x[0, micro].to(engine.model_dtype), labels[0, micro]))
                    assert not waits.inside("deepspeed/runtime"), waits.by_place
                    if micro + 1 < ACCUMULATION:
                        engine.step()
            engine.destroy()


class TestWithDataParallelism(DistributedTest):
    """Two tensor-parallel ranks, two data-parallel ones."""

    world_size = 4

    @each(stage=[0, 1, 2, 3])
    def test_the_ledger_counts_parts(self, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a ledger that takes a part for the whole; parts that nobody sums.
        mpu = Mpu(2)
        more = {"sequence_parallel": True, "gradient_accumulation_steps": ACCUMULATION}
        with ledger() as book:
            engine = start(mpu, stage, "fp32", **more)
            check_training(engine, mpu, 0.0, TOLERANCE["fp32"], ACCUMULATION)
            assert book.steps == STEPS and not book.findings
        with monkeypatch.context() as planted, ledger():
            planted.setattr(SequenceParts, "complete", lambda self, sequence: None)
            engine = start(mpu, stage, "fp32", **more)
            with pytest.raises(GradientLedgerError, match=r"norm\.weight|norm\.bias|row\.bias"):
                train(engine, mpu)
            engine.destroy()
