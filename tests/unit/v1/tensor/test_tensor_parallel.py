"""Tensor parallelism by an external mpu (`megatron`) equals one process.

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
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.utils import groups, safe_get_full_fp32_param, safe_get_full_grad
from deepspeed.utils.tensor_fragment import logical_shape
from unit.common import DistributedTest
from unit.models import config_of
from unit.one_process import OneProcess
from unit.v1.contract.reference import global_norm
from unit.v1.looping import each
from unit.v1.tensor.megatron import Mpu, Parallel, Serial, batch, slice_of

LR = 0.2
CLIP = 0.05
STEPS = 2
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
    for step in range(STEPS):
        x, labels = batch(step, mpu.data_size, accumulation)
        norm = reference.step_on(x, labels)
        for micro in range(accumulation):
            if micro:
                engine.step()
            own = x[mpu.data_rank, micro].to(engine.model_dtype), labels[mpu.data_rank, micro]
            engine.backward(engine(*own))
        for name, param in engine.module.named_parameters():
            right, own = slice_of(name, reference.found[name], mpu), safe_get_full_grad(param)
            # Relative to the parameter's whole gradient: a slice's may nearly cancel.
            size = reference.found[name].norm().item()
            assert_close(f"step {step}, gradient of {name}", own, right, tolerance * size)
        engine.step()
        norms, told = engine.get_group_grad_norms(), f"step {step}"
        assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=tolerance), told
        assert norms == pytest.approx(reference.norms, rel=2 * tolerance), told
        for name, param in reference.model.named_parameters():
            right = slice_of(name, param.detach(), mpu)
            own = master(engine.module.get_parameter(name))
            # Twice: clipping by a norm that is off by the tolerance adds as much again.
            bound = 2 * tolerance * reference.travelled[name] + 1e-6 * right.norm().item()
            assert_close(f"step {step}, {name}", own, right, bound)
    if ends:
        engine.destroy()


def assert_close(what: str, value: torch.Tensor, right: torch.Tensor, bound: float) -> None:
    distance = (value.float() - right).norm().item()
    assert distance <= bound + 1e-7, f"{what}: off by {distance:.3g}, allowed {bound:.3g}"


class TestAlone(DistributedTest):
    """Two tensor-parallel ranks, no data parallelism."""

    world_size = 2

    @each(precision=PRECISIONS, stage=[0, 1, 2, 3], clip=[0.0, CLIP])
    def test_equals_one_process(self, precision: str, stage: int, clip: float) -> None:
        # Kills: replicated parameters counted on both ranks; slices counted on the first only;
        # gradients averaged over slices.
        if precision == "bf16-fp32" and stage == 2 and clip == 0.0:
            return  # covered by clip
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

    @each(stage=[0, 1, 2, 3], replicated=[False, True], on_rank=[0, 1])
    def test_overflow_on_one_rank_skips_on_both(
        self, stage: int, replicated: bool, on_rank: int
    ) -> None:
        # Kills: a decision from the slices of one rank; a copy that is not finite on a rank that
        # does not count it, which would train on while the other ranks' copies stay good.
        mpu = Mpu(2)
        engine = start(mpu, stage, "fp32")
        x, labels = batch(0, 1, 1)
        before = {name: master(param).clone() for name, param in engine.module.named_parameters()}
        target = engine.module.head.weight if replicated else engine.module.column.weight
        factor = float("inf") if mpu.rank == on_rank else 1.0
        poison = target.register_hook(lambda grad: grad * factor)
        engine.backward(engine(x[0, 0], labels[0, 0]))
        engine.step()
        assert not engine.was_step_applied() and engine.skipped_steps == 1
        after = {name: master(param) for name, param in engine.module.named_parameters()}
        assert all(torch.equal(after[name], value) for name, value in before.items())
        poison.remove()
        engine.backward(engine(x[0, 0], labels[0, 0]))
        engine.step()
        assert engine.was_step_applied()
        engine.destroy()

    @each(stage=[1, 3])
    def test_checkpoint_files_are_named_by_tensor_rank(self, stage: int, tmp_path: Any) -> None:
        # Kills: tensor-parallel ranks that overwrite each other's files, or read them, also at
        # another stage where nobody says how parameters are sliced.
        mpu = Mpu(2)
        engine = start(mpu, stage, "bf16")
        x, labels = batch(0, 1, 1)
        engine.backward(engine(x[0, 0].to(torch.bfloat16), labels[0, 0]))
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
    def test_sequence_parallel_parameters(self, stage: int) -> None:
        # Kills: summing over data-parallel ranks instead of tensor-parallel ones.
        mpu = Mpu(2)
        engine = start(mpu, stage, "fp32", sequence_parallel=True, gradient_accumulation_steps=2)
        check_training(engine, mpu, 0.0, TOLERANCE["fp32"], 2)
