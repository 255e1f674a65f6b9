"""`safe_get_*` and `safe_set_*` on every optimizer: full and local values, gradients, state."""

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from deepspeed.utils.tensor_fragment import (
    safe_get_full_fp32_params,
    safe_get_full_grads,
    safe_get_full_optimizer_states,
)
from unit.common import DistributedTest
from unit.v1.looping import each

LR = 0.5
CONFIGS: dict[str, dict[str, Any]] = {
    "zero1-fp32": {"zero_optimization": {"stage": 1}},
    "zero2-fp32": {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 8, "overlap_comm": True}
    },
    "zero1-bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "zero2-fp16": {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True, "loss_scale": 64}},
    "zero2-offload": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    },
    "zero1-round-robin": {"zero_optimization": {"stage": 1, "round_robin_gradients": True}},
    "bf16-optimizer": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "bf16-optimizer-offload": {
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "stage0-fp16": {"fp16": {"enabled": True, "loss_scale": 64}},
    "stage0-bf16": {"bf16": {"enabled": True}},
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
        return x * (
            self.first.sum() + 2 * self.second.sum() + 4 * self.third.sum() + self.frozen.sum()
        )


def make_engine(name: str, **optimizer: Any) -> Any:
    model = Net()
    settings = {"lr": LR, "momentum": 0.5, **optimizer}
    groups = [{"params": [model.first, model.frozen]}, {"params": [model.second, model.third]}]
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(groups, **settings),
        config={"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, **CONFIGS[name]},
    )
    return engine


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
            assert torch.equal(safe_get_full_fp32_param(param), getattr(initial, key)), key
            assert safe_get_full_grad(param) is None, key
        backward(engine)
        for key, param in trainable(engine).items():
            wanted = torch.full(param.shape, WEIGHTS[key] * mean_input())
            grad = safe_get_full_grad(param)
            assert grad.dtype == torch.float32 and torch.equal(grad, wanted), key
        assert all(map(torch.equal, safe_get_full_grads(params), map(safe_get_full_grad, params)))
        engine.step()
        for key, param in trainable(engine).items():
            moved = getattr(initial, key) - LR * WEIGHTS[key] * mean_input()
            assert torch.equal(safe_get_full_fp32_param(param), moved), key
            state = safe_get_full_optimizer_state(param, "momentum_buffer")
            assert torch.equal(state, torch.full(param.shape, WEIGHTS[key] * mean_input())), key
            assert safe_get_full_grad(param) is None, key
        assert safe_get_full_grads(params) is None
        values = safe_get_full_fp32_params(params)
        states = safe_get_full_optimizer_states(params, "momentum_buffer")
        for param, value, state in zip(params, values, states, strict=True):
            assert torch.equal(value, safe_get_full_fp32_param(param))
            assert torch.equal(state, safe_get_full_optimizer_state(param, "momentum_buffer"))
        backward(engine)
        safe_update_full_grad_vectorized(params, lambda grad, param: grad * param.numel())
        for key, param in trainable(engine).items():
            wanted = torch.full(param.shape, WEIGHTS[key] * mean_input() * param.numel())
            assert torch.equal(safe_get_full_grad(param), wanted), key

    @each(name=CONFIGS)
    def test_what_is_set_is_used(self, name: str) -> None:
        # Kills: a value written to the master but not the model or the other way round, a gradient
        # that the step overwrites.
        engine = make_engine(name)
        param = engine.module.second
        value = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0])
        safe_set_full_fp32_param(param, value)
        assert torch.equal(param.detach().float(), value)
        assert torch.equal(safe_get_full_fp32_param(param), value)
        backward(engine)
        safe_set_full_grad(param, value * 4)
        assert torch.equal(safe_get_full_grad(param), value * 4)
        engine.step()
        assert torch.equal(safe_get_full_fp32_param(param), value - LR * value * 4)
        assert torch.equal(param.detach().float(), (value - LR * value * 4))
        safe_set_full_optimizer_state(param, value * 2, "momentum_buffer")
        assert torch.equal(safe_get_full_optimizer_state(param, "momentum_buffer"), value * 2)
        before = safe_get_full_fp32_param(param).clone()
        backward(engine)
        engine.step()
        wanted = before - LR * (0.5 * value * 2 + WEIGHTS["second"] * mean_input())
        assert torch.equal(safe_get_full_fp32_param(param), wanted)
        # Kills: an assignment that spills over into the neighbours.
        untouched = Net().third - LR * WEIGHTS["third"] * mean_input() * (1 + 1.5)
        assert torch.equal(safe_get_full_fp32_param(engine.module.third), untouched)

    @each(name=CONFIGS)
    def test_bad_questions_are_answered_by_name(self, name: str) -> None:
        # Kills: a wrong state name or shape that fails deep inside, or on some ranks only.
        engine = make_engine(name)
        param = engine.module.first
        with pytest.raises(KeyError, match="before the first step"):
            safe_get_full_optimizer_state(param, "momentum_buffer")
        backward(engine)
        engine.step()
        with pytest.raises(KeyError, match="momentum_buffer"):
            safe_get_full_optimizer_state(param, "exp_avg")
        with pytest.raises(ValueError, match=r"\(3,\).*\(7, 1\)"):
            safe_set_full_fp32_param(param, torch.zeros(3))
        assert safe_get_full_fp32_param(engine.module.frozen) is None
        assert safe_get_full_grad(engine.module.frozen) is None
        assert safe_get_local_fp32_param(engine.module.frozen) is None
        assert safe_get_local_grad(engine.module.frozen) is None
        for get in (safe_get_full_optimizer_state, safe_get_local_optimizer_state):
            assert get(engine.module.frozen, "exp_avg") is None
        with pytest.raises(ValueError, match="frozen"):
            safe_set_full_fp32_param(engine.module.frozen, torch.zeros(3))


