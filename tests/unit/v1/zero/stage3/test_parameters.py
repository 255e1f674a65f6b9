"""`zero.Init`, `GatheredParameters` and the interface of a sharded parameter."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import skip_init

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.zero import GatheredParameters, Init, ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from unit.common import DistributedTest
from unit.v1.gathering import collectives
from unit.v1.looping import each
from unit.v1.zero.stage3.models import (
    MIXED,
    SHARDED,
    Net,
    config_of,
    end_as_one_process,
    engine_of,
    make_net,
    started,
    tokens_of,
    train,
)
from unit.v1.zero.usage import Warnings


class Skipping(nn.Module):
    """A layer without initialization between layers with one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.skipped = skip_init(nn.Linear, 7, 3)
        nn.init.constant_(self.skipped.bias, 0.5)
        self.last = nn.Linear(3, 2)


class Composite(nn.Module):
    """A constructor that goes over its children in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(depth=3)
        self.experts = nn.Parameter(torch.empty(3, 4, 5))
        self.net.blocks[1].up.weight.data.normal_(0.0, 0.02)
        with torch.no_grad():
            self.net.blocks[2].down.bias.fill_(0.25)
        for name, param in self.net.blocks[2].named_parameters():
            if name.endswith("up.weight") and param.dim() == 2:
                nn.init.orthogonal_(param)
        self.register_buffer("total", self.net.embed.weight.detach().sum())
        self.apply(self._init_weights)
        nn.init.uniform_(self.experts)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_()
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            module.bias.data.uniform_()


def built(**kwargs: Any) -> Composite:
    torch.manual_seed(5 + dist.get_rank())  # rank 0's values count
    with Init(**kwargs):
        return Composite()


def plain() -> Composite:
    torch.manual_seed(5)
    return Composite()


class TestInit(DistributedTest):
    world_size = [1, 3]

    def test_same_weights_as_without_and_same_training(self) -> None:
        # Kills: an initialization that a constructor writes to a placeholder, a value of each
        # rank's own, rounding before the random numbers are drawn.
        expected = dict(plain().named_parameters())
        for kwargs in (
            {},
            {"dtype": torch.bfloat16},
            {"config_dict_or_path": {"bf16": {"enabled": True}, "train_batch_size": "auto"}},
        ):
            model = built(**kwargs)
            assert all(param.numel() == 0 for param in model.parameters())
            dtype = torch.bfloat16 if kwargs else torch.float32
            with GatheredParameters(model.parameters()):
                for name, param in model.named_parameters():
                    assert torch.equal(param, expected[name].to(dtype)), name
        assert torch.equal(built().total, plain().total) or dist.get_rank() > 0
        # Kills: shards of another order, tied weights that are cut twice.
        with Init():
            net = make_net()
        engine = engine_of(net, config_of(3, **SHARDED))
        train(engine)
        end_as_one_process(engine)

    def test_forms_collectives_and_skip_init(self) -> None:
        # Kills: constructors that stay patched, a block that is off and cuts.
        with Init(enabled=False):
            assert nn.Linear(2, 2).weight.numel() == 4
        with Init(), Init(remote_device="cpu"):
            inner = nn.Linear(3, 3)
        assert inner.weight.shape == (0,)
        assert nn.Linear(2, 2).weight.numel() == 4
        whole = nn.Linear(5, 4)
        Init(module=whole)
        assert whole.weight.ds_shape == (4, 5)
        assert whole.weight.partition_numel() == -(-20 // dist.get_world_size())
        for name in ("param_swapper", "zero_quantized_weights", "zero_param_parallel_group"):
            with pytest.raises(deepspeed.DeepSpeedConfigError, match=name):
                Init(**{name: object()})

        # Kills: ranks that agree, or exchange values, for each parameter, for each base class's
        # constructor or again for each module above.
        class Many(nn.Module):
            def __init__(self, numel: int) -> None:
                super().__init__()
                for index in range(numel):
                    self.register_parameter(f"p{index}", nn.Parameter(torch.ones(index + 1)))

        class More(Many):
            def __init__(self) -> None:
                super().__init__(20)
                self.below = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Sequential(Many(2)))

        with collectives() as issued, Init():
            model = More()
        owners = [module for module in model.modules() if module._parameters]
        assert len(owners) == 3
        if dist.get_world_size() > 1:
            assert issued.count("all_reduce") == len(owners)
            assert len(issued) == 2 * len(owners), issued
        # Kills: a module on the meta device that has no value to be cut, other random numbers for
        # the layers beside it, memory that ranks do not agree about, a patch that stays.
        torch.manual_seed(5)
        wanted = dict(Skipping().named_parameters())
        wanted["skipped.weight"].data.fill_(0.25)
        torch.manual_seed(5 + dist.get_rank())
        with Init():
            model = Skipping()
        assert [tuple(param.ds_shape) for param in model.parameters()] == [
            tuple(param.shape) for param in wanted.values()
        ]
        assert all(param.numel() == 0 for param in model.parameters())
        with GatheredParameters(model.skipped.weight, modifier_rank=0):
            assert model.skipped.weight.shape == (3, 7)
            model.skipped.weight.data.copy_(wanted["skipped.weight"])
        with GatheredParameters(model.parameters()):
            for name, param in model.named_parameters():
                assert torch.equal(param, wanted[name]), name
        assert skip_init(nn.Linear, 2, 2).weight.numel() == 4
        with Init():
            left = nn.Linear(2, 2, device="meta")
        with pytest.raises(ValueError, match=r"meta device .*zero\.Init"):
            engine_of(left, config_of(3))


def edits_lost(turns: int) -> int:
    """Let two ranks in turn write 16 parameters; count writes that the next block does not see."""
    with Init():
        params = [nn.Linear(4, 5).weight for _ in range(16)]
    lost = 0
    for turn in range(turns + 1):
        writer = turn % 2
        with GatheredParameters(params, modifier_rank=writer):
            for number, param in enumerate(params):
                if turn:
                    lost += bool((param.data != 16 * turn - 16 + number).any())
                if dist.get_rank() == writer:
                    param.data.fill_(float(16 * turn + number))
    return lost


class TestDisagreement(DistributedTest):
    world_size = [2, 3]

    def test_on_all_ranks(self) -> None:
        # Kills: a rank without parameters that goes by while the others wait for ever, shards of
        # two parameters put together, a message that does not say who has what.
        model, rank = built(), dist.get_rank()
        first = model.net.blocks[0].up.weight
        params = [*model.net.parameters()]
        entered: tuple[Any, ...] = (
            model.net.blocks[rank % 2].up.weight,
            [] if rank == 1 else first,
            [] if rank == 0 else [first],
            (param for param in params[: 3 + rank]),
        )
        for given in entered:
            with pytest.raises(RuntimeError, match=r"different parameters; rank 0: .*; rank 1: "):
                with GatheredParameters(given):
                    raise AssertionError("the block ran")
            assert all(param.numel() == 0 for param in params)
        with GatheredParameters([]), GatheredParameters(first):
            assert first.numel()
        # Kills: one rank that waits for others in a block that has nothing to do with stage 3.
        if dist.get_rank() == 0:
            with GatheredParameters([torch.ones(1)]), GatheredParameters([], enabled=False):
                pass
        for param in [*model.parameters()]:
            with GatheredParameters(param):
                pass


class TestInterface(DistributedTest):
    world_size = 2

    def test_leaves_that_are_not_there_are_told(self) -> None:
        leaves = {"classes": ["Nope"], "names": ["embed"], "name_suffixes": ["nope", "embed"]}
        with Warnings() as said:
            started(**SHARDED, leaf_module=leaves)
        told = [text.partition("leaf_module.")[2] for text in said.about("leaf_module")]
        wanted = [f"{key}: the model has no module of" for key in ("classes", "name_suffixes")]
        assert [text[: text.index(" [")] for text in told] == wanted * (dist.get_rank() == 0)

    def test_a_sharded_parameter_and_gathering(self) -> None:
        # Kills: a loss over placeholders that is silently zero, an initialization that is lost.
        model = built()
        param: Any = model.experts
        assert (param.ds_shape, param.ds_numel, param.shape) == ((3, 4, 5), 60, (0,))
        assert param.ds_status is ZeroParamStatus.NOT_AVAILABLE
        assert param.ds_tensor.shape == (30,)
        assert param.requires_grad and param.grad is None and isinstance(param, nn.Parameter)
        for action in (
            lambda: param.square().sum(),
            lambda: nn.init.ones_(param),
            lambda: nn.init.normal_(param),  # it goes on with keywords
            lambda: param + 1,
            lambda: param.data.fill_(1.0),
            lambda: param.detach().mul_(2),
            lambda: param.data.__iadd__(1),
            lambda: param.data.__setitem__(slice(None), 1.0),
            lambda: nn.init.normal_(param.data),
            lambda: setattr(param, "data", torch.ones(3, 4, 5)),
        ):
            with pytest.raises(RuntimeError, match=r"\(3, 4, 5\) is sharded"):
                action()
        param.all_gather()
        assert param.shape == (3, 4, 5) and param.ds_status is ZeroParamStatus.AVAILABLE
        param.data += 1
        param.partition(has_been_updated=True)
        assert param.shape == (0,)
        with GatheredParameters(param):
            assert param.min() >= 1
            copied = copy.deepcopy(model.net.embed) if model.net.embed.weight.numel() else None
        assert copied is None
        with GatheredParameters(model.net.embed.parameters()):
            copied = copy.deepcopy(model.net.embed)
            again = pickle.loads(pickle.dumps(copied))
        assert type(again.weight) is nn.Parameter and type(again._parameters) is dict
        # Kills: duplicates and nesting that free what somebody still reads.
        engine, model = started(**SHARDED)
        weight = model.embed.weight
        with GatheredParameters([weight, weight, torch.ones(2), nn.Parameter(torch.ones(1))]):
            with GatheredParameters(p for p in model.parameters()):
                with torch.no_grad():
                    engine(tokens_of(0, 0))
                assert model.blocks[0].up.weight.numel()
            assert weight.numel() and not model.blocks[0].up.weight.numel()
        assert not weight.numel()
        with GatheredParameters([]), GatheredParameters(weight, enabled=False):
            assert not weight.numel()
        train(engine)
        end_as_one_process(engine)

    def test_conversions_of_modules_and_another_engine(self) -> None:
        # Kills: `model.to()` and `model.cpu()`, which Lightning calls after each fit, that raise; a
        # dtype that shards do not take on, or that an engine's take on behind its back.
        model = built()
        with GatheredParameters(model.parameters()):
            wanted = [param.detach().clone() for param in model.parameters()]
        objects = list(model.parameters())
        model.cpu().double().to("cpu")
        assert {param.ds_tensor.dtype for param in objects} == {torch.float64}
        assert {param.dtype for param in objects} == {torch.float64}
        model.float()
        assert list(model.parameters()) == objects and not objects[0].numel()
        with GatheredParameters(objects):
            assert all(map(torch.equal, objects, wanted))
        engine = engine_of(model.net, config_of(3, **SHARDED))
        engine.to("cpu")
        engine.module.float()
        with pytest.raises(RuntimeError, match=r"embed\.weight cannot become torch.bfloat16"):
            engine.module.bfloat16()
        train(engine, 1)
        # Kills: a second engine that is refused (Lightning fits and tests one model), hooks or
        # masters of the first one that go on, a first one that can still step, save or be undone;
        # a parameter that stayed whole with one and is in no unit of the next.
        model = make_net()
        first = engine_of(model, config_of(3, **SHARDED))
        train(first, 1)
        asked = deepspeed.initialize(model=model, config=config_of(3))[0]
        assert model.embed.weight.numel()
        with torch.no_grad():
            asked(tokens_of(0, 0))
        second = engine_of(model, config_of(3, **SHARDED))
        for action in (
            lambda: first.backward(torch.ones(())),
            lambda: first.step(),
            lambda: first.save_checkpoint("nowhere"),
            lambda: asked.save_checkpoint("nowhere"),
        ):
            with pytest.raises(RuntimeError, match="another engine has this model"):
                action()
        train(second, 1, first=1)
        first.destroy()
        asked.destroy()
        assert not model.embed.weight.numel()
        end_as_one_process(second)

    def test_edits_and_a_step_while_somebody_reads(self) -> None:
        # Kills: an edit that masters do not see, or that a unit gathered ahead does not have.
        model = make_net()
        zero = {"stage3_param_persistence_threshold": 10, "stage3_unit_fusion_size": 0}
        engine = engine_of(model, {**config_of(3, 1, **zero), "bf16": {"enabled": True}})
        train(engine, 1, accumulation=1)
        chosen = [model.blocks[0].up.weight, model.blocks[0].up.bias, model.frozen.weight]
        with GatheredParameters(chosen, modifier_rank=1):
            for param in chosen:
                param.data.fill_(7.0 if dist.get_rank() == 1 else 3.0)
        for param in chosen[:2]:
            assert safe_get_full_fp32_param(param).unique().tolist() == [7.0]
        with GatheredParameters(chosen):
            assert all(param.unique().tolist() == [7.0] for param in chosen)
        safe_set_full_fp32_param(chosen[0], torch.full(chosen[0].ds_shape, 0.5))
        with GatheredParameters(chosen[0]):
            assert chosen[0].unique().tolist() == [0.5]
        for edit in (lambda: chosen[0].data.fill_(9.0), lambda: nn.init.zeros_(chosen[0])):
            with pytest.raises(RuntimeError, match=r"up\.weight changed inside the block"):
                with GatheredParameters(chosen):
                    edit()
        engine.destroy()
        # Kills: values of before the step that a forward inside the block goes on with.
        engine, model = started(1, **zero)
        with GatheredParameters(model.blocks[1].up.weight):
            with pytest.raises(RuntimeError, match=r"blocks\.1 are whole .* before step\(\)"):
                train(engine, 1, accumulation=1)

    def test_no_edit_is_lost(self) -> None:
        # Kills: memory that is let go before the broadcast has arrived.
        assert edits_lost(100) == 0

    @pytest.mark.contract
    def test_no_edit_of_16_000_is_lost(self) -> None:
        assert edits_lost(1000) == 0

    @each(block=({}, {"bf16": {"enabled": True}}))
    def test_other_memory_is_followed(self, block: dict[str, Any]) -> None:
        # Kills: a forward, a gather, a master or a next update that has the old values; padding
        # that is written; ranks that have to do the same.
        ends = []
        for by_shard in (True, False):
            model = make_net()
            engine = engine_of(model, {**config_of(3, 1, **SHARDED), **block})
            train(engine, 1, accumulation=1)
            chosen: list[Any] = [model.blocks[1].up.weight, model.frozen.bias, model.unused]
            if by_shard and dist.get_rank() == 1:
                for param in chosen:
                    shard = param.ds_tensor
                    shard.data = torch.full_like(shard, 0.25)
                    assert shard.data_ptr() == param.ds_tensor.data_ptr()
                chosen[1].ds_tensor.set_(torch.full_like(chosen[1].ds_tensor, 0.5))
            elif by_shard and block:  # a block rounds the masters of what it writes
                for param in chosen:
                    param.ds_tensor.data = param.ds_tensor.clone()
            elif not by_shard:
                with GatheredParameters(chosen, modifier_rank=0):
                    for param, value in zip(chosen, (0.25, 0.5, 0.25), strict=True):
                        param.data.view(-1)[-(-param.numel() // 2) :] = value
            losses = [engine(tokens_of(9, 0)).sum().item()]
            with GatheredParameters(chosen):
                values = [param.clone() for param in chosen]
            if dist.get_rank() == 1:
                assert all(param.ds_tensor[param.ds_numel // 2].item() == 0 for param in chosen)
            train(engine, 2, accumulation=1)
            engine.destroy()
            ends.append([torch.tensor(losses), *values, *model.parameters()])
        assert all(map(torch.equal, *ends))

    def test_what_cannot_be_followed_and_is_a_tensor_as_others(self) -> None:
        # Kills: a parameter that somebody keeps the old value of, without a word.
        engine, model = started(1, **MIXED)
        weight: Any = model.blocks[1].up.weight
        with pytest.raises(ValueError, match=r"up\.weight\.ds_tensor.*\(3,\) .* \(28,\)"):
            weight.ds_tensor.data = torch.ones(3)
        for param in (weight, model.blocks[1].up.bias):
            with GatheredParameters(weight):
                with pytest.raises(RuntimeError, match=r"ds_tensor.* is whole"):
                    param.ds_tensor.data = torch.zeros_like(param.ds_tensor)
        engine.offload_states()
        with pytest.raises(RuntimeError, match=r"ds_tensor.* reload_states\(\) first"):
            weight.ds_tensor.data = torch.zeros_like(weight.ds_tensor)
        engine.reload_states()
        engine.destroy()
        # Kills: a file that only this package can read, results that hear of being changed.
        shard = built().net.embed.weight.ds_tensor
        for other in (shard.data, shard + 1, shard[:2], shard.clone(), copy.deepcopy(shard)):
            assert type(other) is torch.Tensor
        again = pickle.loads(pickle.dumps(shard))
        assert type(again) is torch.Tensor and torch.equal(again, shard)
        shard.data.fill_(2.0)
        assert shard.eq(2.0).all() and type(shard.fill_(3.0)) is type(shard)
