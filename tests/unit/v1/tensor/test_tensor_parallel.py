"""Tensor parallelism by an external mpu (`megatron`) equals one process; gradients of parameters
marked `sequence_parallel` are summed over tensor-parallel ranks once per reduction, in one message,
in order on streams, with no wait of the host, and with the ledger's consent.

Mutations seen to fail here: counting replicated parameters on every tensor-parallel rank; averaging
over the world; leaving the norm to the data-parallel ranks; no sum of the gradients of
sequence-parallel parameters.
"""

import math
import os
from collections import Counter
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.comm.watch.observation import CollectiveCall
from deepspeed.runtime.gradients.ledger.gradient_ledger import GradientLedgerError
from deepspeed.runtime.gradients.sequence_parts import SequenceParts
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.utils import groups, safe_get_full_fp32_param
from deepspeed.utils.tensor_fragment import logical_shape
from deepspeed.verify import check_budgets, check_streams, ledger
from unit.common import DistributedTest
from unit.models import config_of
from unit.one_process import OneProcess
from unit.v1.contract.reference import global_norm
from unit.v1.gathering import gradients_of, masters_of, noted
from unit.v1.looping import each, each_pair
from unit.v1.tensor.megatron import Mpu, Parallel, Serial, batch, slice_of

LR = 0.2
CLIP = 0.05
STEPS = 2
ACCUMULATION = 2
NUM_MARKED = 3
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16-fp32": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
}
# fp32: the slices' partial sums are added in another order. bf16: activations are rounded to 8 bits
# at other places, several times; what the mutations change is a factor of 2, or a norm without its
# largest part.
TOLERANCE = {"fp32": 1e-5, "bf16": 0.04, "bf16-fp32": 0.04}


def start(
    mpu: Mpu,
    stage: int,
    precision: str,
    clip: float = 0.0,
    sequence_parallel: bool = False,
    model: Any = None,
    **more: Any,
) -> Any:
    model = Parallel(mpu, sequence_parallel) if model is None else model
    zero = {"reduce_bucket_size": 20, "overlap_comm": stage >= 2}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 6
    keys = {"gradient_clipping": clip, **PRECISIONS[precision], **more}
    config = config_of(stage, 4, zero_optimization=zero, **keys)
    matrices = [param for param in model.parameters() if len(logical_shape(param)) > 1]
    vectors = [param for param in model.parameters() if len(logical_shape(param)) == 1]
    optimizer = torch.optim.SGD([{"params": matrices}, {"params": vectors}], lr=LR)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)[0]


def master(param: torch.nn.Parameter) -> torch.Tensor:
    value = safe_get_full_fp32_param(param)
    return param.detach().float() if value is None else value


class Reference(OneProcess):
    """One process; masters start from the rounded weights."""

    def __init__(self, clip: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(Serial().to(dtype).float(), LR, clip=clip)
        self.travelled = Counter[str]()  # sum over steps of the updates' sizes
        self.found: dict[str, torch.Tensor] = {}
        self.norms: list[float] = []  # of matrices, of vectors

    def step_on(self, x: torch.Tensor, labels: torch.Tensor) -> float:
        """Train on all samples; returns the norm."""
        self.backward([(x.flatten(0, 2), labels.flatten())])
        self.found = self.grads()
        kinds = ([g for g in self.found.values() if (g.dim() > 1) is two] for two in (True, False))
        self.norms = [global_norm(dict(enumerate(kind))) for kind in kinds]
        self.update()
        self.travelled.update({name: LR * g.norm().item() for name, g in self.grads().items()})
        return math.hypot(*self.norms)


def own(engine: Any, mpu: Mpu, step: int = 0, micro: int = 0, accumulation: int = 1) -> Any:
    """This data-parallel rank's inputs and labels."""
    x, labels = batch(step, mpu.data_size, accumulation)
    return x[mpu.data_rank, micro].to(engine.model_dtype), labels[mpu.data_rank, micro]


def check_training(
    engine: Any,
    mpu: Mpu,
    clip: float,
    tolerance: float,
    accumulation: int = 1,
    ends: bool = True,
) -> None:
    """Train a few steps and compare everything with the reference after each."""
    reference = Reference(clip, engine.model_dtype)
    params = dict(engine.module.named_parameters())
    plain = not all(hasattr(param, "_hp_mapping") for param in params.values())
    for step in range(STEPS):
        norm = reference.step_on(*batch(step, mpu.data_size, accumulation))
        for micro in range(accumulation):
            if micro:
                engine.step()
            engine.backward(engine(*own(engine, mpu, step, micro, accumulation)))
        grads = gradients_of(params, plain)
        for name, whole in reference.found.items():
            right = slice_of(name, whole, mpu)
            # Relative to the parameter's whole gradient: a slice's may nearly cancel.
            bound = tolerance * whole.norm().item()
            assert_close(f"step {step}, gradient of {name}", grads[name], right, bound)
        engine.step()
        norms, told = engine.get_group_grad_norms(), f"step {step}"
        assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=tolerance), told
        assert norms == pytest.approx(reference.norms, rel=2 * tolerance), told
        masters = masters_of(params, plain)
        for name, param in reference.model.named_parameters():
            right = slice_of(name, param.detach(), mpu)
            value = masters[name]
            # Twice: clipping by a norm that is off by the tolerance adds as much again.
            bound = 2 * tolerance * reference.travelled[name] + 1e-6 * right.norm().item()
            assert_close(f"step {step}, {name}", value, right, bound)
    if ends:
        engine.destroy()


