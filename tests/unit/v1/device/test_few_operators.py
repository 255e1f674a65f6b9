"""How many operators a device gets for what the host could do piece by piece."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.moe.gating import top1gating, top2gating, topkgating
from deepspeed.runtime.gradients import local_accumulator
from deepspeed.runtime.gradients.local_accumulator import LocalAccumulator
from deepspeed.sequence.exchange import Cut, _pack
from deepspeed.sequence.layer import DistributedAttention, shares
from unit.common import DistributedTest


class Operators(TorchDispatchMode):
    """Operators by name; `slow` are scans over other elements, and grouped ones of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.slow: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.count[name] += 1
        if name == "aten::cumsum" and args[0].stride(args[1]) != 1:
            self.slow.append(name)
        if name.startswith("aten::_foreach_add") and len(args[0]) > 1:
            self.slow += [name] * (args[0][0].dtype != args[1][0].dtype)
        return func(*args, **(kwargs or {}))


GATES: list[Callable[[torch.Tensor], Any]] = [
    lambda logits: top1gating(logits, 1.0, 2, use_rts=False),
    lambda logits: top1gating(logits, 1.0, 2, used_token=torch.arange(len(logits)) % 3),
    lambda logits: top2gating(logits, 1.0, 2, top2_2nd_expert_sampling=False),
    lambda logits: topkgating(logits, 2, 1.0, 2, drop_policy="position"),
]


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_scans_along_memory_and_routes_as_on_the_host(
    gate: Callable[[torch.Tensor], Any],
) -> None:
    # Kills: a scan over the tokens of [tokens, experts], each element as far from the next as
    # there are experts; positions that are not the host's.
    logits = torch.randn(37, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    wanted = gate(logits.clone())
    with simulate():
        torch.manual_seed(1)
        with Operators() as seen:
            found = gate(logits.clone())
        assert seen.count["aten::cumsum"] >= 1 and not seen.slow
        assert torch.equal(found.combine_weights, wanted.combine_weights)
        assert torch.equal(found.dispatch_mask, wanted.dispatch_mask)


@pytest.mark.parametrize("heads", [16, 13])
@pytest.mark.parametrize("scatter", [0, 2])
def test_an_exchange_is_packed_by_few_copies_for_any_number_of_ranks(
    heads: int, scatter: int
) -> None:
    # Kills: a copy per rank and tensor; pieces in another order than the ranks'.
    tensors = [torch.randn(8, 2, count, 3) for count in (heads, 8, 8)]
    cuts = [
        Cut(scatter, 2 - scatter, shares(tensor.shape[scatter], 8), (1,) * 8) for tensor in tensors
    ]
    wanted, sizes = _pack(tensors, cuts, 8)
    with simulate():
        with Operators() as seen:
            found, sent = _pack(tensors, cuts, 8)
        runs = len({cut.scatter_sizes[0] != size for cut in cuts for size in cut.scatter_sizes})
        assert seen.count["aten::copy_"] == 3 * runs < 3 * 8
        assert sent == sizes and torch.equal(found, wanted)


class _Group:
    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self.params = params
        self.flat = torch.zeros(sum(param.numel() for param in params))
        self.table = self
        self.padded_numel = len(self.flat)

    def param_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pieces = flat.split([param.numel() for param in self.params])
        return [piece.view(param.shape) for piece, param in zip(pieces, self.params, strict=True)]


def accumulated() -> torch.Tensor:
    draw = torch.Generator().manual_seed(2)
    sizes = ((3, 5), (7,), (64, 4), (9,), (11,))
    params = [torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in sizes]
    accumulator = LocalAccumulator([_Group(params)], torch.float32)  # type: ignore[list-item]
    for _ in range(3):
        for param in params[:-1]:
            param.grad = torch.randn(param.shape, generator=draw).bfloat16()
        accumulator.absorb(0.3)
    return accumulator.flats[0]


def test_gradients_of_another_dtype_are_added_together(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills: a grouped addition of two dtypes, which a device does one by one; one that rounds
    # otherwise than the host; memory for all gradients in the wide dtype.
    wanted = accumulated()
    monkeypatch.setattr(local_accumulator, "WIDENED_NUMEL", 30)
    with simulate():
        with Operators() as seen:
            found = accumulated()
        # The first two together, the large one and the last by themselves.
        assert seen.count["aten::_foreach_copy_"] == 3 and not seen.slow
        assert torch.equal(found, wanted)


class TestAttention(DistributedTest):
    world_size = 2

    def test_the_order_of_repeated_heads_is_sent_to_the_device_once(self) -> None:
        # Kills: a copy of the host's numbers, for which it waits, in every forward.
        with simulate() as sim:
            attention = DistributedAttention(_Attends(), dist.get_world_group())
            tensors = [torch.randn(4, 1, heads, 3) for heads in (4, 1, 1)]
            attention(*tensors, 1)
            with sim.count_host_waits() as waits:
                attention(*tensors, 1)
            assert waits.total == 0 and not waits.pageable_copies, waits.by_place
            get_accelerator().synchronize()


class _Attends(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return query + key + value