def gathered_local(fragment: torch.Tensor | None) -> torch.Tensor:
    """All ranks' fragments, in rank order."""
    pieces: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, None if fragment is None else fragment.clone())
    return torch.cat([piece for piece in pieces if piece is not None])


class TestLocalAccess(DistributedTest):
    """Owned fragments: no communication, writable."""

    world_size = 2

    @each(name=SHARDED)
    def test_fragments_make_up_the_whole(self, name: str) -> None:
        # Kills: fragments that overlap, leave a gap, or are handed out in another order than the
        # elements'.
        engine = make_engine(name)
        backward(engine)
        for param in trainable(engine).values():
            assert torch.equal(
                gathered_local(safe_get_local_grad(param)), safe_get_full_grad(param).reshape(-1)
            )
        engine.step()
        for param in trainable(engine).values():
            assert torch.equal(
                gathered_local(safe_get_local_fp32_param(param)),
                safe_get_full_fp32_param(param).reshape(-1),
            )
            local = gathered_local(safe_get_local_optimizer_state(param, "momentum_buffer"))
            assert torch.equal(
                local, safe_get_full_optimizer_state(param, "momentum_buffer").reshape(-1)
            )

    @each(name=SHARDED)
    def test_local_assignments(self, name: str) -> None:
        # Kills: a setter that writes a copy, or all of the shard instead of the fragment.
        engine = make_engine(name)
        param, neighbour = engine.module.first, engine.module.second
        others = safe_get_full_fp32_param(neighbour).clone()
        fragment = safe_get_local_fp32_param(param)
        held = 0 if fragment is None else fragment.numel()
        safe_set_local_fp32_param(param, torch.full((held,), 3.0))
        assert torch.equal(safe_get_full_fp32_param(param), torch.full((7, 1), 3.0))
        assert torch.equal(safe_get_full_fp32_param(neighbour), others)
        backward(engine)
        safe_set_local_grad(param, torch.full((held,), 8.0))
        assert torch.equal(safe_get_full_grad(param), torch.full((7, 1), 8.0))
        engine.step()
        assert torch.equal(safe_get_full_fp32_param(param), torch.full((7, 1), 3.0 - LR * 8.0))
        assert torch.equal(param.detach().float(), torch.full((7, 1), 3.0 - LR * 8.0))
        safe_set_local_optimizer_state(param, torch.full((held,), 16.0), "momentum_buffer")
        assert torch.equal(
            safe_get_full_optimizer_state(param, "momentum_buffer"), torch.full((7, 1), 16.0)
        )
        with pytest.raises(ValueError, match=f"{held + 1} elements, this rank owns {held}"):
            safe_set_local_fp32_param(param, torch.zeros(held + 1))


class TestWithoutMasters(DistributedTest):
    """Stage 0 in fp32: the parameter is its own master."""

    world_size = 2

    def test_the_parameter_itself_is_read(self) -> None:
        # Kills: None, or a gradient before averaging, where the caller can't know which optimizer
        # is in use.
        CONFIGS["stage0-fp32"] = {}
        engine = make_engine("stage0-fp32")
        param = engine.module.second
        assert torch.equal(safe_get_full_fp32_param(param), param.detach())
        backward(engine)
        assert torch.equal(safe_get_full_grad(param), torch.full((5,), 2.0 * mean_input()))
        safe_set_full_grad(param, torch.ones(5))
        engine.step()
        assert torch.equal(param.detach(), Net().second.detach() - LR)
        with pytest.raises(ValueError, match="stage 0 in fp32"):
            safe_set_full_fp32_param(param, torch.zeros(5))

    def test_a_gradient_that_was_set_is_clipped(self) -> None:
        # Kills: putting another tensor into param.grad: norm and clipping read the buffer, and the
        # update would not be clipped.
        CONFIGS["stage0-clipped"] = {"gradient_clipping": 1.0}
        engine = make_engine("stage0-clipped")
        backward(engine)
        for param in trainable(engine).values():
            safe_set_full_grad(param, torch.full(param.shape, 3.0))
        engine.step()
        norm = 3.0 * 13**0.5
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-6)
        wanted = Net().second.detach() - LR * 3.0 / norm
        torch.testing.assert_close(engine.module.second.detach(), wanted)
