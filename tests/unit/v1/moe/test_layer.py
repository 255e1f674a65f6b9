"""The MoE layer alone: names, ranks of experts, tokens that no expert sees, optimizer groups."""

import copy

import pytest
import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.comm import rank_lists
from deepspeed.moe.layer import MoE
from deepspeed.moe.mappings import drop_tokens, gather_tokens
from deepspeed.moe.utils import (
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
    is_moe_param_group,
    named_moe_layers,
    split_params_grads_into_shared_and_expert_params,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)
from deepspeed.utils import groups
from unit.common import DistributedTest
from unit.models import drawn
from unit.v1.looping import each
from unit.v1.moe.slow_gate import Gate, Tensors, moe_forward
from unit.v1.tensor.megatron import Mpu, copied, reduced, summed

EXPERTS = "deepspeed_moe.experts.deepspeed_experts"


def test_checkpoint_names_are_upstreams() -> None:
    layer = MoE(4, nn.Linear(4, 4), num_experts=2, use_residual=True)
    expected = ["deepspeed_moe.gate.wg.weight"]
    expected += [f"{EXPERTS}.{index}.{name}" for index in (0, 1) for name in ("weight", "bias")]
    expected += ["mlp.weight", "mlp.bias", "coefficient.weight", "coefficient.bias"]
    assert list(layer.state_dict()) == expected
    for name, param in layer.named_parameters():
        is_of_expert = name.startswith(EXPERTS)
        assert is_moe_param(param) == is_of_expert
        assert getattr(param, "group_name", None) == ("ep_size_1" if is_of_expert else None)


def test_wrong_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="num_experts=3 must be a multiple of ep_size=2"):
        MoE(4, nn.Linear(4, 4), num_experts=3, ep_size=2)
    with pytest.raises(NotImplementedError, match="use_tutel=True"):
        MoE(4, nn.Linear(4, 4), use_tutel=True)
    with pytest.raises(RuntimeError, match="deepspeed.initialize"):
        MoE(4, nn.Linear(4, 4))(torch.zeros(2, 4))


class TestOptimizerGroups:
    def layer(self) -> MoE:
        return MoE(4, nn.Linear(4, 4), num_experts=3, use_residual=True)

    def test_split_keeps_everything_once(self) -> None:
        layer = self.layer()
        params = list(layer.parameters())
        shared, experts = split_params_into_shared_and_expert_params(params)
        assert len(shared) == 5 and len(experts) == 6 and {*shared, *experts} == set(params)
        given = [{"params": params[:4], "name": "a", "lr": 0.1}, {"params": params[4:], "lr": 0.2}]
        made = split_params_into_different_moe_groups_for_optimizer(given)
        facts = [(g.get("name"), g["lr"], is_moe_param_group(g), len(g["params"])) for g in made]
        dense = [("a", 0.1, False, 1), (None, 0.2, False, 4)]
        assert facts == [*dense, ("ep_size_1", 0.1, True, 3), ("ep_size_1", 0.2, True, 3)]
        assert sorted(id(p) for g in made for p in g["params"]) == sorted(map(id, params))
        # Kills: taking apart again what was split already, which would leave empty groups behind.
        assert split_params_into_different_moe_groups_for_optimizer(made) == made
        assert len(given[0]["params"]) == 4

    def test_size_limit(self) -> None:
        given = {"params": list(self.layer().parameters())}
        made = split_params_into_different_moe_groups_for_optimizer(given, max_group_size=24)
        experts = [group["params"] for group in made if is_moe_param_group(group)]
        assert [sum(p.numel() for p in params) for params in experts] == [20, 20, 20]
        # A parameter larger than the limit has a group of its own.
        made = split_params_into_different_moe_groups_for_optimizer(given, max_group_size=1)
        assert [len(group["params"]) for group in made] == [5, 1, 1, 1, 1, 1, 1]

    def test_configure(self) -> None:
        made = configure_moe_param_groups(self.layer().parameters())
        assert [group["name"] for group in made] == ["dense-params", "ep_size_1"]
        assert configure_moe_param_groups(made) == made

    def test_gradients_and_layers(self) -> None:
        layer = self.layer()
        layer.mlp.weight.grad = torch.ones(4, 4)
        layer.deepspeed_moe.experts.deepspeed_experts[1].bias.grad = torch.ones(4)
        shared, expert = split_params_grads_into_shared_and_expert_params(layer.parameters())
        assert [g.shape for g in shared] == [(4, 4)] and [g.shape for g in expert] == [(4,)]
        model = nn.Sequential(nn.Linear(4, 4), layer, MoE(4, nn.Linear(4, 4), num_experts=5))
        assert has_moe_layers(model) == (True, 3) and has_moe_layers(nn.Linear(2, 2)) == (False, 0)
        assert [name for name, _ in named_moe_layers(model)] == ["1", "2"]


