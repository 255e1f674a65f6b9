"""Masters and optimizer state in bf16 or fp16: a step computes in fp32, piece by piece, and rounds
each value once, to the nearest or at random.
"""

from __future__ import annotations

import copy
import hashlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deepspeed.accelerator import runs_ahead
from deepspeed.ops.host_optimizer import HostOptimizer, load_moments
from deepspeed.ops.parameter_runs import ElementRun, Runs, is_by_element, shared_state
from deepspeed.runtime.sharding.group import ShardedGroup

if TYPE_CHECKING:
    from deepspeed.runtime.config_models.training import TrainingConfig

# Elements in fp32 at a time: what is small beside a model, or stays in a host's cache.
DEVICE_NUMEL, HOST_NUMEL = 1 << 23, 1 << 17

# Values of an element that are rounded in a step take bits of their own from one draw.
_BITS, _DRAWS = 16, 4
_GAMMA, *_FACTORS = (
    number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def low_precision_key(tree: TrainingConfig) -> str | None:
    """Return which key asks for masters in the model's dtype."""
    if tree.fp16.enabled and tree.fp16.fp16_master_weights_and_grads:
        return "fp16.fp16_master_weights_and_grads"
    if tree.bf16.enabled and tree.bf16.bf16_master_weights_and_grads:
        return "bf16.bf16_master_weights_and_grads"
    return None


class LowPrecision(NamedTuple):
    """How state is kept whose masters are not in fp32."""

    state_dtype: torch.dtype  # of moments
    at_random: bool  # round bf16 at random, not to the nearest

    @classmethod
    def of(cls, tree: TrainingConfig) -> LowPrecision | None:
        """Read the keys; None: masters are in fp32."""
        if low_precision_key(tree) is None:
            return None
        narrow = tree.bf16.enabled and tree.bf16.bf16_optimizer_states
        return cls(
            torch.bfloat16 if narrow else torch.float32,
            tree.bf16.enabled and tree.bf16.stochastic_rounding,
        )


class ElementBits:
    """Random bits of elements, drawn from the step, the parameter's name and the index in it: they
    depend on nothing else, neither on ranks nor on where an element lies.
    """

    def __init__(self, group: ShardedGroup, names: Sequence[str]) -> None:
        words = (hashlib.sha256(name.encode()).digest()[:8] for name in names)
        self._bases = [int.from_bytes(word, "big", signed=True) for word in words]
        self._master = group.master
        self._parts = group.table.of_shard(group.shard_rank)
        self._starts = [part.shard_start for part in self._parts]

    def of(self, step: int, start: int, end: int) -> torch.Tensor:
        """64 bits for each of the elements `start` to `end` of the shard: int64."""
        bits = torch.zeros_like(self._master[start:end], dtype=torch.int64)
        begin = max(0, bisect_right(self._starts, start) - 1)
        for part in self._parts[begin : bisect_left(self._starts, end)]:
            first, last = max(start, part.shard_start), min(end, part.shard_start + part.numel)
            if first < last:
                base = self._bases[part.param] + part.param_start + first - part.shard_start
                own = bits[first - start : last - start]
                torch.arange(last - first, out=own)
                own += _wrapped(base + step * _GAMMA)
        # The finalizer of SplitMix64: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number
        # Generators", OOPSLA 2014, in its variant 13. Shifts here keep the sign, so it is cut off.
        for shift, factor in zip((30, 27), _FACTORS, strict=True):
            bits ^= (bits >> shift) & ((1 << 64 - shift) - 1)
            bits *= factor
        return bits.bitwise_xor_((bits >> 31) & ((1 << 33) - 1))


def _wrapped(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def round_at_random(target: torch.Tensor, value: torch.Tensor, bits: torch.Tensor) -> None:
    """Round fp32 to bf16, up as often as it lies near the upper neighbour; `bits` are int32, below
    2^16. What bf16 can hold, and what is not finite, stays as it is.
    """
    cut = (value.view(torch.int32) + bits).bitwise_and_(-(1 << _BITS)).view(torch.float32)
    # The sum of bits wraps around for some NaNs.
    target.copy_(torch.where(value.isfinite(), cut, value))


class LowPrecisionStep:
    """Steps `groups`, of one flat master each, by an optimizer that updates every element from that
    element alone.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[ShardedGroup],
        names: Sequence[Sequence[str]],
        how: LowPrecision,
    ) -> None:
        self._optimizer, self._groups = optimizer, groups
        self._state_dtype = how.state_dtype
        if how.state_dtype == torch.float32 and not isinstance(optimizer, HostOptimizer):
            # torch would round fp32 moments to the masters' dtype.
            optimizer.register_load_state_dict_pre_hook(self._remember)
            optimizer.register_load_state_dict_post_hook(self._load_moments)
        self._loaded: dict[str, Any] = {}
        self._bits: list[ElementBits] | None = None
        if how.at_random:
            pairs = zip(groups, names, strict=True)
            self._bits = [ElementBits(group, theirs) for group, theirs in pairs]

    def _remember(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        self._loaded = state

    def _load_moments(self, optimizer: torch.optim.Optimizer) -> None:
        load_moments(optimizer, self._loaded)
        self._loaded = {}

    def step(self, number: int, run: Callable[[list[torch.Tensor]], None], runs: Runs) -> None:
        """Step all groups; `number` is the step's. `run` steps the optimizer, whose gradients are
        the tensors that it is given. Of masters in `runs` only these elements are updated.
        """
        optimizer = self._optimizer
        states, groups = optimizer.state, optimizer.param_groups
        masters = [options["params"] for options in groups]
        try:
            for index, group in enumerate(self._groups):
                for options in groups:
                    options["params"] = []
                own = states[group.masters[0]]
                parts = _Parts(optimizer, groups[index], own, run)
                self._step_group(index, number, parts, runs.get(group.masters[0]))
        finally:
            optimizer.state = states
            for options, params in zip(groups, masters, strict=True):
                options["params"] = params

    def _step_group(
        self, index: int, number: int, parts: _Parts, runs: Sequence[ElementRun] | None
    ) -> None:
        group = self._groups[index]
        parts.use_state(group.master, self._state_dtype)
        if runs is None:
            shared = shared_state(parts.state, group.master)
            whole = ElementRun(0, group.master.numel(), shared, is_new=not parts.state)
            self._step_run(index, number, parts, whole, copy.deepcopy(shared))
            parts.state.update(shared)
            return
        # Each part, and each run of one history, begins with the count from before the first.
        before = {id(run.shared): copy.deepcopy(run.shared) for run in runs}
        for run in runs:
            self._step_run(index, number, parts, run, before[id(run.shared)])

    def _step_run(
        self, index: int, number: int, parts: _Parts, run: ElementRun, before: Mapping[str, Any]
    ) -> None:
        group = self._groups[index]
        size = DEVICE_NUMEL if runs_ahead(group.master) else HOST_NUMEL
        for start in range(run.start, max(run.start + 1, run.end), size):
            part = slice(start, min(start + size, run.end))
            values = parts.step(group.master, group.grad, part, run, before)
            bits = None if self._bits is None else self._bits[index].of(number, start, part.stop)
            for place, (target, value) in enumerate(values):
                self._round(target, value, bits, place)

    def _round(
        self, target: torch.Tensor, value: torch.Tensor, bits: torch.Tensor | None, place: int
    ) -> None:
        if bits is None or target.dtype != torch.bfloat16:
            target.copy_(value)
        else:
            own = (bits >> _BITS * (place % _DRAWS)) & ((1 << _BITS) - 1)
            round_at_random(target, value, own.to(torch.int32))


class _Parts:
    """Lets an optimizer step parts of a master as if each were a parameter of its own."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        options: dict[str, Any],
        state: dict[str, Any],
        run: Callable[[list[torch.Tensor]], None],
    ) -> None:
        self._optimizer, self._options, self._run = optimizer, options, run
        self.state = state

    def use_state(self, master: torch.Tensor, dtype: torch.dtype) -> None:
        """Keep values of elements in `dtype`: what was loaded may have another."""
        self._dtype = dtype
        for key, value in self.state.items():
            if is_by_element(value, master):
                self.state[key] = value.to(dtype)

    def step(
        self,
        master: torch.Tensor,
        grad: torch.Tensor,
        part: slice,
        run: ElementRun,
        shared: Mapping[str, Any],
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Step a part of `run`, whose `shared` state was this; yields where values have to be
        written to, and these in fp32: the master's first, of the state only what is not there
        already.
        """
        param = torch.nn.Parameter(master[part].float())
        param.grad = grad[part].float()
        before: dict[str, Any] = {}
        if not run.is_new:
            before = {
                key: value[part].float()
                for key, value in self.state.items()
                if is_by_element(value, master)
            }
            before.update(copy.deepcopy(dict(shared)))
        self._options["params"] = [param]
        self._optimizer.state = defaultdict(dict, {param: before} if before else {})
        self._run([param.grad])
        yield master[part], param.data
        for key, value in self._optimizer.state[param].items():
            if not is_by_element(value, param):
                run.shared[key] = value
            elif value is not before.get(key) or self._dtype != torch.float32:
                if not is_by_element(self.state.get(key), master):
                    self.state[key] = torch.zeros_like(master, dtype=self._dtype)
                yield self.state[key][part], value
