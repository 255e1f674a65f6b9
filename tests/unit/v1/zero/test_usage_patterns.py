"""The ways in which scripts drive an engine, each against plain torch that sees the whole batch."""

from __future__ import annotations

import argparse
import copy
import gc
import io
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from unit.common import DistributedTest
from unit.v1.looping import each

LR = 0.1
STAGES = (0, 1, 2)
ROWS = 4
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16+fp32": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 128}},
}
# fp32: summation order. Half precision: a few roundings of the gradient (1/256 for bf16), times the
# learning rate.
TOLERANCE = {"fp32": 2e-6, "bf16": 5e-3, "bf16+fp32": 5e-3, "fp16": 1e-3}


class Net(nn.Module):
    """Small, with odd sizes; returns `[rows, 3]`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 7)
        self.third = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x).tanh()).tanh())


def make_net(seed: int = 3, cls: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(seed)
    return cls()


def config_of(
    stage: int,
    accumulation: int = 1,
    precision: str = "fp32",
    zero: dict[str, Any] | None = None,
    **more: Any,
) -> Any:
    """Many small buckets and overlap, where ordering mistakes show."""
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 20,
            "overlap_comm": True,
            **(zero or {}),
        },
        **PRECISIONS[precision],
        **more,
    }
    return config


def make_engine(
    stage: int,
    accumulation: int = 1,
    precision: str = "fp32",
    model: nn.Module | None = None,
    **more: Any,
) -> Any:
    model = make_net() if model is None else model
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    config = config_of(stage, accumulation, precision, **more)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def data(index: int, rank: int | None = None) -> torch.Tensor:
    """Input of a micro-batch of a rank: different for each."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * index + rank)
    return torch.randn(ROWS, 5, generator=generator)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def reference_params(
    micro_batches: list[list[int]],
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda model, x: loss_of(model(x)),
    model: nn.Module | None = None,
) -> dict[str, torch.Tensor]:
    """Plain torch over all ranks' data; one list of micro-batch indices per optimizer step."""
    model = make_net() if model is None else model
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    world = dist.get_world_size()
    for indices in micro_batches:
        optimizer.zero_grad()
        for index, rank in itertools.product(indices, range(world)):
            (loss(model, data(index, rank)) / (world * len(indices))).backward()
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def assert_close(
    engine: Any, wanted: dict[str, torch.Tensor], tolerance: float = TOLERANCE["fp32"]
) -> None:
    """fp32 parameters of the engine, relative to their norm."""
    for name, param in engine.module.named_parameters():
        found = safe_get_full_fp32_param(param)
        error = ((found - wanted[name]).norm() / wanted[name].norm()).item()
        if not error <= tolerance:
            raise AssertionError(f"{name} is off by {error:.2e} (allowed {tolerance:.0e})")


def inputs(engine: Any, index: int) -> torch.Tensor:
    return data(index).to(engine.model_dtype)


