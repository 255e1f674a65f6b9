"""Column- and row-parallel layers. A column-parallel one has some of the outputs on each rank:
every rank reads the whole input, whose gradient is the sum of what the ranks have of it. A
row-parallel one reads some of the inputs: its output is the sum of the ranks', and the whole bias
is added once, after it. A lone layer gathers its outputs, or takes its part of the inputs.

A layer of a model becomes one in place, by its class: hooks and parameters are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed import comm as dist
from deepspeed.comm.shard_ops import gather_shapes
from deepspeed.utils.tensor_fragment import logical_shape

Widths = Sequence[int]  # of each rank, in columns
Kind = TypeVar("Kind", bound="TensorParallelLayer")

# Subclasses of nn.Linear whose forward is nn.Linear's in other words.
_LINEAR_IN_OTHER_WORDS = ("transformers.models.falcon.modeling_falcon.FalconLinear",)
_classes: dict[tuple[type, type], type] = {}


class SliceGroup:
    """The ranks that share a layer, their number, and this one's place; a copy is the same."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size = dist.get_world_size(group=group)
        self.rank = dist.get_rank(group=group)

    def __deepcopy__(self, memo: dict[int, Any]) -> SliceGroup:
        return self


class _SumGradient(torch.autograd.Function):
    """What every rank reads: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: SliceGroup) -> Tensor:
        ctx.ranks = ranks
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # Autograd may give the same tensor to others too.
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.ranks.group)
        return total, None


class _SumValue(torch.autograd.Function):
    """The sum of what the ranks have; each one's part has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: SliceGroup) -> Tensor:
        # In place, if it can be: the partial sum is nobody else's.
        total = value.contiguous()
        if total is value:
            ctx.mark_dirty(value)
        dist.all_reduce(total, group=ranks.group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _GatherOutputs(torch.autograd.Function):
    """Everybody's outputs, side by side; each rank's have their part of the gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: SliceGroup, widths: Widths) -> Tensor:
        ctx.ranks, ctx.widths = ranks, widths
        return _side_by_side(value, ranks, widths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].split(ctx.widths, -1)[ctx.ranks.rank], None, None


class _TakeInputs(torch.autograd.Function):
    """This rank's part of inputs that all have; their gradient is everybody's, side by side."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: SliceGroup, widths: Widths) -> Tensor:
        ctx.ranks, ctx.widths = ranks, widths
        return value.split(widths, -1)[ranks.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _side_by_side(grads[0], ctx.ranks, ctx.widths), None, None


def _side_by_side(own: Tensor, ranks: SliceGroup, widths: Widths) -> Tensor:
    shapes = [torch.Size((*own.shape[:-1], width)) for width in widths]
    return torch.cat(gather_shapes(own, shapes, ranks.group), -1)


class _OverlappedLinear(torch.autograd.Function):
    """A column-parallel layer whose input's gradient travels while the weight's is computed."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, ranks: SliceGroup
    ) -> Tensor:
        # Of a leaf that is saved as it is, torch 2.9 and older drop the hooks when backward reads
        # it through hooks of saved tensors (checkpoints, stage 3).
        ctx.save_for_backward(value.detach(), weight.detach())
        ctx.ranks = ranks
        return F.linear(value, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        value, weight = ctx.saved_tensors
        of_value, of_weight, of_bias, _ = ctx.needs_input_grad
        grad_value = grad_weight = grad_bias = work = None
        if of_value:
            grad_value = (grad @ weight).contiguous()
            work = dist.all_reduce(grad_value, group=ctx.ranks.group, async_op=True)
        rows = grad.reshape(-1, grad.shape[-1])
        if of_weight:
            grad_weight = rows.t() @ value.reshape(-1, value.shape[-1])
        if of_bias:
            grad_bias = rows.sum(0)
        if work is not None:
            work.wait()
        return grad_value, grad_weight, grad_bias, None


class TensorParallelLayer(nn.Module):
    """A layer that is cut, with the class of the layer that it was. `ds_overlaps`: the gradient of
    the input travels while that of the weight is computed; `ds_widths`: if it stands alone, how
    many outputs (row-parallel: inputs) each rank has.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    ds_slice_group: SliceGroup
    ds_overlaps: bool
    ds_widths: tuple[int, ...] | None

    def __init__(self, module: nn.Module, mp_group: Any = None, **kwargs: Any) -> None:
        raise TypeError(
            f"{type(self).__name__}({type(module).__name__}, mp_group): layers are cut in place, "
            "by deepspeed.tp_model_init(model, tp_size, dtype) or the configuration's "
            "tensor_parallel.autotp_size; say which by tensor_parallel.partition_config"
        )

    def _as_linear(self) -> tuple[Tensor, Tensor | None]:
        weight = self.weight.t() if is_transposed(self) else self.weight
        return _as_autocast(weight), None if self.bias is None else _as_autocast(self.bias)


class LinearLayer(TensorParallelLayer):
    """`[..., inputs]` to this rank's `[..., outputs / ranks]`, or, alone, to all outputs."""

    def forward(self, value: Tensor) -> Tensor:
        if self.ds_overlaps and torch.is_grad_enabled():
            weight, bias = self._as_linear()
            result: Tensor = _OverlappedLinear.apply(
                _as_autocast(value), weight, bias, self.ds_slice_group
            )
        else:
            result = super().forward(_SumGradient.apply(value, self.ds_slice_group))
        if self.ds_widths is not None:
            result = _GatherOutputs.apply(result, self.ds_slice_group, self.ds_widths)
        return result


class LinearAllreduce(TensorParallelLayer):
    """This rank's `[..., inputs / ranks]`, or, alone, all, to the whole `[..., outputs]`."""

    def forward(self, value: Tensor) -> Tensor:
        if self.ds_widths is not None:
            value = _TakeInputs.apply(value, self.ds_slice_group, self.ds_widths)
        weight, bias = self._as_linear()
        total: Tensor = _SumValue.apply(F.linear(value, weight), self.ds_slice_group)
        return total if bias is None else total + bias


def _as_autocast(value: Tensor) -> Tensor:
    device = value.device.type
    if not torch.is_autocast_enabled(device) or not value.is_floating_point():
        return value
    return value.to(torch.get_autocast_dtype(device))


def is_matrix(module: nn.Module) -> bool:
    """Tell whether it can be cut: an `nn.Linear` or transformers' `Conv1D` of known forward."""
    cls = type(module)
    if isinstance(module, nn.Linear):
        return (
            isinstance(module, TensorParallelLayer)
            or cls.forward is nn.Linear.forward
            or f"{cls.__module__}.{cls.__qualname__}" in _LINEAR_IN_OTHER_WORDS
        )
    return is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether its weight is `[inputs, outputs]`."""
    return any(
        cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"
        for cls in type(module).__mro__
    )


def num_inputs(module: nn.Module) -> int:
    """Count the inputs of a layer that `is_matrix`."""
    return logical_shape(_weight(module))[0 if is_transposed(module) else 1]


def num_outputs(module: nn.Module) -> int:
    """Count its outputs."""
    return logical_shape(_weight(module))[1 if is_transposed(module) else 0]


def _weight(module: nn.Module) -> Tensor:
    weight: Tensor = module.weight  # type: ignore[assignment]  # is_matrix
    return weight


def become(
    module: nn.Module,
    kind: type[Kind],
    ranks: SliceGroup,
    overlaps: bool,
    widths: tuple[int, ...] | None,
) -> None:
    """Make a layer of slices a parallel one; `widths` if it stands alone."""
    cls = type(module)
    key = (kind, cls)
    if key not in _classes:
        _classes[key] = type(kind.__name__, (kind, cls), {"__module__": kind.__module__})
    module.__class__ = _classes[key]
    module.ds_slice_group = ranks  # type: ignore[assignment]  # no module
    module.ds_overlaps = overlaps  # type: ignore[assignment]  # no module
    module.ds_widths = widths  # type: ignore[assignment]  # no module
    inputs, outputs = ("nx", "nf") if is_transposed(module) else ("in_features", "out_features")
    setattr(module, inputs, num_inputs(module))
    setattr(module, outputs, num_outputs(module))
