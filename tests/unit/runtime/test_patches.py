"""What client libraries put on upstream's classes: it is called, or told by name."""

import importlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed._absent_internals import (
    ENGINE_METHODS,
    OPTIMIZER_METHODS,
    PIPELINE_METHODS,
    SHARDING_METHODS,
)
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.engine_parts.patches import tell_of_patches
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineError
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import groups
from deepspeed.utils.exceptions import MisuseError
from unit.common import DistributedTest
from unit.models import config_of, sgd
from unit.test_upstream_names import REFUSES, answer, listed
from unit.v1.gathering import from_all_ranks
from unit.v1.zero.usage import Warnings

PATCHED = "deepspeed.runtime.engine.DeepSpeedEngine.clip_fp32_gradients: gradients are .* clipped"


# What upstream's classes have inside.
PRIVATE: dict[type, Collection[str]] = {
    DeepSpeedEngine: ENGINE_METHODS,
    **dict.fromkeys((PipelineEngine, PipelineModule), PIPELINE_METHODS),
    **dict.fromkeys((DeepSpeedZeroOptimizer_Stage3, BF16_Optimizer), OPTIMIZER_METHODS),
    **dict.fromkeys((Init, DeepSpeedZeRoOffload), SHARDING_METHODS),
}


def engine_of(stage: int = 2, model: nn.Module | None = None, **more: Any) -> Any:
    config = config_of(stage, 1, 2, optimizer=sgd(0.1), **more)
    return deepspeed.initialize(model=model or nn.Linear(4, 4), config=config)[0]


def step(engine: Any) -> None:
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()


def client(self: Any, *args: Any) -> None:
    """A client's function."""


def refused_of_what_is_patched() -> list[tuple[type, str]]:
    """Upstream's methods of engines and optimizers that are not here."""
    found = []
    for module, name, method, _ in listed():
        if method and answer(module, name, method) == REFUSES:
            cls = getattr(importlib.import_module(module), name, None)
            if isinstance(cls, type) and issubclass(cls, (DeepSpeedEngine, DeepSpeedOptimizer)):
                found.append((cls, method))
    return found


def an_object(cls: type, **attributes: Any) -> object:
    """Of a derived class, not constructed."""
    derived: Any = type("Derived", (cls,), attributes)
    derived.__abstractmethods__ = frozenset()
    return object.__new__(derived)


def test_each_method_that_is_not_here_is_told() -> None:
    # Kills: absent methods that are replaced in silence by a derived class or on an object.
    private = [(cls, name) for cls, names in PRIVATE.items() for name in names]
    assert [both for both in private if hasattr(*both)] == []
    more = [(DeepSpeedEngine, "_save_moe_checkpoint"), (PipelineEngine, "clip_fp32_gradients")]
    refused = [*refused_of_what_is_patched(), *more, *private]
    assert len(refused) > 900
    silent = []
    for cls, method in refused:
        with Warnings() as said:
            tell_of_patches(an_object(cls, **{method: client}), raises=False)
            thing = an_object(cls)
            vars(thing)[method] = client
        with pytest.raises(MisuseError, match=f"{method}: .* never called"):
            tell_of_patches(thing, raises=True)
        if len(said.texts) != 1:
            silent.append((cls, method, said.texts))
    assert silent == []


class TestTold(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_nothing_of_this_package(self, stage: int) -> None:
        # Kills: a warning of this package's own attributes.
        with Warnings() as said:
            for precision in ({}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}):
                engine = engine_of(stage, **precision)
                for name in ("own_helper", "no_upstream_name"):
                    setattr(engine, name, client)
                tell_of_patches(engine, engine.module, engine.optimizer, raises=True)
                engine.destroy()
        assert said.about("this program") == []

    def test_on_the_class_once(self, tmpdir: Any) -> None:
        # Kills: a word for each engine, or on each rank.
        with Warnings() as said, pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeepSpeedEngine, "clip_fp32_gradients", client, raising=False)
            for _ in range(2):
                engine = engine_of()
                step(engine)
                engine.save_checkpoint(str(tmpdir))
        told = said.about("clip_fp32_gradients")
        assert len(told) == (dist.get_rank() == 0), told
        if told:
            assert "clipped by engine.backward and engine.step" in told[0]
            assert "never called" in told[0]

    @pytest.mark.parametrize("has_variable", [True, False])
    def test_an_error_when_training_is_checked(self, has_variable: bool) -> None:
        block: dict[str, Any] = {} if has_variable else {"verify": {"ledger": True}}
        with pytest.MonkeyPatch.context() as patch:
            if has_variable:
                patch.setenv("DS_VERIFY", "ledger")
            patch.setattr(DeepSpeedEngine, "clip_fp32_gradients", client, raising=False)
            with pytest.raises(MisuseError, match=PATCHED):
                engine_of(**block)

    def test_on_an_engine_at_its_first_step_and_when_saving(self, tmpdir: Any) -> None:
        # Kills: looking at construction only, before any engine can be patched; or at every step.
        engine = engine_of(verify={"ledger": True})
        engine.print_forward_breakdown = client
        with pytest.raises(MisuseError, match=r"print_forward_breakdown: use wall_clock_breakdown"):
            step(engine)
        del engine.print_forward_breakdown
        engine.destroy()
        engine = engine_of()
        step_check = engine._check_at_step
        step(engine)
        assert step_check is not None and engine._check_at_step is None
        engine.optimizer.reduce_ipg_grads = client
        with Warnings() as said:
            step(engine)
            assert said.about("reduce_ipg_grads") == []
            engine.save_checkpoint(str(tmpdir))
        told = said.about("reduce_ipg_grads")
        assert len(told) == (dist.get_rank() == 0), said.texts

    def test_where_parameters_are_sharded(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Init, "_partition_param", client, raising=False)
            with pytest.raises(MisuseError, match="_partition_param: .* never called"):
                engine_of(3, verify={"ledger": True})
        engine = engine_of(3, verify={"ledger": True})
        engine.parameter_offload.mark_persistent_parameters = client
        with pytest.raises(MisuseError, match="mark_persistent_parameters: .* never called"):
            step(engine)