def assert_close(what: str, value: torch.Tensor, right: torch.Tensor, bound: float) -> None:
    distance = (value.float() - right).norm().item()
    assert distance <= bound + 1e-7, f"{what}: off by {distance:.3g}, allowed {bound:.3g}"


def train(engine: Any, mpu: Mpu) -> list[int]:
    """Some steps; returns the sizes of the sums over tensor-parallel ranks in their backwards."""
    group, numels = mpu.get_tensor_model_parallel_group(), []

    def sums(call: CollectiveCall) -> list[int]:
        is_sum = call.name == "all_reduce" and call.group is group
        return [call.reads[0].numel()] if is_sum else []

    for step in range(STEPS):
        for micro in range(ACCUMULATION):
            loss = engine(*own(engine, mpu, step, micro, ACCUMULATION))
            with noted(sums) as found:
                engine.backward(loss)
            numels += found
            engine.step()
    return numels


class TestAlone(DistributedTest):
    """Two tensor-parallel ranks, no data parallelism."""

    world_size = 2

    @each_pair(precision=PRECISIONS, stage=[0, 1, 2, 3], clip=[0.0, CLIP])
    def test_equals_one_process(self, precision: str, stage: int, clip: float) -> None:
        # Kills: replicated parameters counted on both ranks; slices counted on the first only;
        # gradients averaged over slices.
        mpu = Mpu(2)
        engine = start(mpu, stage, precision, clip)
        check_training(engine, mpu, clip, TOLERANCE[precision])

    @each(stage=[0, 1, 2, 3], accumulation=[1, 3])
    def test_sequence_parallel_parameters_have_the_whole_gradient(
        self, stage: int, accumulation: int
    ) -> None:
        # Kills: leaving layer norms with the gradient of their rank's rows (they would drift
        # apart), summing them twice, or summing a running sum again with every micro-batch.
        mpu = Mpu(2)
        more = {"sequence_parallel": True, "gradient_accumulation_steps": accumulation}
        engine = start(mpu, stage, "fp32", **more)
        check_training(engine, mpu, 0.0, TOLERANCE["fp32"], accumulation)

    @each_pair(stage=[0, 1, 2, 3], replicated=[False, True], on_rank=[0, 1])
    def test_overflow_on_one_rank_skips_on_both(
        self, stage: int, replicated: bool, on_rank: int
    ) -> None:
        # Kills: a decision from the slices of one rank; a copy that is not finite on a rank that
        # does not count it, which would train on while the other ranks' copies stay good.
        mpu = Mpu(2)
        engine = start(mpu, stage, "fp32")
        before = {name: master(param).clone() for name, param in engine.module.named_parameters()}
        target = engine.module.head.weight if replicated else engine.module.column.weight
        factor = float("inf") if mpu.rank == on_rank else 1.0
        poison = target.register_hook(lambda grad: grad * factor)
        engine.backward(engine(*own(engine, mpu)))
        engine.step()
        assert not engine.was_step_applied() and engine.skipped_steps == 1
        after = {name: master(param) for name, param in engine.module.named_parameters()}
        assert all(torch.equal(after[name], value) for name, value in before.items())
        poison.remove()
        engine.backward(engine(*own(engine, mpu)))
        engine.step()
        assert engine.was_step_applied()
        engine.destroy()

    @each(stage=[1, 3])
    def test_checkpoint_files_are_named_by_tensor_rank(self, stage: int, tmp_path: Any) -> None:
        # Kills: tensor-parallel ranks that overwrite each other's files, or read them, also at
        # another stage where nobody says how parameters are sliced.
        mpu = Mpu(2)
        engine = start(mpu, stage, "bf16")
        engine.backward(engine(*own(engine, mpu)))
        engine.step()
        engine.save_checkpoint(str(tmp_path), tag=str(stage))
        of_rank = "zero_pp_rank_0_" if stage == 3 else ""
        expected = {f"{of_rank}mp_rank_{rank:02d}_model_states.pt" for rank in range(2)}
        expected |= {f"bf16_zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt" for rank in range(2)}
        assert expected <= set(os.listdir(tmp_path / str(stage)))
        saved = [master(param).clone() for param in engine.module.parameters()]
        engine.destroy()
        for other in (stage, 4 - stage):
            engine = start(mpu, other, "bf16")
            engine.load_checkpoint(str(tmp_path), tag=str(stage))
            found = [master(param) for param in engine.module.parameters()]
            assert all(map(torch.equal, found, saved)), other
            engine.destroy()

    def test_clip_grad_norm_counts_like_the_engine(self) -> None:
        # Kills: asking the mpu for its model-parallel rank, which numbers pipeline stages too.
        mpu = Mpu(2)
        groups.initialize(mpu=mpu)
        model, reference = Parallel(mpu), Reference(0.0)
        x, labels = batch(0, 1, 1)
        norm = reference.step_on(x, labels)
        model(x[0, 0], labels[0, 0]).backward()
        found = clip_grad_norm_(model.parameters(), CLIP, mpu=mpu).item()
        assert found == pytest.approx(norm, rel=1e-5)

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
        sums = numels.count(marked)
        assert sums == STEPS * (ACCUMULATION if stage >= 2 else 1)
        assert len(numels) - sums == STEPS * ACCUMULATION
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
        engine.backward(engine(*own(engine, mpu)))
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
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(engine(*own(engine, mpu)))
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

    @each(row=[(0, "fp32", 0), (1, "bf16-fp32", 1), (2, "fp32", 1), (3, "bf16-fp32", 0)])
    def test_on_streams(self, row: tuple[int, str, int]) -> None:
        # Kills: a sum that reads gradients before they are there, or buckets that leave before it
        # is; a host that waits for it.
        stage, precision, schedule = row
        with simulate(schedule=schedule, backward_streams=2), check_streams(), check_budgets():
            mpu = Mpu(2)
            more = {"sequence_parallel": True, "gradient_accumulation_steps": ACCUMULATION}
            engine = start(mpu, stage, precision, **more)
            check_training(engine, mpu, 0.0, TOLERANCE[precision], ACCUMULATION, ends=False)
            with get_accelerator().count_host_waits() as waits:
                for micro in range(ACCUMULATION):
                    if micro:
                        engine.step()
                    engine.backward(engine(*own(engine, mpu, 0, micro, ACCUMULATION)))
                    assert not waits.inside("deepspeed/runtime"), waits.by_place
            engine.destroy()


