"""`safe_get_*` and `safe_set_*` on every optimizer: full and local values, gradients, state."""

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed import utils as access
from unit.common import DistributedTest
from unit.models import config_of
from unit.v1.looping import each
from unit.v1.zero.usage import PRECISIONS

LR = 0.5
ON_HOST = {"offload_optimizer": {"device": "cpu"}}
# The stage, the rest of its block, and the precision.
CONFIGS: dict[str, tuple[int, dict[str, Any], str]] = {
    "zero1-fp32": (1, {}, "fp32"),
    "zero2-fp32": (2, {"reduce_bucket_size": 8, "overlap_comm": True}, "fp32"),
    "zero1-bf16": (1, {}, "bf16"),
    "zero2-fp16": (2, {}, "fp16"),
    "zero2-offload": (2, ON_HOST, "fp32"),
    "zero1-round-robin": (1, {"round_robin_gradients": True}, "fp32"),
    "bf16-optimizer": (1, {}, "bf16+fp32"),
    "bf16-optimizer-offload": (1, ON_HOST, "bf16+fp32"),
    "stage0-fp16": (0, {}, "fp16"),
    "stage0-bf16": (0, {}, "bf16"),
}
SHARDED = [name for name in CONFIGS if not name.startswith("stage0")]


class Net(nn.Module):
    """Sizes that shards cut in the middle; gradients are powers of two times the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.arange(7.0).view(7, 1))
        self.second = nn.Parameter(torch.arange(10.0, 15.0))
        self.third = nn.Parameter(torch.tensor([2.0]))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sum with weights 1, 2 and 4, times the scalar `x`."""
        trained = self.first.sum() + 2 * self.second.sum() + 4 * self.third.sum()
        return x * (trained + self.frozen.sum())