def frozen_but_one() -> list[Any]:
    """Four equal layers, of which the last one trains."""
    layers: list[Any] = [nn.Linear(4, 4).requires_grad_(False) for _ in range(2)]
    return [*layers, LayerSpec(Frozen, 4), nn.Linear(4, 4)]


class Frozen(nn.Linear):
    """A layer of which nothing trains."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.requires_grad_(False)


def all_params(self: Any) -> list[int]:
    """As diffusion-pipe counts: frozen parameters too."""
    built = (spec.build() if isinstance(spec, LayerSpec) else spec for spec in self._layer_specs)
    return [sum(param.numel() for param in layer.parameters()) for layer in built]


def trainable_ones(self: Any) -> None:
    """A client's broadcast, by upstream's attributes of the engine: of what trains alone."""
    for param in self.module.parameters():
        if param.requires_grad:
            same, source = self.seq_data_parallel_group, groups._get_broadcast_src_rank()
            if hasattr(param, "group_name"):
                same = self.expert_data_parallel_group[param.group_name]
                source = groups._get_expert_broadcast_src_rank(param.group_name)
            dist.broadcast(param.data, source, group=same)


class TestHonoured(DistributedTest):
    world_size = 2

    def test_how_layers_are_counted(self) -> None:
        # Kills: parts by this package's count, or a count that is made for other methods too.
        assert PipelineModule(frozen_but_one(), num_stages=2).parts == [0, 3, 4]
        calls: list[Any] = []

        def counted(self: Any) -> list[int]:
            calls.append(self)
            return all_params(self)

        with Warnings() as said, pytest.MonkeyPatch.context() as patch:
            patch.setattr(PipelineModule, "_count_layer_params", counted)
            PipelineModule(frozen_but_one(), num_stages=2, partition_method="uniform")
            assert calls == []
            module = PipelineModule(frozen_but_one(), num_stages=2, loss_fn=nn.MSELoss())
            assert calls == [module] and module.parts == [0, 2, 4]
            engine_of(0, module, verify={"ledger": True})
        told = said.about("_count_layer_params")
        assert len(told) == (dist.get_rank() == 0), said.texts
        assert all("own; this package calls it" in text for text in told)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PipelineModule, "_count_layer_params", lambda self: [1, 2, 3])
            with pytest.raises(PipelineError, match="3 numbers for 4 layers: give one for each"):
                PipelineModule(frozen_but_one(), num_stages=2)

    @pytest.mark.parametrize("stage", [0, 1, 2])
    def test_how_weights_are_made_equal(self, stage: int) -> None:
        # Kills: a broadcast of this package's beside it; a group that the client's cannot ask for.
        torch.manual_seed(dist.get_rank())
        expert = MoE(4, nn.Linear(4, 4), num_experts=2)
        model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4), expert)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeepSpeedEngine, "_broadcast_model", trainable_ones)
            engine = engine_of(stage, model, verify={"ledger": True})
        for param in engine.module.parameters():
            first, second = from_all_ranks(param.detach())
            assert torch.equal(first, second) == param.requires_grad

    @pytest.mark.parametrize("decoupled", [False, True])
    def test_how_the_converter_is_put(self, decoupled: bool, tmpdir: Any) -> None:
        # Kills: this package's file beside it; a call on each rank; another folder than upstream's.
        writer = {"type": "fast", "decoupled": True} if decoupled else {}
        engine = engine_of(checkpoint={"writer": writer}, verify={"ledger": True})

        def put(self: Any, save_path: str) -> None:
            with Path(tmpdir, "calls").open("a", encoding="ascii") as file:
                file.write(f"{save_path} rank {dist.get_rank()}\n")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeepSpeedEngine, "_copy_recovery_script", put)
            engine.save_checkpoint(str(tmpdir), tag="t")
            engine.destroy()
        dist.barrier()
        ours = f"{tmpdir} rank 0\n"
        assert Path(tmpdir, "calls").read_text(encoding="ascii") == ours
        assert sorted(os.listdir(str(tmpdir))) == ["calls", "latest", "t"]

    def test_on_one_engine(self, tmpdir: Any) -> None:
        engine = engine_of()
        engine._copy_recovery_script = lambda save_path: Path(save_path, "own.py").touch()
        engine.save_checkpoint(str(tmpdir), tag="t")
        assert sorted(os.listdir(str(tmpdir))) == ["latest", "own.py", "t"]

    def test_how_progress_is_told(self) -> None:
        # Kills: this package's line beside the client's; a step that it is not told.
        told: list[int] = []
        with Warnings() as said, pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeepSpeedEngine, "_report_progress", lambda self, step: told.append(step))
            engine = engine_of(steps_per_print=1, verify={"ledger": True})
            step(engine)
            step(engine)
        assert told == [1, 2]
        assert len(said.about("_report_progress")) == (dist.get_rank() == 0), said.texts
