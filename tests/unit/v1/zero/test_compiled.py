"""Compiled models train as they do uncompiled, at every stage; one class, as what compiling imports
takes long.
"""

from typing import Any

import pytest
import torch

from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.compiler import traces_subclasses
from deepspeed.runtime.engine_parts import compiling
from unit.common import DistributedTest
from unit.models import seeded
from unit.rank_server import COMPILER
from unit.v1.looping import each_pair
from unit.v1.zero import test_stage0_overlap as overlap
from unit.v1.zero.stage3 import models as stage3
from unit.v1.zero.stage3 import test_uneven as uneven

BOUNDED = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


def blocks_in_place(model: Any, backend: Any) -> Any:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def whole_in_place(model: Any, backend: Any) -> Any:
    model.compile(backend=backend)
    return model


def wrapped(model: Any, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


WAYS = {way.__name__: way for way in (blocks_in_place, whole_in_place, wrapped)}


class TestCompiled(DistributedTest):
    world_size = 2
    imports = COMPILER

    def test_same_gradients_at_stage_3(self) -> None:
        # Kills: gathers that are traced into a graph, memory of parameters that a compiled
        # backward reads after it was given to another unit, a forward that stays compiled.
        if not traces_subclasses():
            pytest.skip("this torch breaks graphs at parameters of stage 3")
        for zero, recompute in ((BOUNDED, None), (BOUNDED, False), ({}, None)):
            models = [stage3.make_net(recompute=recompute) for _ in range(2)]
            for model, compiled in zip(models, (False, True), strict=True):
                engine = stage3.engine_of(model, stage3.config_of(3, **zero))
                if compiled:
                    # Where all persists, nothing is given away that a backward could read.
                    backend = "aot_eager" if zero else "eager"
                    engine.compile(backend=backend, compile_kwargs={"fullgraph": True})
                    # And no hook is in the way of one graph.
                    parts = set(model.blocks) if zero else {model}
                    assert {m for m in model.modules() if "forward" in vars(m)} == parts
                stage3.train(engine)
                engine.destroy()
                assert not any("forward" in vars(module) for module in model.modules())
            assert all(map(torch.equal, *(model.parameters() for model in models))), zero
            stage3.check_as_one_process(models[1])

    @each_pair(way=WAYS, persists=(False, True), is_late=(False, True))
    def test_by_torch_itself_at_stage_3(self, way: str, persists: bool, is_late: bool) -> None:
        # Kills: a hook that is traced, which looks at parameters that are sharded; parts of a model
        # that nobody compiles any more; a graph that a gather is in.
        if not traces_subclasses():
            pytest.skip("this torch breaks graphs at parameters of stage 3")
        torch._dynamo.reset()
        zero = {} if persists else BOUNDED
        sizes: list[int] = []

        def backend(graph: Any, example: Any) -> Any:
            sizes.append(sum(node.op.startswith("call_") for node in graph.graph.nodes))
            return graph.forward

        models: list[Any] = [stage3.make_net(), stage3.make_net()]
        if not is_late:
            models[1] = WAYS[way](models[1], backend)
        engines = [stage3.engine_of(model, stage3.config_of(3, **zero)) for model in models]
        if is_late:
            engines[1].module = WAYS[way](models[1], backend)
        for engine in engines:
            stage3.train(engine)
            engine.destroy()
        # A block has a norm, two layers and what is between them.
        assert max(sizes) >= 5
        assert all(map(torch.equal, *(model.parameters() for model in models)))

    def test_on_each_rank_by_its_branches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: a graph with a gather in it, which another rank's graph does not have; an older
        # torch that compiles next to nothing and does not tell.
        wanted = uneven.reference(seeded(uneven.Branches))
        with uneven.compared():
            model = seeded(uneven.Branches)
            config = stage3.config_of(3, uneven.ACCUMULATION, **uneven.UNPREFETCHED)
            engine = stage3.engine_of(model, config)
            said: list[str] = []
            monkeypatch.setattr(compiling.logger, "warning", lambda text, *args: said.append(text))
            monkeypatch.setattr(compiling, "traces_subclasses", lambda: False)
            engine.compile(backend="eager")
            assert len(said) == 1 and "breaks a graph" in said[0]
            uneven.train(engine)
            engine.destroy()
        assert stage3.distance(stage3.values_of(model), wanted) < 1e-5

    def test_the_configuration_says_how(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: keys that are taken and forgotten, or that win over what the script says.
        calls: list[Any] = []

        def noted(model: Any, backend: Any, by_block: bool, has_hooks: Any, **how: Any) -> Any:
            calls.append((backend, how))
            return []

        monkeypatch.setattr(compiling, "compile_in_place", noted)
        ours = {"disable": False, "backend": "eager", "kwargs": {"dynamic": True, "mode": None}}
        for block, given, wanted in (
            (ours, {}, ("eager", {"dynamic": True, "mode": None})),
            (
                ours,
                {"backend": "aot_eager", "compile_kwargs": {"dynamic": False}},
                ("aot_eager", {"dynamic": False, "mode": None}),
            ),
            ({"disable": True, "backend": "eager"}, {}, None),
        ):
            config = {**stage3.config_of(1), "compile": block}
            engine = stage3.engine_of(stage3.make_net(), config)
            engine.compile(**given)
            assert calls == ([] if wanted is None else [wanted])
            assert engine.is_compiled is bool(calls)
            calls.clear()
            engine.destroy()

    def test_overlapping_and_eager(self) -> None:
        # Kills: compile() that is accepted and does nothing, or hooks that a compiled forward
        # loses. Comes first, as torch 2.6 never compiles what it has seen on the simulated device.
        compiled_parts: list[int] = []

        def backend(graph: Any, example: Any) -> Any:
            compiled_parts.append(len(example))
            return graph.forward

        torch._dynamo.reset()
        engine = overlap.make_engine(2)
        assert not engine.is_compiled
        engine.compile(backend=backend)
        assert engine.is_compiled
        overlap.train(engine)
        assert compiled_parts
        overlap.compare(engine)
        engine.destroy()
        # Kills: a compiled backward that gives its gradients at its end only, when no bucket can
        # leave any more, or gives them to nobody.
        none: dict[str, Any] = {}
        half = overlap.HALF
        with simulate():
            for stage, eager, compiled in (
                (0, (), (none, half)),
                (1, (none,), (half,)),
                (2, (half,), (none,)),
            ):
                for block in (*eager, *compiled):
                    torch._dynamo.reset()
                    engine = overlap.make_engine(stage, **block)
                    if block in compiled:
                        engine.compile(backend="aot_eager")
                    sent = overlap.Sent(engine)
                    early = sent.before_the_last_gradient()
                    assert early == overlap.BUCKETS - 1, (stage, block)
                    overlap.train(engine)
                    overlap.compare(engine, 5e-3 if block else 1e-6)
                    engine.destroy()
