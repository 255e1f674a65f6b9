"""What client libraries and their users do with a model and its engines at every stage, as upstream
lets them: evaluate, copy, gather, destroy, print a norm, give a half model.
"""

import copy
import gc
import io
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.zero.utils import is_zero_param
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from unit.common import DistributedTest
from unit.v1.looping import each, each_pair
from unit.v1.zero.usage import (
    ROWS,
    STAGES,
    Warnings,
    check,
    config_of,
    data,
    inputs,
    loss_at,
    loss_of,
    make_engine,
    make_net,
    params_of,
    reference_params,
    train,
)

ALL_STAGES = (*STAGES, 3)


def hook_count(model: nn.Module) -> int:
    """Hooks of all kinds that an engine could have left on parameters."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return sum(len(getattr(param, kind) or {}) for param in model.parameters() for kind in kinds)


class TestWays(DistributedTest):
    world_size = 2

    @each(stage=STAGES, precision=("fp32", "bf16+fp32"))
    def test_copied_and_destroyed(self, stage: int, precision: str) -> None:
        half = {"bf16": {"enabled": True, "immediate_grad_update": True}}
        engine = make_engine(stage, precision=precision, **({} if precision == "fp32" else half))
        # Kills: links on parameters that drag the optimizer, and process groups that can't be
        # pickled, into the file.
        file = io.BytesIO()
        torch.save(engine.module, file)
        file.seek(0)
        for twin in (torch.load(file, weights_only=False), copy.deepcopy(engine.module)):
            assert safe_get_full_grad(twin.first.weight) is None
            assert torch.equal(twin.first.weight, engine.module.first.weight)
        # Kills: hooks or links that stay on parameters, parameters that are views of a freed or
        # shared buffer.
        train(engine, [0])
        model, dtype, before = engine.module, engine.model_dtype, params_of(engine)
        assert stage != 2 or hook_count(model) > 0, "this would not notice hooks that stay"
        engine.destroy()
        del engine
        gc.collect()
        assert hook_count(model) == 0
        params = dict(model.named_parameters())
        assert not any(hasattr(param, "_hp_mapping") for param in params.values())
        assert all(torch.equal(value, params[name]) for name, value in before.items())
        places = {param.untyped_storage().data_ptr() for param in params.values()}
        assert len(places) == len(params)
        loss_of(model(data(1).to(dtype))).backward()
        assert all(param.grad is not None for param in params.values())

    @each(stage=STAGES)
    def test_between_micro_batches(self, stage: int) -> None:
        # Kills: a forward under no_grad or eval that is counted as a micro-batch or confuses the
        # running one.
        engine = make_engine(stage, 2)
        for index in range(4):
            engine.eval()
            assert not engine.module.training
            with torch.no_grad():
                assert not engine(data(50)).requires_grad
            engine.train()
            engine.backward(loss_at(engine, index))
            with torch.no_grad():
                engine(data(51))
            engine.step()
        assert engine.global_steps == 2
        check(engine, [[0, 1], [2, 3]])
        # Kills: state that engines share (a global tracker, a callback of the wrong engine).
        left, right = make_engine(stage, 2), make_engine(stage, 1, model=make_net(4))
        for index in range(2):
            first, second = left(data(index)), right(data(10 + index))
            left.backward(loss_of(first))
            loss_of(second).backward()
            right.step()
            left.step()
        check(left, [[0, 1]])
        check(right, [[10], [11]], seed=4)

    def test_two_engines_no_optimizer_and_several_dtypes(self) -> None:
        # Kills: two optimizers that both move one module's parameters into their own buffers,
        # silently training different weights.
        for stages in ((0, 0), (1, 2)):
            model = nn.ModuleDict({"left": make_net(3), "right": make_net(4)})
            left = make_engine(stages[0], model=model["left"])
            right = make_engine(stages[1], model=model["right"])
            loss = loss_of(left(data(0))) + loss_of(right(data(0)))
            loss.backward()
            left.step()
            right.step()
            check(left, [[0]])
            check(right, [[0]], seed=4)
        # Kills: an engine that can't evaluate without an optimizer, or fails far from the cause
        # when asked to train.
        engine, *others = deepspeed.initialize(model=make_net(), config=config_of(0))
        assert others == [None, None, None]
        assert engine(data(0)).shape == (ROWS, 3)
        for call in (lambda: engine.backward(loss_at(engine, 0)), engine.step):
            with pytest.raises(RuntimeError, match="needs an optimizer"):
                call()
        with pytest.raises(deepspeed.DeepSpeedConfigError, match="requires an optimizer"):
            deepspeed.initialize(model=make_net(), config=config_of(2))
        model = make_net()
        model.first.bfloat16()
        model.first.register_forward_hook(lambda module, args, output: output.float())
        engine = make_engine(0, model=model)
        assert engine.model_dtype == torch.float32
        engine.backward(loss_of(engine(data(0).bfloat16())))
        engine.step()
        assert [p.dtype for p in model.parameters()] == 2 * [torch.bfloat16] + 4 * [torch.float32]
        engine.destroy()
        for stage in (1, 2, 3):
            with pytest.raises(ValueError, match="trainable parameters are of 2 dtypes"):
                make_engine(stage, model=model)

    @each(stage=ALL_STAGES, dtype=(torch.bfloat16, torch.float16))
    def test_without_a_precision_block(self, stage: int, dtype: torch.dtype) -> None:
        # Kills: masters that nobody asked for at stage 0, none where state is sharded, a model
        # that comes out in another dtype.
        model = make_net().to(dtype)
        wanted = reference_params([[0], [1], [2]], model=copy.deepcopy(model).float())
        with Warnings() as said:
            engine = make_engine(stage, model=model)
        told = [text for text in said.texts if "no precision block is enabled" in text]
        name = "bf16" if dtype == torch.bfloat16 else "fp16"
        has = {
            (0, "bf16"): 'without fp32 master weights. Set "bf16": {"enabled": true} for these',
            (0, "fp16"): "without fp32 master weights and a loss scale. Set",
            (1, "bf16"): 'with fp32 master weights. Set "bf16": {"enabled": true} to say so',
            (1, "fp16"): 'without a loss scale. Set "fp16": {"enabled": true} for these',
        }[min(stage, 1), name]
        assert [has in text for text in told] == [True] * (dist.get_rank() == 0)
        train(engine, range(3))
        assert engine.model_dtype == dtype and engine.get_data_types() == (dtype, dtype)
        assert {param.dtype for param in engine.module.parameters()} == {dtype}
        for param_name, param in engine.module.named_parameters():
            master = safe_get_full_fp32_param(param)
            assert (master is None) == (stage == 0)
            found = param.detach() if master is None else master
            assert torch.allclose(found.float(), wanted[param_name], atol=0.02), param_name
        engine.destroy()

    @each_pair(stage=ALL_STAGES, precision=("fp32", "bf16", "fp16"), clipping=(0.0, 1.0))
    def test_after_a_skipped_step(self, stage: int, precision: str, clipping: float) -> None:
        # Kills: infinity in the log and the progress bar of whoever prints the norm.
        scale = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
        keys = {"gradient_clipping": clipping, **(scale if precision == "fp16" else {})}
        engine = make_engine(stage, precision=precision, **keys)

        def step(index: int, factor: float = 1.0) -> None:
            engine.backward(loss_of(engine(inputs(engine, index))) * factor)
            engine.step()

        assert engine.get_global_grad_norm() is None
        step(0, float("inf"))
        assert engine.get_global_grad_norm() == 0.0 and not engine.was_step_applied()
        step(1)
        norm = float(engine.get_global_grad_norm())
        assert norm > 0
        step(2, float("nan"))
        assert float(engine.get_global_grad_norm()) == norm and not engine.was_step_applied()
        step(3)
        assert float(engine.get_global_grad_norm()) != norm and engine.was_step_applied()
        assert engine.skipped_steps == 2
        engine.destroy()

    @each(stage=ALL_STAGES)
    def test_of_every_stage(self, stage: int) -> None:
        # Kills: a model that is cut for a stage that does not gather it; edits of ordinary
        # parameters that are refused or lost.
        with deepspeed.zero.Init(config_dict_or_path={"zero_optimization": {"stage": stage}}):
            model = make_net()
        assert is_zero_param(model.first.weight) == (stage == 3)
        whole: Any = {"zero_optimization": {"stage": 3}}
        with deepspeed.zero.Init(config_dict_or_path=whole, enabled=False):
            plain = make_net()
        with deepspeed.zero.GatheredParameters(list(plain.parameters()), modifier_rank=0):
            plain.first.weight.data.fill_(2.0)
        with deepspeed.zero.GatheredParameters(plain.first.weight):
            assert bool((plain.first.weight == 2.0).all())
        engine = make_engine(stage, model=model)
        with deepspeed.zero.GatheredParameters(list(engine.parameters())):
            assert engine.module.first.weight.shape == (7, 5)
        train(engine, [0])
        engine.destroy()