class TestWithDataParallelism(DistributedTest):
    """Two tensor-parallel by two data-parallel ranks."""

    world_size = 4

    @each(precision=PRECISIONS, stage=[0, 1, 2, 3], clip=[0.0, CLIP])
    def test_equals_one_process(self, precision: str, stage: int, clip: float) -> None:
        # Kills: averaging over the world; a norm over one data-parallel group only; each
        # data-parallel replica counted.
        if (clip == 0.0) != (precision == "fp32" and stage != 1):
            return  # one of both per pair
        mpu = Mpu(2)
        engine = start(mpu, stage, precision, clip)
        check_training(engine, mpu, clip, TOLERANCE[precision])

    def test_shards_of_slices_by_zero_init(self) -> None:
        # Kills: shards over ranks with several slices; parameters that are not marked any more.
        mpu = Mpu(2)
        model = Parallel(mpu)
        deepspeed.zero.Init(model, mpu=mpu)
        engine = start(mpu, 3, "fp32", CLIP, model=model)
        check_training(engine, mpu, CLIP, TOLERANCE["fp32"])

    @each(stage=[0, 1, 2, 3])
    def test_the_ledger_counts_parts(self, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a ledger that takes a part for the whole; parts that nobody sums, or data-parallel
        # ranks instead of tensor-parallel ones.
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
