"""What recomputation must find as forward found it: random states and autocast.

Owns the tracker of named random states, with which tensor-parallel ranks draw different numbers in
one place and equal ones in another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import settings

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"  # upstream's name, as the tracker's
MODEL_PARALLEL_SEED_OFFSET = 2718


class CudaRNGStatesTracker:
    """Random states of the accelerator (on the host the host's) by name, to draw from in `fork`."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Make a state from a seed; the accelerator's own stays as it is. A name or a seed that is
        taken is refused: two equal states would draw the same numbers.
        """
        if seed in self.seeds_:
            raise ValueError(
                f"random state {name!r}: seed {seed} already exists; take another, or call reset() "
                "first"
            )
        if name in self.states_:
            raise ValueError(
                f"random state {name!r} already exists; take another name, or call reset() first"
            )
        accelerator = get_accelerator()
        outer = accelerator.get_rng_state()
        try:
            accelerator.manual_seed(seed)
            self.states_[name] = accelerator.get_rng_state()
        finally:
            accelerator.set_rng_state(outer)
        self.seeds_.add(seed)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Draw from the named state, which goes on from there the next time."""
        if name not in self.states_:
            raise ValueError(
                f"random state {name!r} is not added (there are {sorted(self.states_)}); call "
                "deepspeed.checkpointing.model_parallel_cuda_manual_seed(seed), or add(name, seed)"
            )
        accelerator = get_accelerator()
        outer = accelerator.get_rng_state()
        accelerator.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = accelerator.get_rng_state()
            accelerator.set_rng_state(outer)


_CUDA_RNG_STATE_TRACKER = CudaRNGStatesTracker()


def _set_cuda_rng_state(new_state: torch.Tensor, device: int = -1) -> None:
    """Make `new_state` the random state of a device; -1 is the current one. For scripts."""
    get_accelerator().set_rng_state(new_state, None if device == -1 else device)


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the process's tracker."""
    return _CUDA_RNG_STATE_TRACKER


def _model_parallel_seed(seed: int) -> int:
    return seed + MODEL_PARALLEL_SEED_OFFSET + settings.current().group_rank


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the accelerator alike on all tensor-parallel ranks, and the state "model-parallel-rng"
    differently on each.

    Dropout of replicated activations draws from the first; dropout of activations that are split
    over ranks belongs under `get_cuda_rng_tracker().fork()`.
    """
    _CUDA_RNG_STATE_TRACKER.reset()
    get_accelerator().manual_seed(seed)
    _CUDA_RNG_STATE_TRACKER.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, _model_parallel_seed(seed))


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed "model-parallel-rng" alone anew, differently on each tensor-parallel rank."""
    with _CUDA_RNG_STATE_TRACKER.fork():
        get_accelerator().manual_seed(_model_parallel_seed(seed))


class RandomStates:
    """The random states of this moment: the host's, the accelerator's, the tracker's."""

    def __init__(self) -> None:
        accelerator = get_accelerator()
        self._host = torch.get_rng_state()
        self._device = accelerator.get_rng_state() if accelerator.device_name() != "cpu" else None
        self._tracked = _CUDA_RNG_STATE_TRACKER.get_states()

    def restore(self) -> None:
        """Make them the current ones."""
        torch.set_rng_state(self._host)
        if self._device is not None:
            get_accelerator().set_rng_state(self._device)
        _CUDA_RNG_STATE_TRACKER.set_states(self._tracked)


class Surroundings:
    """What a function may depend on beside its arguments, captured when this is made."""

    def __init__(self) -> None:
        self._random = RandomStates()
        kinds = {"cpu", torch.device(get_accelerator().current_device_name()).type}
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted(kinds)
        ]
        self._caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within it, everything is as captured; afterwards, as it was before entering."""
        outside = RandomStates()
        self._random.restore()
        try:
            with ExitStack() as stack:
                for kind, dtype, enabled in self._autocast:
                    mode = torch.autocast(
                        kind, dtype=dtype, enabled=enabled, cache_enabled=self._caches
                    )
                    stack.enter_context(mode)
                yield
        finally:
            outside.restore()
