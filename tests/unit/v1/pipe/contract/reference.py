"""The single-process reference of a pipeline: plain torch, one chain of layers, no process group,
no deepspeed.

A weight that first and last layer share is two parameters here, kept equal: the gradient of the
shared one is the sum of theirs. That is what stages do, and it says how large each part of the sum
is. (`test_contract` holds it to a weight that really is shared.)

fp32 without half precision's roundings: the reference adds micro-batches in the engine's order and
then ranks, so results are *equal*, bit for bit, wherever the engine's arithmetic has that order;
see `is_exact`. Half precision: see `contract.reference`.
"""

import functools
from typing import Any, TypeVar

import torch
from torch import nn

from unit.v1.contract import reference as contract
from unit.v1.contract.reference import Expected, Tensors
from unit.v1.contract.runner import sums_dtype
from unit.v1.pipe.contract.cases import PipeCase
from unit.v1.pipe.contract.model import Micro, loss_of, make_layers, micro_batch, parameter_groups

T = TypeVar("T", torch.Tensor, float)
FIRST, LAST, SHARED = "0.weight", "9.weight", "tied_modules.embed.weight"


class Chain(nn.Module):
    """All layers in order, named as the pipeline names them."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.layers = make_layers(tied)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, nn.Module):
                self.add_module(str(index), layer)

    def forward(self, micro: Micro) -> torch.Tensor:
        """Loss of a micro-batch."""
        value: Any = micro.inputs
        for layer in self.layers:
            value = layer(value)
        return loss_of(value, micro.labels)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name."""
        return contract.trainable(self)

    def load(self, masters: Tensors) -> None:
        """Take on these values, named as the pipeline names them."""
        with torch.no_grad():
            for name, param in self.trainable().items():
                shared = name in (FIRST, LAST) and SHARED in masters
                param.copy_(masters[SHARED if shared else name])

    def backward(self, micro: Micro, factor: float, scale: float) -> float:
        """Add the gradients of a micro-batch in training's order of operations; the loss."""
        loss = self(micro)
        (loss / factor * scale).backward()
        return loss.item()


def merged(named: dict[str, T], tied: bool) -> dict[str, T]:
    """Gradients of the pipeline's parameters, or their sizes, from the chain's."""
    if not tied:
        return named
    rest = {name: value for name, value in named.items() if name not in (FIRST, LAST)}
    return {SHARED: named[FIRST] + named[LAST], **rest}


def is_exact(case: PipeCase) -> bool:
    """Whether the engine has the reference's order of additions, to the last bit.

    Clipping has a square root of sums in another order; a stage with both uses of a shared weight
    adds them in autograd's; ZeRO's buffer is not aligned, which matrix kernels may mind.
    """
    is_plain = case.precision == "fp32" and case.stage == 0 and not case.clip
    return is_plain and not (case.tied and case.pipe == 1)


def batch(case: PipeCase, step: int, replica: int) -> list[Micro]:
    """The micro-batches of one data-parallel rank."""
    return [
        micro_batch(step, replica, micro, case.replicas, case.dynamic)
        for micro in range(case.accumulation)
    ]


def global_batch(case: PipeCase, step: int) -> list[Micro]:
    """The micro-batches of all data-parallel ranks."""
    return [micro for replica in range(case.replicas) for micro in batch(case, step, replica)]


def mean_loss(chain: Chain, case: PipeCase, step: int) -> float:
    """Of a batch, without gradients."""
    with torch.no_grad():
        losses = [chain(micro).item() for micro in global_batch(case, step)]
    return sum(losses) / len(losses)


def _values(params: dict[str, nn.Parameter]) -> Tensors:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in params.items()
    }


def _sizes(chain: Chain, case: PipeCase, step: int) -> dict[str, float]:
    """M of `contract.reference`'s `[Note: bound]`."""
    params = chain.trainable()
    sizes = dict.fromkeys(params, 0.0)
    for micro in global_batch(case, step):
        chain.zero_grad()
        chain.backward(micro, case.accumulation * case.replicas, 1.0)
        for name, value in _values(params).items():
            sizes[name] += value.norm().item()
    return merged(sizes, case.tied)


