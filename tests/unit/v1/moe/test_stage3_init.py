"""Experts made inside `zero.Init`: on the right ranks, with the weights of a plain model."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed import utils
from deepspeed.moe.layer import MoE
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.zero.parameters import own_draws
from deepspeed.runtime.zero.parameters.own_draws import fingerprint
from deepspeed.utils import groups
from unit.common import DistributedTest
from unit.models import config_of, drawn, sgd
from unit.one_process import train
from unit.v1.checkpoint.runs import differences
from unit.v1.checkpoint.runs import whole as whole_weight
from unit.v1.moe.runner import Case, CaseRun

WIDTH, EXPERTS = 6, 4
DATA_FIRST = "use_data_before_expert_parallelism"


class Expert(nn.Module):
    """Made of several modules, some of which it fills itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False)
        nn.init.normal_(self.down.weight, std=0.3)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale


class Block(nn.Module):
    def __init__(self, ep_size: int, residual: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = MoE(WIDTH, Expert(), EXPERTS, ep_size, drop_tokens=False, use_residual=residual)
        plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.other = MoE(WIDTH, plain, EXPERTS, ep_size, drop_tokens=False)
        # As models do that number their experts: each by what it is.
        for expert in self.other.deepspeed_moe.experts.deepspeed_experts:
            nn.init.normal_(expert[0].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.moe(self.norm(x))[0]
        return x + self.other(x)[0]


class Net(nn.Module):
    """Blocks with experts in a list, two of which are copies of one dense module."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        one = nn.Linear(WIDTH, WIDTH)
        self.copies = nn.ModuleList(copy.deepcopy(one) for _ in range(2))
        self.blocks = nn.ModuleList(Block(ep_size, bool(index)) for index in range(2))
        self.apply(self._fill)

    @staticmethod
    def _fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.uniform_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (self.first, *self.copies, *self.blocks):
            x = module(x)
        return x.float().pow(2).mean()


def config(**keys: Any) -> dict[str, Any]:
    zero = {"stage3_param_persistence_threshold": 8}
    return config_of(3, 4, **{"optimizer": sgd(0.1), "zero_optimization": zero, **keys})


def made(ep_size: int, settings: dict[str, Any], init: bool, seed: int) -> Any:
    """An engine; ranks draw the same with seeds below 10."""
    torch.manual_seed(seed if seed < 10 else seed + dist.get_rank())
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=init):
        model = Net(ep_size)
    if init:
        check_groups(model, ep_size, settings.get(DATA_FIRST, False))
    return deepspeed.initialize(model=model, config=settings)[0]


def check_groups(model: nn.Module, ep_size: int, data_first: bool) -> None:
    """Everything is cut, experts for the ranks that hold the same ones."""
    world, rank = dist.get_world_size(), dist.get_rank()
    owners = world // ep_size
    neighbours = range(rank // owners * owners, (rank // owners + 1) * owners)
    sharing = list(neighbours if data_first else range(rank % ep_size, world, ep_size))
    for name, param in model.named_parameters():
        ranks = dist.get_all_ranks_from_group(param.ds_process_group)
        assert ranks == (sharing if "deepspeed_experts" in name else list(range(world))), name


def two_steps(engine: Any) -> None:
    batches = [drawn(100 * step + dist.get_rank(), 8, WIDTH) for step in range(2)]
    train(engine, [x.to(next(engine.module.parameters()).dtype) for x in batches])


def weights(engine: Any) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


class TestInit(DistributedTest):
    """Kills: experts cut for all ranks, all of the first rank's weights, own ones of sharers."""

    world_size = 4
    exec_timeout = 120

    @pytest.mark.parametrize("order", ["turns", "data-first"])
    def test_as_built_plainly(self, order: str, tmpdir: Any) -> None:
        keys = {DATA_FIRST: order == "data-first"}
        bf16 = {"bf16": {"enabled": True}}
        cases: list[tuple[int, int, dict[str, Any]]] = [(2, 10, {}), (4, 20, bf16), (2, 3, {})]
        for ep_size, seed, more in cases if order == "turns" else cases[:1]:
            settings = config(**keys, **more)
            groups.reset()  # made by what is built first
            inside = made(ep_size, settings, True, seed)
            found = weights(inside)
            plain = made(ep_size, settings, False, seed)
            assert differences(weights(plain), found) == [], (ep_size, seed)
            # Made before.
            again = made(ep_size, settings, True, seed)
            assert differences(weights(plain), weights(again)) == [], (ep_size, seed)
            for engine in (inside, plain):
                two_steps(engine)
            trained = weights(plain)
            assert differences(trained, weights(inside)) == []
            inside.save_checkpoint(str(tmpdir), tag=f"{ep_size}-{seed}")
            again.load_checkpoint(str(tmpdir), tag=f"{ep_size}-{seed}")
            assert differences(trained, weights(again)) == []

    def test_refusals(self) -> None:
        torch.manual_seed(dist.get_rank())
        grouped = config()
        grouped["zero_optimization"]["mics_shard_size"] = 2
        with (
            pytest.raises(DeepSpeedConfigError, match="mics_shard_size.*experts"),
            deepspeed.zero.Init(config_dict_or_path=grouped),
        ):
            MoE(WIDTH, nn.Linear(WIDTH, WIDTH), EXPERTS, 2)
        # What was drawn before is let go when much comes after it.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(own_draws, "KEPT_NUMEL", WIDTH * WIDTH)
            with (
                pytest.raises(RuntimeError, match="right before the layer"),
                deepspeed.zero.Init(config_dict_or_path=config()),
            ):
                expert = nn.Linear(WIDTH, WIDTH)
                nn.Linear(WIDTH, WIDTH)
                MoE(WIDTH, expert, EXPERTS, 2)

    def test_equals_one_process(self) -> None:
        failures = []
        for case in (
            Case(2, 2, False, 3, "fp32", residual=True, zero_init=True),
            Case(4, 1, True, 3, "bf16", accumulation=2, zero_init=True),
            Case(2, 1, False, 3, "fp32", accumulation=2, offload=True, data_first=True),
        ):
            if case.data_first:
                groups.reset()
            failures += CaseRun(case).run()
        assert not failures, "\n".join(failures)


class TestAccess(DistributedTest):
    """Kills: an expert that is read, written or published over all ranks."""

    world_size = 4

    def test_over_their_own_ranks(self) -> None:
        optimizer = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
        engine = made(2, config(**optimizer), False, 10)
        rank = dist.get_rank()
        engine.backward(engine(drawn(rank, 8, WIDTH)))
        for param, kept in self.params(engine):
            grad = utils.safe_get_full_grad(param)
            assert grad is not None and grad.shape == param.ds_shape
            assert torch.equal(self.own(param, grad), utils.safe_get_local_grad(param))
            utils.safe_set_full_grad(param, 2 * grad)
            assert torch.equal(utils.safe_get_full_grad(param), 2 * grad)
            utils.safe_set_local_grad(param, torch.full_like(self.own(param, grad), float(rank)))
            assert torch.equal(utils.safe_get_full_grad(param), self.by_owner(param))
            assert torch.equal(whole_weight(param), kept)
        engine.step()
        for param, _ in self.params(engine):
            value = torch.arange(param.ds_numel).view(param.ds_shape) + 100.0 * (rank % 2)
            utils.safe_set_full_fp32_param(param, value)
            utils.safe_set_full_optimizer_state(param, value + 1, "exp_avg")
            assert torch.equal(whole_weight(param), value)
            assert torch.equal(utils.safe_get_full_fp32_param(param), value)
            assert torch.equal(utils.safe_get_full_optimizer_state(param, "exp_avg"), value + 1)
            assert torch.equal(self.own(param, value), utils.safe_get_local_fp32_param(param))
            utils.safe_set_local_fp32_param(
                param, torch.full_like(self.own(param, value), float(rank))
            )
            assert torch.equal(utils.safe_get_full_fp32_param(param), self.by_owner(param))

    def test_edits(self) -> None:
        engine = made(2, config(), False, 10)
        rank, module = dist.get_rank(), engine.module
        before = weights(engine)
        with deepspeed.zero.GatheredParameters(module.parameters(), modifier_rank=0):
            if rank == 0:
                for param in module.parameters():
                    param.data.fill_(7.0)
        for name, value in weights(engine).items():
            changed = rank % 2 == 0 or "deepspeed_experts" not in name
            assert torch.equal(value, torch.full_like(value, 7.0) if changed else before[name])
        own = [param for param, _ in self.params(engine)]
        with deepspeed.zero.GatheredParameters(own, modifier_rank=rank % 2):
            if rank < 2:
                for param in own:
                    param.data.fill_(10.0 + rank)
        for param in own:
            assert (whole_weight(param) == 10.0 + rank % 2).all()
            assert (utils.safe_get_full_fp32_param(param) == 10.0 + rank % 2).all()

        def edit() -> None:
            with deepspeed.zero.GatheredParameters(own, modifier_rank=0):
                own[0].data.fill_(float(rank))

        if rank % 2:
            with pytest.raises(RuntimeError, match="of experts one that holds them"):
                edit()
        else:
            edit()
            assert (whole_weight(own[0]) == 0.0).all()

    @staticmethod
    def params(engine: Any) -> list[tuple[Any, torch.Tensor]]:
        """This rank's experts, and what they are."""
        return [
            (param, whole_weight(param))
            for name, param in engine.module.named_parameters()
            if "deepspeed_experts" in name
        ]

    @staticmethod
    def own(param: Any, value: torch.Tensor) -> torch.Tensor:
        """This rank's elements: ranks 0 and 2, and 1 and 3, share experts."""
        cut = -(-value.numel() // 2)
        return value.reshape(-1)[dist.get_rank() // 2 * cut :][:cut]

    @staticmethod
    def by_owner(param: Any) -> torch.Tensor:
        """The rank that owns each element."""
        cut = -(-param.ds_numel // 2)
        ranks = dist.get_rank() % 2 + 2.0 * (torch.arange(param.ds_numel) >= cut)
        return ranks.view(param.ds_shape)


def test_fingerprints_tell_values_and_places_apart() -> None:
    values = torch.randn(3, 1001)
    seen = {int(fingerprint([values]))}
    for place in ((0, 0), (1, 500), (2, 1000)):
        other = values.clone()
        other[place] = -other[place]
        seen.add(int(fingerprint([other])))
    seen |= {int(fingerprint([values.flip(dim)])) for dim in (0, 1)}
    seen |= {int(fingerprint(values.unbind())), int(fingerprint([values.bfloat16()]))}
    assert len(seen) == 8
    assert fingerprint([values.clone()]) == fingerprint([values])
