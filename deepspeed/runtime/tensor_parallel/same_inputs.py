"""Ranks that share layers compute one forward together: they have to read the same batch, and drop
out the same activations. Other data on one gives wrong gradients without an error: it is checked.

[Note: when it is checked] Before forwards with gradients, by one collective of a few numbers. On
the host before each of them. A device would wait for the answer, so there before the first few, and
then now and again: samplers and seeds that are wrong are so from the first batch on. Whether a
model draws random numbers at all, for which all its modules are asked, is looked up as seldom.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sharding.model_slices import slices_of
from deepspeed.runtime.utils import tensors_in
from deepspeed.utils.exceptions import MisuseError

FIRST_FORWARDS = 4
EVERY = 64
_RANDOM = ("drop", "noise", "jitter")

# Places in the numbers that ranks compare; every rank sends as many, whatever it was given.
STATES, SHAPES, CONTENTS = 0, 1, 2  # random states, shapes of the inputs, and from here each input
MOST_INPUTS = 64
NUMBERS = CONTENTS + MOST_INPUTS


class SameInputs:
    """Checks forwards of a model that was cut, and makes random states the first rank's, once."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        slices = slices_of(model)
        self._device = device
        self._would_wait = not get_accelerator().is_synchronized_device()
        self._num_forwards = 0
        self._draws = False
        self._hook = None
        if slices is not None:
            self._group = slices.group
            self._share_random_states()
            self._hook = model.register_forward_pre_hook(
                self._check, with_kwargs=True, prepend=True
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> SameInputs:
        return self

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _share_random_states(self) -> None:
        source = dist.get_global_rank(self._group, 0)
        for get, put in _random_states():
            state = get().to(self._device)
            dist.broadcast(state, src=source, group=self._group)
            put(state.cpu())

    def _check(self, model: nn.Module, args: object, kwargs: dict[str, Any]) -> None:
        """Raise on all of these ranks if they differ; at the first forward on all ranks."""
        if not (model.training and torch.is_grad_enabled()):
            return
        count, self._num_forwards = self._num_forwards, self._num_forwards + 1
        is_due = count < FIRST_FORWARDS or count % EVERY == 0
        if self._would_wait and not is_due:
            return
        if is_due:
            self._draws = _draws(model)
        inputs = list(tensors_in((args, kwargs)))
        states = (get() for get, _ in _random_states())
        numbers = torch.zeros(NUMBERS, dtype=torch.int64, device=self._device)
        numbers[STATES] = _crc(states) if self._draws else 0
        numbers[SHAPES] = _crc_of_shapes(inputs)
        for place, tensor in enumerate(inputs[:MOST_INPUTS], CONTENTS):
            numbers[place] = _checksum(tensor).to(self._device)
        differing = torch.cat([numbers, -numbers])
        dist.all_reduce(differing, op=dist.ReduceOp.MAX, group=self._group)
        differs = (differing[:NUMBERS] != -differing[NUMBERS:]).to(torch.int64)
        if count == 0:  # which every rank comes to
            dist.all_reduce(differs, op=dist.ReduceOp.MAX)
        found = differs.tolist()
        if any(found):
            self._raise(found, inputs)

    def _raise(self, found: list[int], inputs: list[torch.Tensor]) -> None:
        ranks = dist.get_all_ranks_from_group(self._group)
        if found[SHAPES] or any(found[CONTENTS:]):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
            raise MisuseError(
                f"ranks {ranks} share the model's layers (tensor parallelism) but were given "
                f"different batches; this rank's are of shapes {shapes}. Make the same dataset "
                "on all ranks, and give a sampler engine.dp_world_size and "
                "engine.get_data_parallel_rank(), or use engine.deepspeed_io(dataset)"
            )
        raise MisuseError(
            f"ranks {ranks} share the model's layers (tensor parallelism) but their random states "
            "differ, so that dropout would differ too: seed them alike, and draw the same random "
            "numbers on all of them"
        )


def _random_states() -> list[tuple[Any, Any]]:
    """How to get and set each state that dropout draws from."""
    accelerator = get_accelerator()
    states: list[tuple[Any, Any]] = [(torch.get_rng_state, torch.set_rng_state)]
    if accelerator.device_name() != "cpu":
        states.append((accelerator.get_rng_state, accelerator.set_rng_state))
    return states


def _draws(model: nn.Module) -> bool:
    """Tell whether a forward may draw random numbers: dropout, or noise, is there and not 0."""
    of_modules = (vars(module).items() for module in model.modules())
    of_config = vars(getattr(model, "config", None) or object).items()
    told = (entry for entries in (*of_modules, of_config) for entry in entries)
    by_name = any(
        isinstance(value, float) and value > 0
        for name, value in told
        if isinstance(name, str) and any(word in name for word in _RANDOM)
    )
    return by_name or any(
        isinstance(one, nn.modules.dropout._DropoutNd) and one.p > 0 for one in model.modules()
    )


def _crc(states: Any) -> int:
    number = 0
    for state in states:
        number = zlib.crc32(state.cpu().numpy().tobytes(), number)
    return number


def _crc_of_shapes(inputs: list[torch.Tensor]) -> int:
    told = repr([(tuple(tensor.shape), str(tensor.dtype)) for tensor in inputs])
    return zlib.crc32(told.encode())


@torch.no_grad()
def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A number of a tensor's bits and of where they are; wraps around."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    numbers = flat.view(kinds[flat.element_size()]).to(torch.int64)
    places = torch.arange(1, numbers.numel() + 1, device=numbers.device)
    return (numbers * (places % 65521)).sum()