class TestBackwardForms(DistributedTest):
    """engine.backward, plain backward, and engine.scale."""

    world_size = 2

    @each(
        stage=STAGES,
        accumulation=(1, 3),
        precision=("fp32", "bf16", "bf16+fp32"),
        form=("managed", "plain", "scale"),
    )
    def test_all_forms_train_alike(
        self, stage: int, accumulation: int, precision: str, form: str
    ) -> None:
        # Kills: a plain backward that isn't noticed (never reduced), divided twice or not at all by
        # the accumulation steps.
        engine = make_engine(stage, accumulation, precision)
        windows = [
            [step * accumulation + micro for micro in range(accumulation)] for step in range(2)
        ]
        for index in itertools.chain(*windows):
            loss = loss_of(engine(inputs(engine, index)))
            if form == "managed":
                engine.backward(loss)
            elif form == "plain":
                loss.backward()
            else:
                engine.scale(loss).backward()
            engine.step()
        assert engine.global_steps == 2 and engine.micro_steps == 2 * accumulation
        assert_close(engine, reference_params(windows), TOLERANCE[precision])
        engine.destroy()

    @each(stage=STAGES)
    def test_fp16_needs_the_scale(self, stage: int) -> None:
        # Kills: unscaled fp16 gradients that are divided by the loss scale afterwards, without a
        # word.
        engine = make_engine(stage, precision="fp16")
        with pytest.raises(RuntimeError, match=r"engine.scale\(loss\).backward\(\)"):
            loss_of(engine(inputs(engine, 0))).backward()
        engine.zero_grad()
        engine.scale(loss_of(engine(inputs(engine, 0)))).backward()
        engine.step()
        assert_close(engine, reference_params([[0]]), TOLERANCE["fp16"])
        with pytest.raises(RuntimeError, match=r"engine.scale\(loss\).backward\(\)"):
            loss_of(engine.module(inputs(engine, 0))).backward()
            engine.step()

    @each(stage=STAGES, accumulation=(1, 2), precision=("fp32", "bf16+fp32"), bucket=(20, 10**6))
    def test_the_model_called_directly(
        self, stage: int, accumulation: int, precision: str, bucket: int
    ) -> None:
        # Kills: a sum over micro-batches where the mean is wanted, because no forward of the engine
        # noticed the backward.
        engine = make_engine(stage, accumulation, precision, zero={"reduce_bucket_size": bucket})
        windows = [
            [step * accumulation + micro for micro in range(accumulation)] for step in range(2)
        ]
        for index in itertools.chain(*windows):
            loss_of(engine.module(inputs(engine, index))).backward()
            engine.step()
        assert_close(engine, reference_params(windows), TOLERANCE[precision])
        engine.destroy()

    @each(stage=STAGES)
    def test_one_window_is_managed_or_plain(self, stage: int) -> None:
        # Kills: a window whose micro-batches are divided by different numbers.
        engine = make_engine(stage, accumulation=2)
        engine.backward(loss_of(engine(inputs(engine, 0))))
        engine.step()
        with pytest.raises(RuntimeError, match="gradient_accumulation_steps \\(2\\)"):
            loss_of(engine(inputs(engine, 1))).backward()
        # Kills: an error that leaves the engine unusable.
        engine.zero_grad()
        engine.backward(loss_of(engine(inputs(engine, 1))))
        engine.step()

    @each(stage=STAGES, precision=("fp32", "bf16+fp32"))
    def test_several_losses_and_backwards_per_step(self, stage: int, precision: str) -> None:
        # Kills: averaging the first backward's sum again with the second's (its share would shrink
        # with the world), and a second backward at the boundary that replaces the first.
        engine = make_engine(stage, precision=precision)
        for step in range(2):
            output = engine(inputs(engine, step))
            engine.backward(loss_of(output), retain_graph=True)
            engine.backward(output.float().mean())
            engine.backward(loss_of(engine(inputs(engine, 10 + step))))
            engine.step()

        def total(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return loss_of(model(x)) + model(x).mean()

        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        world = dist.get_world_size()
        for step in range(2):
            optimizer.zero_grad()
            for rank in range(world):
                (
                    (total(model, data(step, rank)) + loss_of(model(data(10 + step, rank)))) / world
                ).backward()
            optimizer.step()
        assert_close(
            engine, {n: p.detach() for n, p in model.named_parameters()}, 4 * TOLERANCE[precision]
        )

    @each(stage=STAGES, plain=(False, True))
    def test_a_module_used_twice(self, stage: int, plain: bool) -> None:
        # Kills: a plain backward that ends at the first output's gradient, and a parameter whose
        # second use is lost.
        engine = make_engine(stage)
        loss = loss_of(engine(data(0)) - 2 * engine(data(1)).square())
        loss.backward() if plain else engine.backward(loss)
        engine.step()
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        world = dist.get_world_size()
        for rank in range(world):
            (loss_of(model(data(0, rank)) - 2 * model(data(1, rank)).square()) / world).backward()
        optimizer.step()
        assert_close(engine, {n: p.detach() for n, p in model.named_parameters()})

    @each(stage=STAGES)
    def test_a_backward_that_raises_and_then_a_good_one(self, stage: int) -> None:
        # Kills: state of the broken backward (counts, buckets, the running flag) that leaks into
        # the next one.
        engine = make_engine(stage)
        for plain in (False, True):
            output = engine(data(7))

            def refuse(grad: torch.Tensor) -> torch.Tensor:
                raise KeyError("on purpose")

            hidden = engine.module.first(data(8)).tanh()
            hidden.register_hook(refuse)
            loss = loss_of(output) + loss_of(engine.module.third(hidden))
            with pytest.raises(KeyError, match="on purpose"):
                loss.backward() if plain else engine.backward(loss)
            engine.zero_grad()
        for index in range(2):
            engine.backward(loss_of(engine(data(index))))
            engine.step()
        assert_close(engine, reference_params([[0], [1]]))

    @each(stage=STAGES)
    def test_zero_grad_forgets_reduced_and_accumulated_gradients(self, stage: int) -> None:
        # Kills: gradients that lie in a shard or an accumulator and survive zero_grad.
        for precision in ("fp32", "bf16+fp32"):
            engine = make_engine(stage, precision=precision)
            engine.backward(loss_of(engine(inputs(engine, 9))))
            engine.zero_grad()
            engine.backward(loss_of(engine(inputs(engine, 0))))
            engine.step()
            assert_close(engine, reference_params([[0]]), TOLERANCE[precision])


class SharedLayers(nn.Module):
    """Reentrant checkpoints over segments that share a layer: its hook fires once per segment, in
    autograd tasks of their own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(5, 7)
        self.shared = nn.Linear(7, 7)
        self.own = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.after = nn.Linear(7, 3)

    def segment(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        return self.own[index](self.shared(hidden).tanh()).tanh()

    def forward(self, x: torch.Tensor, recompute: bool = True) -> torch.Tensor:
        hidden = self.before(x).tanh()
        for index in range(3):
            if recompute:
                hidden = checkpoint(self.segment, index, hidden, use_reentrant=True)
            else:
                hidden = self.segment(index, hidden)
        return self.after(hidden)


class TestCheckpointing(DistributedTest):
    """Gradients that come in several parts, after their bucket was thought complete."""

    world_size = 2

    @each(stage=STAGES, overlap=(True, False), bucket=(1, 60, 10**6), plain=(False, True))
    def test_late_gradients_count_once(
        self, stage: int, overlap: bool, bucket: int, plain: bool
    ) -> None:
        # Kills: sending the shared layer after its first firing and dropping (or sending twice)
        # what comes later; a plain backward that is closed by an inner autograd task.
        zero = {"overlap_comm": overlap, "reduce_bucket_size": bucket}
        engine = make_engine(stage, 2, model=make_net(cls=SharedLayers), zero=zero)
        windows = [[0, 1], [2, 3], [4, 5]]
        for index in itertools.chain(*windows):
            loss = loss_of(engine(data(index)))
            loss.backward() if plain else engine.backward(loss)
            engine.step()

        def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return loss_of(model(x, recompute=False))

        assert_close(engine, reference_params(windows, loss, make_net(cls=SharedLayers)))
        engine.destroy()


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


def params_of(engine: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, param.detach().clone()) for name, param in engine.module.named_parameters()]


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

        for stage in STAGES:
            torch._dynamo.reset()
            compiled.clear()
            engine = make_engine(stage)
            assert not engine.is_compiled
            engine.compile(backend=backend)
            assert engine.is_compiled
            for index in range(2):
                engine.backward(loss_of(engine(data(index))))
                engine.step()
            assert compiled
            assert_close(engine, reference_params([[0], [1]]))


class TestInitializeForms(DistributedTest):
    """The ways to say what is to be trained, by what, and how fast."""

    world_size = 2

    @each(stage=STAGES)
    def test_optimizer_and_scheduler_as_callables(self, stage: int) -> None:
        # Kills: a callable that is taken for an optimizer, gets no parameters, or a schedule on
        # groups that nobody reads.
        seen: list[int] = []

        def optimizer(params: Any) -> torch.optim.Optimizer:
            params = list(params)
            seen.append(len(params))
            return torch.optim.SGD(params, lr=1.0)

        def schedule(basic: torch.optim.Optimizer) -> Any:
            return torch.optim.lr_scheduler.LambdaLR(basic, lambda step: LR if step == 0 else 0.0)

        engine, wrapped, _, made = deepspeed.initialize(
            model=make_net(), optimizer=optimizer, lr_scheduler=schedule, config=config_of(stage)
        )
        assert seen == [6] and made is engine.lr_scheduler
        for index in range(2):  # the second step has learning rate 0
            engine.backward(loss_of(engine(data(index))))
            engine.step()
        assert engine.get_lr() == [0.0] == [group["lr"] for group in wrapped.param_groups]
        assert_close(engine, reference_params([[0]]))

    @each(stage=STAGES)
    def test_model_parameters_as_generator_and_groups(self, stage: int) -> None:
        # Kills: a generator that is consumed twice, and groups that are flattened (the second one
        # has learning rate 0).
        sgd = {"optimizer": {"type": "SGD", "params": {"lr": LR}}}
        model = make_net()
        config = config_of(stage, **sgd)
        engine = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )[0]
        engine.backward(loss_of(engine(data(0))))
        engine.step()
        assert_close(engine, reference_params([[0]]))
        model = make_net()
        groups = [
            {"params": list(model.first.parameters())},
            {"params": list(model.third.parameters()), "lr": 0.0},
        ]
        engine = deepspeed.initialize(
            model=model, model_parameters=groups, config=config_of(stage, **sgd)
        )[0]
        engine.backward(loss_of(engine(data(0))))
        engine.step()
        wanted, initial = reference_params([[0]]), dict(make_net().named_parameters())
        for name, param in engine.module.named_parameters():
            moved = wanted[name] if name.startswith("first") else initial[name].detach()
            torch.testing.assert_close(param.detach(), moved, rtol=2e-6, atol=1e-7)

    def test_args_namespace(self, tmp_path) -> None:
        # Kills: ignoring --deepspeed_config, and taking it silently when config= is given too.
        path = tmp_path / f"config{dist.get_rank()}.json"
        path.write_text(json.dumps(config_of(1, optimizer={"type": "SGD", "params": {"lr": LR}})))
        parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
        parser.add_argument("--local_rank", type=int, default=-1)
        args = parser.parse_args(
            ["--deepspeed", "--deepspeed_config", str(path), "--local_rank", str(dist.get_rank())]
        )
        engine = deepspeed.initialize(args=args, model=make_net())[0]
        assert engine.zero_optimization_stage() == 1 and engine.local_rank == dist.get_rank()
        engine.backward(loss_of(engine(data(0))))
        engine.step()
        assert_close(engine, reference_params([[0]]))

    def test_ranks_start_from_rank_zero(self) -> None:
        # Kills: ranks that keep their own initial weights.
        engine = make_engine(1, model=make_net(seed=100 + dist.get_rank()))
        initial = dict(make_net(seed=100).named_parameters())
        assert all(torch.equal(value, initial[name]) for name, value in params_of(engine))


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


class TestOneRank(DistributedTest):
    """World 1 runs the same code."""

    world_size = 1

    @each(stage=STAGES, precision=("fp32", "bf16", "bf16+fp32", "fp16"), accumulation=(1, 2))
    def test_world_of_one(self, stage: int, precision: str, accumulation: int) -> None:
        # Kills: a path that is only taken with several ranks and leaves gradients unaccumulated or
        # unscaled here.
        engine = make_engine(stage, accumulation, precision)
        windows = [
            [step * accumulation + micro for micro in range(accumulation)] for step in range(2)
        ]
        for index in itertools.chain(*windows):
            engine.backward(loss_of(engine(inputs(engine, index))))
            engine.step()
        assert_close(engine, reference_params(windows), TOLERANCE[precision])

    @each(stage=STAGES)
    def test_gradient_is_readable_before_the_step(self, stage: int) -> None:
        # Kills: a plain backward whose gradient can't be read, or isn't divided, before the step.
        for plain in (False, True):
            engine = make_engine(stage, 2)
            for index in range(2):
                loss = loss_of(engine(data(index)))
                loss.backward() if plain else engine.backward(loss)
                if index == 1:
                    grad = safe_get_full_grad(engine.module.third.bias).clone()
                engine.step()
            moved = make_net().third.bias.detach() - LR * grad
            torch.testing.assert_close(
                engine.module.third.bias.detach(), moved, rtol=1e-6, atol=1e-7
            )


def test_each_names_the_combination() -> None:
    # Kills: a loop that stops before its last value, or hides which one failed.
    seen = []

    @each(a=(1, 2), b=("x", "y"))
    def body(self: Any, a: int, b: str) -> None:
        seen.append((a, b))
        if (a, b) == (2, "y"):
            raise KeyError("last")

    with pytest.raises(AssertionError, match="'a': 2, 'b': 'y'.*last"):
        body(None)
    assert len(seen) == 4