class WithBias(nn.Module):
    """Returns its bias apart, as Megatron's layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.eye(4) * 2), nn.Parameter(torch.ones(4))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tokens @ self.weight, self.bias


class TestOneRank(DistributedTest):
    world_size = 1

    def test_unused_tokens_and_counts(self) -> None:
        layer = MoE(4, nn.Linear(4, 4), num_experts=2, k=2, drop_tokens=False)
        layer.set_deepspeed_parallelism()
        x = torch.randn(2, 3, 4)
        used = torch.tensor([[1, 0, 1], [0, 1, 1]])
        output, _, counts = layer(x, used)
        assert output.shape == x.shape and counts.tolist() == [4, 4]
        # With two equal experts and normalized weights the layer is the expert.
        expected = layer.deepspeed_moe.experts.deepspeed_experts[0](x) * used.unsqueeze(-1)
        torch.testing.assert_close(output, expected)
        nothing, l_aux, counts = layer(x, torch.zeros(2, 3))
        assert not nothing.any() and l_aux == 0 and counts.tolist() == [0, 0]

    def test_outputs_with_a_bias_apart(self) -> None:
        layer = MoE(4, WithBias(), num_experts=2, k=2, drop_tokens=False, use_residual=True)
        layer.set_deepspeed_parallelism()
        x = torch.randn(5, 4)
        torch.testing.assert_close(layer(x)[0], 2 * x + 1)

    def test_models_can_be_copied_after_a_forward(self) -> None:
        # Kills: a loss with its graph kept on the module.
        layer = MoE(4, nn.Linear(4, 4), num_experts=2)
        layer.set_deepspeed_parallelism()
        output, l_aux, _ = layer(torch.randn(8, 4))
        assert l_aux.requires_grad and not layer.deepspeed_moe.l_aux.requires_grad
        # Process groups can't be copied.
        del layer.deepspeed_moe.ep_group, layer.deepspeed_moe.gate.ep_group
        copy.deepcopy(layer)


class Expert(nn.Module):
    """A linear layer of output columns and one of input rows, split over `size` ranks."""

    def __init__(self, width: int, rank: int, size: int) -> None:
        super().__init__()
        first, second = drawn(11, 2, width, width)
        self.size = size
        self.first = nn.Parameter(first.chunk(size, dim=0)[rank].clone())
        self.second = nn.Parameter(second.chunk(size, dim=1)[rank].clone())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return two_layers(tokens, self.first, self.second)
        group = groups.get_tensor_model_parallel_group()
        part = two_layers(copied(tokens, group), self.first, self.second)
        return reduced(part, group)


def two_layers(tokens: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.tanh(tokens @ first.t()) @ second.t()


def named_layers(tokens: torch.Tensor, params: Tensors, name: str) -> torch.Tensor:
    return two_layers(tokens, params[f"{name}.first"], params[f"{name}.second"])


class TestTensorParallel(DistributedTest):
    world_size = 4
    width = 6

    def test_drop_and_gather_are_each_others_gradient(self) -> None:
        groups.initialize(mpu=Mpu(2))
        rank = dist.get_rank() % 2
        x = torch.arange(24.0).view(4, 6).requires_grad_()
        part = drop_tokens(x, dim=1)
        assert torch.equal(part, x[:, 3 * rank : 3 * rank + 3])
        whole = gather_tokens(part * (rank + 1), dim=1)
        assert torch.equal(whole, torch.cat([x[:, :3], 2 * x[:, 3:]], dim=1))
        factors = drawn(0, 4, 6)
        (whole * factors).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.cat([factors[:, :3], 2 * factors[:, 3:]], dim=1))
        with pytest.raises(ValueError, match="5 tokens along dim 0"):
            drop_tokens(torch.zeros(5, 2))

    @each(drop=[True, False], spread=[(False, 2), (False, 4), (False, 1), (True, 2), (True, 1)])
    def test_equals_one_process(self, spread: tuple[bool, int], drop: bool) -> None:
        # Kills: experts' gradients of one tensor rank's tokens only, gradients counted once per
        # tensor rank, capacities that tensor ranks in different expert groups do not share, tokens
        # sent twice.
        groups.reset()
        (sharded, ep_size), mpu = spread, Mpu(2)
        groups.initialize(mpu=mpu)
        data_rank = mpu.data_rank
        width, num_experts = self.width, 4
        torch.manual_seed(3)
        gate_weight = torch.randn(num_experts, width)
        scales = torch.linspace(0.5, 2.0, num_experts)
        size = 2 if sharded else 1
        expert = Expert(width, dist.get_rank() % size, size)
        how = {"k": 2, "min_capacity": 1, "drop_tokens": drop, "top2_2nd_expert_sampling": False}
        how |= {"enable_expert_tensor_parallelism": sharded}
        layer = MoE(width, expert, num_experts, ep_size, **how)
        layer.set_deepspeed_parallelism()
        experts = layer.deepspeed_moe.experts.deepspeed_experts
        with torch.no_grad():
            layer.deepspeed_moe.gate.wg.weight.copy_(gate_weight)
            for index, local in zip(layer.global_expert_ids, experts, strict=True):
                local.first.mul_(scales[index])
        # Data ranks' gates are differently one-sided, so that their own capacities would differ.
        inputs = [drawn(rank, 9, width) + rank for rank in range(2)]
        factors = [drawn(50 + rank, 9, width) for rank in range(2)]
        x = inputs[data_rank].clone().requires_grad_()
        output, l_aux, _ = layer(x)
        ((output * factors[data_rank]).sum() + l_aux).backward()

        first, second = drawn(11, 2, width, width)
        whole = {"wg": gate_weight.clone().requires_grad_()}
        for e in range(num_experts):
            whole[f"experts.{e}.first"] = (first * scales[e]).requires_grad_()
            whole[f"experts.{e}.second"] = second.clone().requires_grad_()
        own = inputs[data_rank].clone().requires_grad_()
        for rank in range(2):
            tokens, gate = own if rank == data_rank else inputs[rank], Gate(2, 1.0, 1, drop)
            expected, loss = moe_forward(tokens, whole, gate, num_experts, named_layers)
            ((expected * factors[rank]).sum() + loss).backward()
            if rank == data_rank:
                torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(l_aux, loss)
        torch.testing.assert_close(x.grad, own.grad, atol=1e-5, rtol=1e-5)
        gate_grad = layer.deepspeed_moe.gate.wg.weight.grad
        gate_grad = summed(gate_grad, groups._get_data_parallel_group())
        torch.testing.assert_close(gate_grad, whole["wg"].grad, atol=1e-4, rtol=1e-5)
        replicas = groups._get_expert_data_parallel_group(layer.expert_group_name)
        for index, local in zip(layer.global_expert_ids, experts, strict=True):
            for name, param in local.named_parameters():
                grad = summed(param.grad, replicas)
                reference = whole[f"experts.{index}.{name}"].grad
                if sharded:
                    reference = reference.chunk(2, dim=0 if name == "first" else 1)[mpu.rank]
                torch.testing.assert_close(grad, reference, atol=1e-4, rtol=1e-5)


FOUR = [(0, 1, 2, 3)]
TWO_BY_FOUR = [(0, 2, 4, 6), (1, 3, 5, 7)]  # two tensor ranks with four data ranks each
NEIGHBOURS = [[0, 2], [4, 6], [1, 3], [5, 7]]
APART = [[0, 4], [2, 6], [1, 5], [3, 7]]

Lists = list[list[int]]


@pytest.mark.parametrize(
    "blocks, ep_size, data_first, expert, data",
    [
        (FOUR, 2, False, [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        (FOUR, 2, True, [[0, 2], [1, 3]], [[0, 1], [2, 3]]),
        (FOUR, 4, False, [[0, 1, 2, 3]], [[0], [1], [2], [3]]),
        (FOUR, 1, False, [[0], [1], [2], [3]], [[0, 1, 2, 3]]),
        (TWO_BY_FOUR, 2, False, NEIGHBOURS, APART),
        (TWO_BY_FOUR, 2, True, APART, NEIGHBOURS),
    ],
)
def test_rank_lists(
    blocks: list[tuple[int, ...]], ep_size: int, data_first: bool, expert: Lists, data: Lists
) -> None:
    # Kills: swapped orders, strides over the world instead of over the block. The lists are
    # upstream's.
    assert rank_lists.expert_groups(blocks, ep_size, data_first) == (expert, data)


@pytest.mark.parametrize("ep_size", [0, -1, 3])
def test_sizes_that_do_not_divide_are_refused(ep_size: int) -> None:
    with pytest.raises(ValueError, match=f"ep_size={ep_size} does not divide the 4 ranks"):
        rank_lists.expert_groups([(0, 1, 2, 3)], ep_size, False)


class TestExpertGroups(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize("ep_size", [1, 2, 4])
    def test_cover_the_data_ranks(self, ep_size: int) -> None:
        name = f"ep_size_{ep_size}"
        with pytest.raises(KeyError, match=f"no expert groups '{name}'"):
            groups._get_expert_parallel_group(name)
        groups.initialize(ep_size=ep_size)
        groups._create_expert_and_data_parallel(ep_size)
        rank = dist.get_rank()
        first = rank // ep_size * ep_size
        ranks = list(range(first, first + ep_size))
        assert groups._get_expert_parallel_group_ranks(name) == ranks
        holders = list(range(rank % ep_size, 4, ep_size))
        assert groups._get_expert_data_parallel_group_ranks(name) == holders
        assert groups._get_expert_parallel_world_size(name) == ep_size
        assert groups._get_expert_data_parallel_world_size(name) == 4 // ep_size
        assert groups._get_expert_parallel_rank(name) == rank % ep_size
        assert groups._get_expert_data_parallel_rank(name) == rank // ep_size
        assert groups._get_expert_parallel_src_rank(name) == first
        assert groups._get_expert_broadcast_src_rank(name) == rank % ep_size
        assert groups._get_max_expert_size() == ep_size
        assert groups._get_max_expert_size_name() == name
        largest = groups._get_max_expert_parallel_group()
        assert largest is groups._get_expert_parallel_group_dict()[name]

    def test_are_made_once_and_under_one_setting(self) -> None:
        groups._create_expert_and_data_parallel(2)
        first = groups._get_expert_parallel_group("ep_size_2")
        groups._create_expert_and_data_parallel(2)
        assert groups._get_expert_parallel_group("ep_size_2") is first
        # Kills: silently keeping the first order, under which another rank holds the experts.
        with pytest.raises(ValueError, match="use_data_before_expert_parallel_=False"):
            groups._create_expert_and_data_parallel(2, use_data_before_expert_parallel_=True)
        with pytest.raises(ValueError, match="ep_size=3 does not divide"):
            groups.initialize(ep_size=3)

    @pytest.mark.parametrize("sharded", [False, True])
    def test_beside_tensor_parallelism(self, sharded: bool) -> None:
        rank = dist.get_rank()
        mpu = Mpu(2)
        groups.initialize(mpu=mpu)
        across = [rank % 2, rank % 2 + 2]
        if sharded:
            groups._create_expert_data_and_model_parallel(2, mpu)
            assert groups._get_expert_parallel_group_ranks("ep_size_2") == across
            assert groups._get_expert_data_parallel_group_ranks("ep_size_2") == [rank]
        else:
            # Tensor ranks hold different tokens of one batch: their experts' gradients are parts of
            # one sum.
            groups._create_expert_and_data_parallel(2)
            neighbours = [rank // 2 * 2, rank // 2 * 2 + 1]
            assert groups._get_expert_parallel_group_ranks("ep_size_2") == neighbours
            assert groups._get_expert_data_parallel_group_ranks("ep_size_2") == across