def make_engine(name: str, **more: Any) -> Any:
    model = Net()
    groups = [{"params": [model.first, model.frozen]}, {"params": [model.second, model.third]}]
    stage, zero, precision = CONFIGS.get(name, (0, {}, "fp32"))
    config = config_of(stage, 1, zero_optimization=zero, **PRECISIONS[precision], **more)
    optimizer = torch.optim.SGD(groups, lr=LR, momentum=0.5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def backward(engine: Any) -> None:
    """Averaged over ranks, the input is 2 * (world + 1) / 2, an integer or exact half."""
    x = torch.tensor(2.0 * (dist.get_rank() + 1), dtype=engine.model_dtype)
    engine.backward(engine(x))


def mean_input() -> float:
    return float(dist.get_world_size() + 1)


def trainable(engine: Any) -> dict[str, nn.Parameter]:
    return {name: param for name, param in engine.module.named_parameters() if param.requires_grad}


WEIGHTS = {"first": 1.0, "second": 2.0, "third": 4.0}


class TestFullAccess(DistributedTest):
    """Whole tensors, the same on every rank."""

    world_size = 3

    @each(name=CONFIGS)
    def test_values_gradients_and_state_are_read(self, name: str) -> None:
        # Kills: a fragment read at the wrong place, a shard that is missing in the sum, a gradient
        # that carries the loss scale, one that was not averaged, and state read from the
        # neighbour's place; lists whose order is not the caller's (here it is neither the groups'
        # nor the registration's); an update with the gradient of another parameter.
        engine = make_engine(name)
        initial = Net()
        params = [engine.module.third, engine.module.first, engine.module.second]
        for key, param in trainable(engine).items():
            assert torch.equal(access.safe_get_full_fp32_param(param), getattr(initial, key)), key
            assert access.safe_get_full_grad(param) is None, key
        backward(engine)
        for key, param in trainable(engine).items():
            wanted = torch.full(param.shape, WEIGHTS[key] * mean_input())
            grad = access.safe_get_full_grad(param)
            assert grad.dtype == torch.float32 and torch.equal(grad, wanted), key
        assert all(
            map(
                torch.equal,
                access.safe_get_full_grads(params),
                map(access.safe_get_full_grad, params),
            )
        )
        engine.step()
        for key, param in trainable(engine).items():
            moved = getattr(initial, key) - LR * WEIGHTS[key] * mean_input()
            assert torch.equal(access.safe_get_full_fp32_param(param), moved), key
            state = access.safe_get_full_optimizer_state(param, "momentum_buffer")
            assert torch.equal(state, torch.full(param.shape, WEIGHTS[key] * mean_input())), key
            assert access.safe_get_full_grad(param) is None, key
        assert access.safe_get_full_grads(params) is None
        values = access.safe_get_full_fp32_params(params)
        states = access.safe_get_full_optimizer_states(params, "momentum_buffer")
        for param, value, state in zip(params, values, states, strict=True):
            assert torch.equal(value, access.safe_get_full_fp32_param(param))
            assert torch.equal(
                state, access.safe_get_full_optimizer_state(param, "momentum_buffer")
            )
        backward(engine)
        access.safe_update_full_grad_vectorized(params, lambda grad, param: grad * param.numel())
        for key, param in trainable(engine).items():
            wanted = torch.full(param.shape, WEIGHTS[key] * mean_input() * param.numel())
            assert torch.equal(access.safe_get_full_grad(param), wanted), key

    @each(name=CONFIGS)
    def test_what_is_set_is_used_and_bad_questions_are_answered(self, name: str) -> None:
        # Kills: a value written to the master but not the model or the other way round, a gradient
        # that the step overwrites.
        engine = make_engine(name)
        param = engine.module.second
        value = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0])
        access.safe_set_full_fp32_param(param, value)
        assert torch.equal(param.detach().float(), value)
        assert torch.equal(access.safe_get_full_fp32_param(param), value)
        backward(engine)
        access.safe_set_full_grad(param, value * 4)
        assert torch.equal(access.safe_get_full_grad(param), value * 4)
        engine.step()
        assert torch.equal(access.safe_get_full_fp32_param(param), value - LR * value * 4)
        assert torch.equal(param.detach().float(), (value - LR * value * 4))
        access.safe_set_full_optimizer_state(param, value * 2, "momentum_buffer")
        assert torch.equal(
            access.safe_get_full_optimizer_state(param, "momentum_buffer"), value * 2
        )
        before = access.safe_get_full_fp32_param(param).clone()
        backward(engine)
        engine.step()
        wanted = before - LR * (0.5 * value * 2 + WEIGHTS["second"] * mean_input())
        assert torch.equal(access.safe_get_full_fp32_param(param), wanted)
        # Kills: an assignment that spills over into the neighbours.
        untouched = Net().third - LR * WEIGHTS["third"] * mean_input() * (1 + 1.5)
        assert torch.equal(access.safe_get_full_fp32_param(engine.module.third), untouched)
        # Kills: a wrong state name or shape that fails deep inside, or on some ranks only.
        engine = make_engine(name)
        param = engine.module.first
        with pytest.raises(KeyError, match="before the first step"):
            access.safe_get_full_optimizer_state(param, "momentum_buffer")
        backward(engine)
        engine.step()
        with pytest.raises(KeyError, match="momentum_buffer"):
            access.safe_get_full_optimizer_state(param, "exp_avg")
        with pytest.raises(ValueError, match=r"\(3,\).*\(7, 1\)"):
            access.safe_set_full_fp32_param(param, torch.zeros(3))
        assert access.safe_get_full_fp32_param(engine.module.frozen) is None
        assert access.safe_get_full_grad(engine.module.frozen) is None
        assert access.safe_get_local_fp32_param(engine.module.frozen) is None
        assert access.safe_get_local_grad(engine.module.frozen) is None
        for get in (access.safe_get_full_optimizer_state, access.safe_get_local_optimizer_state):
            assert get(engine.module.frozen, "exp_avg") is None
        with pytest.raises(ValueError, match="frozen"):
            access.safe_set_full_fp32_param(engine.module.frozen, torch.zeros(3))


