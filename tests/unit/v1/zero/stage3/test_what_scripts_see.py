"""What scripts see of sharded weights and gradients: state dicts and `averaged_gradients`."""

import copy
import functools
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.zero import GatheredParameters
from unit.common import DistributedTest
from unit.one_process import OneProcess
from unit.v1.looping import each
from unit.v1.zero.stage3.models import (
    MIXED,
    SHARDED,
    config_of,
    engine_of,
    loss_of,
    make_net,
    started,
    tokens_of,
    train,
)
from unit.v1.zero.usage import Warnings


def told(do: Callable[[], Any], times: int = 2) -> list[str]:
    """What is told of saved weights while something is done, in a process that has not done it."""
    with Warnings() as warnings:
        for _ in range(times):
            do()
    return [text for text in warnings.texts if "saving parameters that are sharded" in text]


def file_of(content: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


def has_elements(state: dict[str, torch.Tensor]) -> dict[str, bool]:
    return {name: value.numel() > 0 for name, value in state.items()}


def on_host(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cpu().clone() for name, value in state.items()}


class TestStateDicts(DistributedTest):
    world_size = 2

    def test_without_weights(self, tmp_path: Path) -> None:
        # Kills: a file of shapes (0,) that nobody notices before it is loaded; one that cannot be
        # loaded in a process without this package, or with weights_only; a rank more that tells it.
        engine, model = started(**SHARDED)
        train(engine, 1)
        path = tmp_path / f"{dist.get_rank()}.safetensors"
        ways: dict[str, Callable[[], Any]] = {
            "torch.save": lambda: torch.save(model.state_dict(), io.BytesIO()),
            "pickle": lambda: pickle.dumps(model.state_dict()),
            "safetensors": lambda: save_file(model.state_dict(), path),
            "copies": lambda: file_of(on_host(copy.deepcopy(model.state_dict()))),
            "copies in safetensors": lambda: save_file(on_host(model.state_dict()), path),
            "of the engine": lambda: file_of(engine.state_dict()),
            "of a layer": lambda: file_of(model.blocks[0].state_dict()),
            "parameters": lambda: file_of(model.state_dict(keep_vars=True)),
            "the module": lambda: pickle.dumps(model.blocks[0]),
        }
        for name, save in ways.items():
            texts = told(save)
            assert len(texts) == int(dist.get_rank() == 0), name
            assert all("save_16bit_model" in text for text in texts)
        assert not any(value.numel() for value in load_file(path).values())
        loaded = torch.load(file_of(model.state_dict()), weights_only=True)
        assert {(type(value), value.shape) for value in loaded.values()} == {(torch.Tensor, (0,))}

    def test_otherwise_and_without_an_engine(self, tmp_path: Path) -> None:
        # Kills: a warning to who only asks for a state dict (Lightning, at every checkpoint), who
        # has the weights whole, or who saves in a way that has them all.
        model = make_net()
        config = config_of(3, **MIXED, stage3_gather_16bit_weights_on_model_save=True)
        engine = engine_of(model, config)
        wanted = make_net().state_dict()

        def gathered() -> None:
            with GatheredParameters(list(model.parameters())):
                state = model.state_dict()
                saved = torch.load(file_of(state), weights_only=True)
                save_file(on_host(state), tmp_path / f"{dist.get_rank()}.safetensors")
            assert all(map(torch.equal, saved.values(), wanted.values()))

        ways: dict[str, Callable[[], Any]] = {
            "asked": lambda: (model.state_dict(), engine.state_dict(), repr(model.state_dict())),
            "copied": lambda: on_host(copy.deepcopy(model.state_dict())),
            "compared": lambda: [value.norm().item() for value in model.state_dict().values()],
            "gathered": gathered,
            "the engine's": lambda: engine.save_checkpoint(str(tmp_path)),
            "16 bits": lambda: engine.save_16bit_model(str(tmp_path)),
            "consolidated": lambda: file_of(engine._zero3_consolidated_16bit_state_dict()),
            "optimizer": lambda: file_of(engine.optimizer.state_dict()),
        }
        for name, do in ways.items():
            assert told(do) == [], name
        engine.destroy()
        assert told(lambda: file_of(model.state_dict())) == []
        with deepspeed.zero.Init(config_dict_or_path=config_of(3)):
            model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        assert len(told(lambda: file_of(model.state_dict()))) == int(dist.get_rank() == 0)

    def test_has_no_elements_but_in_a_block(self) -> None:
        # Kills: small weights alone in the state dict of a model that was not trained; weights that
        # stay away from it afterwards; a forward or another model's training that shows them.
        one, other = make_net(), make_net()
        engine, idle = (engine_of(model, config_of(3, 1)) for model in (one, other))
        assert all(param.numel() for param in one.parameters())  # small, so they stay whole
        tokens = tokens_of(0, dist.get_rank())
        for model in (one, engine, other):
            assert not any(has_elements(model.state_dict()).values())
        loss = loss_of(engine, tokens)
        assert not any(has_elements(one.state_dict()).values())
        engine.backward(loss)
        before = copy.deepcopy(one.state_dict())
        engine.step()
        after = one.state_dict()
        assert all(has_elements(after).values())
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved == set(before) - {"unused", "frozen.weight", "frozen.bias"}
        assert not any(has_elements(other.state_dict()).values())
        loss_of(idle, tokens).backward()  # a plain one
        assert all(has_elements(other.state_dict()).values())
        for made in (engine, idle):
            made.destroy()
        # Kills: weights that are gathered and missing in what is saved in the block, or the
        # parameters themselves missing.
        engine, model = started(**MIXED)
        found = model.state_dict(keep_vars=True)
        assert all(found[name] is param for name, param in model.named_parameters())
        with GatheredParameters(model.embed.weight, modifier_rank=0):
            assert set(filter(has_elements(model.state_dict()).get, found)) == {
                "embed.weight",
                "head.weight",
            }
        with GatheredParameters(list(model.parameters())):
            wanted = make_net().state_dict()
            assert all(map(torch.equal, model.state_dict().values(), wanted.values()))
        assert not any(has_elements(model.state_dict()).values())
        engine.destroy()
        assert all(map(torch.equal, model.state_dict().values(), wanted.values()))

    def test_has_what_was_loaded_or_taken_over(self, tmp_path: Path) -> None:
        # Kills: a hook of an engine that has given its model to another one.
        model = make_net()
        engine_of(model, config_of(3, 1))
        engine = engine_of(model, config_of(3, 1))
        train(engine, 1, 1)
        assert all(has_elements(model.state_dict()).values())
        engine.save_checkpoint(str(tmp_path))
        wanted = on_host(model.state_dict())
        engine.destroy()
        model = make_net()
        evaluated = deepspeed.initialize(model=model, config=config_of(3, 1))[0]
        assert not any(has_elements(model.state_dict()).values())
        evaluated.load_checkpoint(str(tmp_path), load_module_only=True)
        assert all(map(torch.equal, model.state_dict().values(), wanted.values()))
        evaluated.destroy()
        # Kills: a copy of the model that takes the engine with it.
        engine, model = started(1)
        with GatheredParameters(list(model.parameters())):
            copied = copy.deepcopy(model)
        assert all(has_elements(copied.state_dict()).values())


@functools.cache
def reference_gradients(first: int, micro_batches: int) -> dict[str, torch.Tensor]:
    one = OneProcess(make_net(), 0.0, loss_of)
    numbers = range(first, first + micro_batches)
    one.backward(tokens_of(n, rank) for n in numbers for rank in range(dist.get_world_size()))
    return one.grads()


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 64.0}},
}
PLACES: dict[str, dict[str, Any]] = {
    "sharded": SHARDED,
    "persistent": {},
    "on the host": {**SHARDED, "offload_optimizer": {"device": "cpu"}},
    "in two places": {**SHARDED, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "overlapped": {**SHARDED, "overlap_comm": True, "reduce_bucket_size": 40},
}


class TestAveragedGradients(DistributedTest):
    world_size = 3

    @each(precision=PRECISIONS, place=PLACES)
    def test_are_cuts_of_one_process_and_read_only(self, precision: str, place: str) -> None:
        # Kills: another order than the groups', elements of a neighbour, gradients that are not
        # averaged over ranks or micro-batches or carry the loss scale, gradients of a window that
        # goes on or is over.
        if precision == "fp16" and place not in ("sharded", "on the host"):
            return  # the same code as in these
        model = make_net()
        engine = engine_of(model, {**config_of(3, **PLACES[place]), **PRECISIONS[precision]})
        optimizer, rank = engine.optimizer, dist.get_rank()
        names = {param: name for name, param in model.named_parameters()}
        engine.eval()
        assert optimizer.averaged_gradients == {}
        engine.train()
        for plain in (False, True) if precision == "fp32" else (False,):
            wanted = None if plain else reference_gradients(0, 2)
            for micro in range(2):
                loss = loss_of(engine, tokens_of(micro, rank))
                loss.backward() if plain else engine.backward(loss)
                if micro == 0:
                    assert optimizer.averaged_gradients == {}
                    engine.step()
            found = optimizer.averaged_gradients
            if wanted is not None:
                self.check(found, optimizer, names, wanted, precision)
            assert [len(cuts) for cuts in found.values()] == [
                len(group.params) for group in optimizer.groups
            ]
            # Kills: partitions that are numbered otherwise, or in another dtype.
            partitions = optimizer.get_fp32_grad_partitions()
            assert [list(of) for of in partitions.values()] == [
                list(range(len(params))) for params in optimizer.fp16_groups
            ]
            for number, cuts in found.items():
                own = partitions[number].values()
                assert all(torch.equal(*pair) for pair in zip(own, cuts, strict=True))
                assert {one.dtype for one in own} == {torch.float32}
            engine.step()
            assert optimizer.averaged_gradients == {}
            assert optimizer.get_fp32_grad_partitions() == {}
        with pytest.raises(AttributeError):
            optimizer.averaged_gradients = {}
        engine.destroy()

    def check(
        self,
        found: dict[int, list[torch.Tensor]],
        optimizer: Any,
        names: dict[nn.Parameter, str],
        wanted: dict[str, torch.Tensor],
        precision: str,
    ) -> None:
        assert list(found) == list(range(len(optimizer.groups)))
        pairs = [
            (param, cut)
            for group, cuts in zip(optimizer.bit16_groups, found.values(), strict=True)
            for param, cut in zip(group, cuts, strict=True)
        ]
        assert {names[param] for param, _ in pairs} == set(wanted)
        rtol, atol = (1e-5, 1e-6) if precision == "fp32" else (5e-3, 2e-3)
        for param, cut in pairs:
            whole = wanted[names[param]].flatten()
            assert cut.dtype == torch.float32 and cut.shape == param.ds_tensor.shape
            size = cut.numel()
            padded = nn.functional.pad(whole, (0, 3 * size - whole.numel()))
            own = padded[dist.get_rank() * size : (dist.get_rank() + 1) * size]
            torch.testing.assert_close(cut, own, rtol=rtol, atol=atol)

    @each(stage=[1, 2, 3])
    def test_has_no_method_that_upstreams_suite_replaces(self, stage: int) -> None:
        # Kills: `average_tensor` of other arguments, which a suite finds by `dir`, and replaces.
        engine = engine_of(make_net(), config_of(stage, 1))
        names = dir(engine.optimizer)
        assert "average_tensor" not in names and {"step", "groups", "zero_grad"} < set(names)
        assert callable(engine.optimizer.average_tensor)
        engine.destroy()
