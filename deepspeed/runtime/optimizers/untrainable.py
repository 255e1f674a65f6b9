"""What no engine can train, found at `initialize`: parameters that are not the model's, complex
ones, and those whose gradients are sparse.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from deepspeed.utils.tensor_fragment import logical_shape

# Optimizers of torch that nothing here can step, and why.
_NEVER = {
    "LBFGS": "evaluates the loss anew within a step, by a closure that would run outside the "
    "engine: use AdamW",
    "SparseAdam": "updates sparse gradients alone, and those of all ranks are summed dense: use "
    "AdamW",
}
_SHOWN = 4  # shapes


def why_untrainable(optimizer: torch.optim.Optimizer, model: nn.Module) -> str | None:
    """Say what of an optimizer, or of its parameters, cannot be trained; None: nothing."""
    name = type(optimizer).__name__
    if name in _NEVER:
        return f"optimizer: {name} {_NEVER[name]}"
    trained = {
        id(one) for group in optimizer.param_groups for one in group["params"] if one.requires_grad
    }
    return next(_problems(optimizer, model, trained), None)


def _problems(
    optimizer: torch.optim.Optimizer, model: nn.Module, trained: set[int]
) -> Iterator[str]:
    own = {id(param) for param in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        # Nobody casts, broadcasts or saves them; and if they were made before the model was copied,
        # its own are not trained.
        foreign = [param for param in group["params"] if id(param) not in own]
        if foreign:
            shapes = ", ".join(str(tuple(logical_shape(param))) for param in foreign[:_SHOWN])
            more = ", ..." if len(foreign) > _SHOWN else ""
            yield (
                f"optimizer: {len(foreign)} of the {len(group['params'])} parameters in group "
                f"{index} of {type(optimizer).__name__} are not parameters of the model "
                f"({type(model).__name__}); their shapes are {shapes}{more}. Make the optimizer, "
                "or model_parameters, of the parameters() of the very model that initialize is "
                "given, after it was copied or converted; what else is to be trained with it has "
                "to be a part of it (model.name = module)"
            )
    for name, param in model.named_parameters():
        if param.is_complex() and id(param) in trained:
            shape = (*logical_shape(param), 2)
            yield (
                f"{name} is {param.dtype}, and complex parameters are not trained: make it a real "
                f"one of shape {shape}, torch.view_as_real(value), and compute with "
                "torch.view_as_complex(parameter.float()); or freeze it"
            )
    for name, module in model.named_modules():
        is_sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        if is_sparse and id(module.weight) in trained:
            yield (
                f"{name or 'the model'} is {type(module).__name__}(sparse=True), whose gradients "
                "are sparse tensors, which come in a later release: use sparse=False, or freeze it"
            )
