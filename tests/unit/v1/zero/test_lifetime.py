"""What becomes of a model and its engines: evaluated, copied, compiled, destroyed."""

import copy
import gc
import io
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.utils import safe_get_full_grad
from unit.common import DistributedTest
from unit.v1.looping import each
from unit.v1.zero.usage import (
    ROWS,
    STAGES,
    assert_close,
    config_of,
    data,
    inputs,
    loss_of,
    make_engine,
    make_net,
    params_of,
    reference_params,
)


def hook_count(model: nn.Module) -> int:
    """Hooks of all kinds that an engine could have left on parameters."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return sum(len(getattr(param, kind) or {}) for param in model.parameters() for kind in kinds)


class TestLifetime(DistributedTest):
    """Around training: destroying, evaluating, several engines, no optimizer."""

    world_size = 2

    @each(stage=STAGES, precision=("fp32", "bf16+fp32"))
    def test_destroy_leaves_a_usable_model(self, stage: int, precision: str) -> None:
        # Kills: hooks or links that stay on parameters, parameters that are views of a freed or
        # shared buffer.
        immediate = (
            {"bf16": {"enabled": True, "immediate_grad_update": True}}
            if precision != "fp32"
            else {}
        )
        engine = make_engine(stage, precision=precision, **immediate)
        engine.backward(loss_of(engine(inputs(engine, 0))))
        engine.step()
        model, dtype = engine.module, engine.model_dtype
        before = params_of(engine)
        if stage == 2:
            assert hook_count(model) > 0, (
                "nothing to remove: this test would not notice hooks that stay"
            )
        engine.destroy()
        del engine
        gc.collect()
        assert hook_count(model) == 0
        assert not any(hasattr(param, "_hp_mapping") for param in model.parameters())
        assert all(
            torch.equal(value, dict(model.named_parameters())[name]) for name, value in before
        )
        assert len({param.untyped_storage().data_ptr() for param in model.parameters()}) == len(
            list(model.parameters())
        )
        loss_of(model(data(1).to(dtype))).backward()
        assert all(param.grad is not None for param in model.parameters())

    @each(stage=STAGES)
    def test_evaluation_between_micro_batches(self, stage: int) -> None:
        # Kills: a forward under no_grad or eval that is counted as a micro-batch or confuses the
        # running one.
        engine = make_engine(stage, 2)
        for index in range(4):
            engine.eval()
            assert not engine.module.training
            with torch.no_grad():
                assert not engine(data(50)).requires_grad
            engine.train()
            engine.backward(loss_of(engine(data(index))))
            with torch.no_grad():
                engine(data(51))
            engine.step()
        assert engine.global_steps == 2
        assert_close(engine, reference_params([[0, 1], [2, 3]]))

    def test_engine_without_optimizer(self) -> None:
        # Kills: an engine that can't evaluate without an optimizer, or fails far from the cause
        # when asked to train.
        engine, optimizer, loader, schedule = deepspeed.initialize(
            model=make_net(), config=config_of(0)
        )
        assert optimizer is None and loader is None and schedule is None
        assert engine(data(0)).shape == (ROWS, 3)
        for call in (lambda: engine.backward(loss_of(engine(data(0)))), engine.step):
            with pytest.raises(RuntimeError, match="needs an optimizer"):
                call()
        with pytest.raises(deepspeed.DeepSpeedConfigError, match="requires an optimizer"):
            deepspeed.initialize(model=make_net(), config=config_of(2))

    @each(stage=STAGES, precision=("fp32", "bf16+fp32"))
    def test_the_module_can_be_copied_and_saved_whole(self, stage: int, precision: str) -> None:
        # Kills: links on parameters that drag the optimizer, and process groups that can't be
        # pickled, into the file.
        engine = make_engine(stage, precision=precision)
        file = io.BytesIO()
        torch.save(engine.module, file)
        file.seek(0)
        for twin in (torch.load(file, weights_only=False), copy.deepcopy(engine.module)):
            assert safe_get_full_grad(twin.first.weight) is None
            assert torch.equal(twin.first.weight, engine.module.first.weight)

    @each(stage=STAGES)
    def test_two_engines_on_two_models(self, stage: int) -> None:
        # Kills: state that engines share (a global tracker, a callback of the wrong engine).
        left, right = make_engine(stage, 2), make_engine(stage, 1, model=make_net(4))
        for index in range(2):
            first, second = left(data(index)), right(data(10 + index))
            left.backward(loss_of(first))
            loss_of(second).backward()
            right.step()
            left.step()
        assert_close(left, reference_params([[0, 1]]))
        assert_close(right, reference_params([[10], [11]], model=make_net(4)))

    @each(stages=[(0, 0), (1, 2)])
    def test_two_engines_on_one_module(self, stages: tuple[int, int]) -> None:
        # Kills: two optimizers that both move one module's parameters into their own buffers,
        # silently training different weights.
        model = nn.ModuleDict({"left": make_net(3), "right": make_net(4)})
        left = make_engine(stages[0], model=model["left"])
        right = make_engine(stages[1], model=model["right"])
        loss = loss_of(left(data(0))) + loss_of(right(data(0)))
        loss.backward()
        left.step()
        right.step()
        assert_close(left, reference_params([[0]]))
        assert_close(right, reference_params([[0]], model=make_net(4)))

    def test_compile(self) -> None:
        # Kills: compile() that is accepted and does nothing, or hooks that a compiled forward
        # loses.
        compiled: list[int] = []

        def backend(graph: Any, example: Any) -> Any:
            compiled.append(len(example))
            return graph.forward

        engine = make_engine(2)  # the others are in `test_stage0_overlap`
        assert not engine.is_compiled
        engine.compile(backend=backend)
        assert engine.is_compiled
        for index in range(2):
            engine.backward(loss_of(engine(data(index))))
            engine.step()
        assert compiled
        assert_close(engine, reference_params([[0], [1]]))
