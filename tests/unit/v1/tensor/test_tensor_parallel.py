"""Tensor parallelism by an external mpu (`megatron`) equals one process.

Mutations seen to fail here: counting replicated parameters on every tensor-parallel rank; averaging
over the world; leaving the norm to the data-parallel ranks; no sum of the gradients of
sequence-parallel parameters.
"""

import math
import os
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.utils import groups, safe_get_full_fp32_param, safe_get_full_grad
from deepspeed.utils.tensor_fragment import logical_shape
from unit.common import DistributedTest
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
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": clip,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 20,
            "overlap_comm": stage >= 2,
            **({"stage3_param_persistence_threshold": 6} if stage == 3 else {}),
        },
        **PRECISIONS[precision],
        **more,
    }
    matrices = [param for param in model.parameters() if len(logical_shape(param)) > 1]
    vectors = [param for param in model.parameters() if len(logical_shape(param)) == 1]
    optimizer = torch.optim.SGD([{"params": matrices}, {"params": vectors}], lr=LR)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)
    return engine


def master(param: torch.nn.Parameter) -> torch.Tensor:
    value = safe_get_full_fp32_param(param)
    return param.detach().float() if value is None else value


class Reference:
    """One process, plain torch."""

    def __init__(self, clip: float, dtype: torch.dtype = torch.float32) -> None:
        self.model = Serial().to(dtype).float()  # the masters start from the rounded weights
        self.travelled: dict[str, float] = {}  # sum over steps of the updates' sizes
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.clip = clip
        self.grads: dict[str, torch.Tensor] = {}
        self.norms: list[float] = []  # of matrices, of vectors

    def step(self, x: torch.Tensor, labels: torch.Tensor) -> float:
        """Train on all samples; returns the norm."""
        self.optimizer.zero_grad()
        self.model(x.flatten(0, 2), labels.flatten()).backward()
        named = dict(self.model.named_parameters())
        self.grads = {name: param.grad.clone() for name, param in named.items()}
        for matrices in (True, False):
            parts = [
                grad.double().square().sum().item()
                for grad in self.grads.values()
                if (grad.dim() > 1) is matrices
            ]
            self.norms = [*self.norms[-1:], math.sqrt(sum(parts))]
        norm = math.hypot(*self.norms)
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for name, param in named.items():
            self.travelled[name] = self.travelled.get(name, 0.0) + LR * param.grad.norm().item()
        self.optimizer.step()
        return norm


def check_training(
    engine: Any, mpu: Mpu, clip: float, tolerance: float, accumulation: int = 1
) -> None:
    """Train a few steps and compare everything with the reference after each."""
    reference = Reference(clip, engine.model_dtype)
    for step in range(STEPS):
        x, labels = batch(step, mpu.data_size, accumulation)
        norm = reference.step(x, labels)
        for micro in range(accumulation):
            own = x[mpu.data_rank, micro].to(engine.model_dtype), labels[mpu.data_rank, micro]
            engine.backward(engine(*own))
            if micro + 1 < accumulation:
                engine.step()
        for name, param in engine.module.named_parameters():
            right = slice_of(name, reference.grads[name], mpu)
            # Relative to the parameter's whole gradient: a slice's may nearly cancel.
            size = reference.grads[name].norm().item()
            assert_close(
                f"step {step}, gradient of {name}",
                safe_get_full_grad(param),
                right,
                tolerance * size,
            )
        engine.step()
        assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=tolerance), (
            f"step {step}"
        )
        assert engine.get_group_grad_norms() == pytest.approx(reference.norms, rel=2 * tolerance), (
            f"step {step}"
        )
        for name, param in reference.model.named_parameters():
            right = slice_of(name, param.detach(), mpu)
            own_param = master(dict(engine.module.named_parameters())[name])
            # Twice: clipping by a norm that is off by the tolerance adds as much again.
            bound = 2 * tolerance * reference.travelled[name] + 1e-6 * right.norm().item()
            assert_close(f"step {step}, {name}", own_param, right, bound)


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
        engine.destroy()

    @each(stage=[0, 1, 2, 3], accumulation=[1, 3])
    def test_sequence_parallel_parameters_have_the_whole_gradient(
        self, stage: int, accumulation: int
    ) -> None:
        # Kills: leaving layer norms with the gradient of their rank's rows (they would drift
        # apart), summing them twice, or summing a running sum again with every micro-batch.
        mpu = Mpu(2)
        engine = start(
            mpu, stage, "fp32", sequence_parallel=True, gradient_accumulation_steps=accumulation
        )
        check_training(engine, mpu, 0.0, TOLERANCE["fp32"], accumulation)
        engine.destroy()

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
        poison = target.register_hook(
            lambda grad: grad * float("inf") if mpu.rank == on_rank else grad
        )
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
        norm = reference.step(x, labels)
        model(x[0, 0], labels[0, 0]).backward()
        assert clip_grad_norm_(model.parameters(), CLIP, mpu=mpu).item() == pytest.approx(
            norm, rel=1e-5
        )


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
        engine.destroy()

    def test_shards_of_slices_by_zero_init(self) -> None:
        # Kills: shards over ranks with several slices; parameters that are not marked any more.
        mpu = Mpu(2)
        model = Parallel(mpu)
        deepspeed.zero.Init(model, mpu=mpu)
        engine = start(mpu, 3, "fp32", CLIP, model=model)
        check_training(engine, mpu, CLIP, TOLERANCE["fp32"])
        engine.destroy()

    @each(stage=[0, 1, 2, 3])
    def test_sequence_parallel_parameters(self, stage: int) -> None:
        # Kills: summing over data-parallel ranks instead of tensor-parallel ones.
        mpu = Mpu(2)
        engine = start(mpu, stage, "fp32", sequence_parallel=True, gradient_accumulation_steps=2)
        check_training(engine, mpu, 0.0, TOLERANCE["fp32"], 2)
        engine.destroy()
