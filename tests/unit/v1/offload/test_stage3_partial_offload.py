"""Partial offload (`offload_optimizer.ratio`): numbers, norms, skips and files of either alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.units.partial_offload import DevicePart, num_kept
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from deepspeed.verify import check_streams
from unit.common import DistributedTest
from unit.v1.zero.stage3.models import (
    SHARDED,
    Net,
    Tensors,
    config_of,
    distance,
    end_as_one_process,
    loss_of,
    make_net,
    same,
    tokens_of,
)

STEPS = 2
# Of 0.01 there is nothing to offload: one of the parts is empty.
RATIOS = (1.0, 0.6, 0.3, 0.01, 0.0)
PARAMS = {"offload_param": {"device": "cpu"}}


def test_cut() -> None:
    # Kills: a share of each group that is rounded by itself, a part that is empty where it need not
    # be.
    assert num_kept([[1] * 10], 0.3) == [7]
    assert num_kept([[4, 4], [4, 4]], 0.25) == [1, 2]
    assert num_kept([[10, 1, 1]], 0.5) == [1]
    assert num_kept([[3], [], [5, 5]], 1.0) == [0, 0, 0]
    assert num_kept([[3], [5, 5]], 0.0) == [1, 2]


def groups_of(model: Net) -> list[dict[str, Any]]:
    """Two groups, so that units have parameters of both, on both sides of the cut."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.dim() < 2]},
    ]


def make_engine(ratio: float, optimizer: str = "sgd", **more: Any) -> Any:
    model = make_net()
    zero = {**SHARDED, "offload_optimizer": {"device": "cpu", "ratio": ratio}}
    config = config_of(3, **{**zero, **more.pop("zero", {})})
    config.update(more)
    client: Any = None
    if optimizer == "sgd":
        client = torch.optim.SGD(groups_of(model), lr=0.3, momentum=0.9)
    elif optimizer == "cpu adam" and ratio > 0.0:
        client = DeepSpeedCPUAdam(groups_of(model), lr=0.01)
    else:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}}
    return deepspeed.initialize(
        model=model, optimizer=client, model_parameters=groups_of(model), config=config
    )[0]


def micro_batch(engine: Any, index: int, broken: bool = False) -> None:
    loss = loss_of(engine, tokens_of(index, dist.get_rank()))
    engine.backward(loss * float("inf") if broken and dist.get_rank() == 1 else loss)
    engine.step()


def run(engine: Any, steps: range, broken: int = -1) -> tuple[Tensors, list[float]]:
    """Masters, momenta and norms; step `broken` is not finite on rank 1."""
    norms = []
    for step in steps:
        for micro in (0, 1):
            micro_batch(engine, 2 * step + micro, broken=step == broken and micro == 0)
        norms.append(engine.get_global_grad_norm())
    return values(engine), norms


def values(engine: Any) -> Tensors:
    found = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[name] = safe_get_full_fp32_param(param)
            for key in ("momentum_buffer", "exp_avg_sq"):
                if any(key in state for state in engine.optimizer.state.values()):
                    found[f"{name} {key}"] = safe_get_full_optimizer_state(param, key)
    return found


class TestSameNumbers(DistributedTest):
    world_size = [1, 2]

    def test_bit_for_bit_where_kernels_are_the_same(self) -> None:
        # Kills: an element that both parts or neither updates, gradients scaled twice, a part that
        # the norm or the learning rate does not reach.
        for clip in (0.0, 0.05):
            engine = make_engine(1.0, gradient_clipping=clip)
            wanted, norms = run(engine, range(STEPS))
            if dist.get_world_size() == 1:
                assert norms[0] > 0.05
            for ratio in RATIOS[2::2] if clip else RATIOS[1:]:
                engine = make_engine(ratio, gradient_clipping=clip)
                found, others = run(engine, range(STEPS))
                assert others == pytest.approx(norms, rel=1e-6)
                check = same(found, wanted) if not clip else distance(found, wanted) < 1e-6
                assert check, (ratio, clip)
                engine.destroy()

    def test_adam_in_half_precision_with_a_skip(self) -> None:
        # Kills: a part that steps where the other is skipped, steps counted apart, decay lost on
        # the way to the device's optimizer.
        for precision in ("bf16", "fp16"):
            more: dict[str, Any] = {precision: {"enabled": True}, "gradient_clipping": 0.5}
            if precision == "fp16":
                more["fp16"]["initial_scale_power"] = 8
            broken = 1 if dist.get_world_size() > 1 else -1
            wanted, norms = run(make_engine(1.0, "cpu adam", **more), range(STEPS), broken)
            for ratio in (0.5, 0.0):
                engine = make_engine(ratio, "cpu adam", **more)
                found, others = run(engine, range(STEPS), broken)
                assert others == pytest.approx(norms, rel=2e-2), (ratio, precision)
                assert distance(found, wanted) < 5e-3, (ratio, precision)
                assert engine.skipped_steps == int(broken > 0)
                engine.destroy()