def gathered_local(fragment: torch.Tensor | None) -> torch.Tensor:
    """All ranks' fragments, in rank order."""
    pieces: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, None if fragment is None else fragment.clone())
    return torch.cat([piece for piece in pieces if piece is not None])


class TestLocalAccess(DistributedTest):
    """Owned fragments, which need no communication; masters at stage 0 in fp32."""

    world_size = 2

    @each(name=SHARDED)
    def test_fragments_make_up_the_whole_and_are_set(self, name: str) -> None:
        # Kills: fragments that overlap, leave a gap, or are handed out in another order than the
        # elements'.
        engine = make_engine(name)
        backward(engine)
        for param in trainable(engine).values():
            local, whole = access.safe_get_local_grad(param), access.safe_get_full_grad(param)
            assert torch.equal(gathered_local(local), whole.reshape(-1))
        engine.step()
        for param in trainable(engine).values():
            local, whole = (
                access.safe_get_local_fp32_param(param),
                access.safe_get_full_fp32_param(param),
            )
            assert torch.equal(gathered_local(local), whole.reshape(-1))
            local = access.safe_get_local_optimizer_state(param, "momentum_buffer")
            whole = access.safe_get_full_optimizer_state(param, "momentum_buffer")
            assert torch.equal(gathered_local(local), whole.reshape(-1))
        # Kills: a setter that writes a copy, or all of the shard instead of the fragment.
        engine = make_engine(name)
        param, neighbour = engine.module.first, engine.module.second
        others = access.safe_get_full_fp32_param(neighbour).clone()
        fragment = access.safe_get_local_fp32_param(param)
        held = 0 if fragment is None else fragment.numel()
        access.safe_set_local_fp32_param(param, torch.full((held,), 3.0))
        assert torch.equal(access.safe_get_full_fp32_param(param), torch.full((7, 1), 3.0))
        assert torch.equal(access.safe_get_full_fp32_param(neighbour), others)
        backward(engine)
        access.safe_set_local_grad(param, torch.full((held,), 8.0))
        assert torch.equal(access.safe_get_full_grad(param), torch.full((7, 1), 8.0))
        engine.step()
        assert torch.equal(
            access.safe_get_full_fp32_param(param), torch.full((7, 1), 3.0 - LR * 8.0)
        )
        assert torch.equal(param.detach().float(), torch.full((7, 1), 3.0 - LR * 8.0))
        access.safe_set_local_optimizer_state(param, torch.full((held,), 16.0), "momentum_buffer")
        state = access.safe_get_full_optimizer_state(param, "momentum_buffer")
        assert torch.equal(state, torch.full((7, 1), 16.0))
        with pytest.raises(ValueError, match=f"{held + 1} elements, this rank owns {held}"):
            access.safe_set_local_fp32_param(param, torch.zeros(held + 1))

    def test_the_parameter_itself_is_read(self) -> None:
        # Kills: None, or a gradient before averaging, where the caller can't know which optimizer
        # is in use.
        engine = make_engine("stage0-fp32")
        param = engine.module.second
        assert torch.equal(access.safe_get_full_fp32_param(param), param.detach())
        backward(engine)
        assert torch.equal(access.safe_get_full_grad(param), torch.full((5,), 2.0 * mean_input()))
        access.safe_set_full_grad(param, torch.ones(5))
        engine.step()
        assert torch.equal(param.detach(), Net().second.detach() - LR)
        with pytest.raises(ValueError, match="stage 0 in fp32"):
            access.safe_set_full_fp32_param(param, torch.zeros(5))
        # Kills: putting another tensor into param.grad: norm and clipping read the buffer, and the
        # update would not be clipped.
        engine = make_engine("stage0-fp32", gradient_clipping=1.0)
        backward(engine)
        for param in trainable(engine).values():
            access.safe_set_full_grad(param, torch.full(param.shape, 3.0))
        engine.step()
        norm = 3.0 * 13**0.5
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-6)
        wanted = Net().second.detach() - LR * 3.0 / norm
        torch.testing.assert_close(engine.module.second.detach(), wanted)