def fp32_run(case: PipeCase, steps: int) -> list[tuple[Expected, float]]:
    """One process of torch alone, from the first step to the last; with each mean loss."""
    keys = {"world": case.replicas, "dynamic": case.dynamic, "tied": case.tied}
    alone = PipeCase(0, "fp32", case.accumulation, case.clip, **keys)
    return _fp32_run(alone, is_exact(case), steps)


@functools.cache
def _fp32_run(case: PipeCase, exact: bool, steps: int) -> list[tuple[Expected, float]]:
    chain = Chain(case.tied)
    values = {name: param.detach().clone() for name, param in chain.trainable().items()}
    masters = merged(values, case.tied)
    if case.tied:
        masters[SHARED] = values[FIRST]
    params = {name: nn.Parameter(value) for name, value in masters.items()}
    optimizer = torch.optim.SGD(parameter_groups(params), lr=contract.LEARNING_RATE)
    run = []
    for step in range(steps):
        chain.load(masters)
        sizes, loss = _sizes(chain, case, step), mean_loss(chain, case, step)
        by_rank = []
        for replica in range(case.replicas):
            chain.zero_grad()
            for micro in batch(case, step, replica):
                chain.backward(micro, case.accumulation, 1.0)
            by_rank.append(merged(_values(chain.trainable()), case.tied))
        grads = {name: sum(own[name] for own in by_rank) / case.replicas for name in masters}
        for name, param in params.items():
            param.grad = grads[name].clone()
        norm = contract.global_norm(grads)
        if case.clip:
            torch.nn.utils.clip_grad_norm_(params.values(), contract.CLIP)
        optimizer.step()
        tolerance = 0.0 if exact else contract.FP32_TOLERANCE
        masters = {name: param.detach().clone() for name, param in params.items()}
        grad_bounds = {name: tolerance * size for name, size in sizes.items()}
        param_bounds = {name: tolerance * value.norm().item() for name, value in masters.items()}
        norm_bound = contract.FP32_TOLERANCE * norm
        expected = Expected(grads, norm, masters, grad_bounds, norm_bound, param_bounds)
        run.append((expected, loss))
    return run


@functools.cache
def _half_chain(precision: str) -> Chain:
    return Chain(False).to(contract.DTYPES[precision])


def half_chain(case: PipeCase, masters: Tensors) -> Chain:
    """The chain as the system rounds its masters."""
    chain = _half_chain(case.precision.partition("+")[0])
    chain.load(masters)
    return chain


def half_step(
    case: PipeCase, masters: Tensors, weight_decay: dict[str, float], step: int
) -> tuple[Expected, float]:
    """What one SGD step from `masters` must give in half precision, and the mean loss."""
    precision = case.precision.partition("+")[0]
    chain = half_chain(case, masters)
    params = chain.trainable()
    scale = contract.LOSS_SCALE if precision == "fp16" else 1.0
    total = {name: torch.zeros_like(param, dtype=torch.float64) for name, param in params.items()}
    sizes, losses = dict.fromkeys(params, 0.0), []
    for micro in global_batch(case, step):
        chain.zero_grad()
        losses.append(chain.backward(micro, case.accumulation, scale))
        for name, value in _values(params).items():
            part = value.double() / (scale * case.replicas)
            total[name] += part
            sizes[name] += part.norm().item()
    grads, sizes = merged(total, case.tied), merged(sizes, case.tied)
    # As in `contract.reference`, and one addition more for the two uses of a shared weight.
    roundings = case.accumulation + case.replicas + 1 + case.tied
    # One stage that has both uses of a weight leaves that addition to autograd.
    sums_in = contract.DTYPES[precision] if case.tied and case.pipe == 1 else sums_dtype(case)
    expected = contract.rounded_step(
        masters, weight_decay, grads, sizes, precision, sums_in, roundings, case.clip
    )
    return expected, sum(losses) / len(losses)