class TestOnStreams(DistributedTest):
    world_size = 2

    def test_silent_and_the_same_bits(self) -> None:
        # Kills: a bucket filled anew while a part of it is on its way to the host because another
        # part stays; a part rounded before it is updated; a device part that waits for the host's.
        overlap = {"overlap_comm": True, "reduce_scatter": False}
        bf16 = {"bf16": {"enabled": True}}
        for precision, kinds in (({}, ({"reduce_scatter": False}, PARAMS)), (bf16, (overlap,))):
            with simulate(backward_streams=2):
                wanted, _ = run(make_engine(1.0, **precision), range(2))
            for number, zero in enumerate(kinds):
                with simulate(schedule=number, backward_streams=2), check_streams():
                    engine = make_engine(0.5, zero=zero, **precision)
                    assert all(len(group.params) for group in engine.optimizer.groups)
                    found, _ = run(engine, range(2))
                    engine.destroy()
                assert same(found, wanted), (zero, precision)

    def test_where_the_parts_lie_and_when_they_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: masters, gradients or moments of the device's part in host memory and the other way
        # round; a host that updates its part first while the device waits.
        order: list[str] = []
        for cls, name in ((DevicePart, "device"), (DeepSpeedCPUAdam, "host")):
            step = cls.step

            def noted(self: Any, *args: Any, _step: Any = step, _name: str = name) -> Any:
                order.append(_name)
                return _step(self, *args)

            monkeypatch.setattr(cls, "step", noted)
        with simulate() as device:
            engine = make_engine(0.5, "cpu adam", bf16={"enabled": True})
            run(engine, range(1))
            sequence = engine.optimizer
            for group in sequence.groups:
                moments = sequence.state[group.masters[0]].values()
                tensors = [group.master, group.grad, *(t for t in moments if _dim(t))]
                assert len(tensors) == 4
                assert {device.is_pinned(tensor) for tensor in tensors[:2]} == {group.offload}
            engine.destroy()
        assert order == ["device", "host"]


def _dim(value: Any) -> int:
    return value.dim() if isinstance(value, torch.Tensor) else 0


class TestFiles(DistributedTest):
    world_size = 2

    def test_go_from_ratio_to_ratio(self, tmp_path: Path) -> None:
        # Kills: parts in another order than parameters, a count of steps that both parts share.
        for optimizer in ("sgd", "cpu adam"):
            wanted, _ = run(make_engine(1.0, optimizer), range(STEPS))
            ways = ((1.0, 0.4), (0.4, 0.01), (0.01, 0.7), (0.7, 0.0))
            for number, (first, second) in enumerate(ways[optimizer == "sgd" :: 2]):
                engine = make_engine(first, optimizer)
                run(engine, range(1))
                tag = f"{optimizer}{number}"
                engine.save_checkpoint(str(tmp_path), tag=tag)
                saved = values(engine)
                engine.destroy()
                engine = make_engine(second, optimizer)
                engine.load_checkpoint(str(tmp_path), tag=tag)
                assert same(values(engine), saved)
                found, _ = run(engine, range(1, STEPS))
                assert distance(found, wanted) < (1e-6 if optimizer == "sgd" else 1e-4), tag
                engine.destroy()

    def test_other_ranks_and_stages(self, tmp_path: Path) -> None:
        # Kills: state that is resharded into one part alone.
        model = make_net()
        client = torch.optim.SGD(groups_of(model), lr=0.3, momentum=0.9)
        engine = deepspeed.initialize(model=model, optimizer=client, config=config_of(2))[0]
        run(engine, range(1))
        saved = values(engine)
        engine.save_checkpoint(str(tmp_path), tag="stage 2")
        engine.destroy()
        other = make_engine(0.4)
        other.load_checkpoint(str(tmp_path), tag="stage 2")
        assert same(values(other), saved)
        other.destroy()


class TestScripts(DistributedTest):
    world_size = 1

    def test_setters_and_refusals(self) -> None:
        # Kills: a parameter of one part that setters do not reach, an optimizer that would train
        # one part otherwise, a stage that takes the key and offloads everything.
        engine = make_engine(0.5)
        run(engine, range(1))
        for name, param in engine.module.named_parameters():
            if param.requires_grad:
                value = torch.full(param.ds_shape, 0.25)
                safe_set_full_fp32_param(param, value)
                safe_set_full_optimizer_state(param, 2 * value, "momentum_buffer")
                assert torch.equal(safe_get_full_fp32_param(param), value), name
                found = safe_get_full_optimizer_state(param, "momentum_buffer")
                assert torch.equal(found, 2 * value), name
        engine.destroy()
        half = {"device": "cpu", "ratio": 0.5}
        for kind, stage, message in (
            ("Lamb", 3, "ratio: 0.5 with FusedLamb.*use 1.0, or Adam"),
            ("Adagrad", 3, "ratio: 0.5 with DeepSpeedCPUAdagrad"),
            ("Adam", 2, "ratio: 0.5 is not supported: .*or stage 3"),
        ):
            config = config_of(stage, offload_optimizer=half)
            config["optimizer"] = {"type": kind, "params": {"lr": 0.1}}
            with pytest.raises(deepspeed.DeepSpeedConfigError, match=message):
                deepspeed.initialize(model=make_net(), config=config)

    def test_as_one_process(self) -> None:
        # Kills: what all ratios have wrong together.
        model = make_net()
        client = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        config = config_of(3, **SHARDED, offload_optimizer={"device": "cpu", "ratio": 0.4})
        engine = deepspeed.initialize(model=model, optimizer=client, config=config)[0]
        for index in range(4):
            micro_batch(engine, index)
        end_as_one_process(engine)
