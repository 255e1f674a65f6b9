"""The tracker of named random states, and the seeds of tensor-parallel ranks."""

from collections.abc import Iterator

import pytest
import torch

from deepspeed.runtime.activation_checkpointing import checkpointing, settings


class Unit:
    """An mpu that is tensor-parallel rank `rank`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def get_tensor_model_parallel_rank(self) -> int:
        return self._rank


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    settings._current, settings._is_configured = settings.Settings(), False
    checkpointing.get_cuda_rng_tracker().reset()


def drawn(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.rand(4)


def test_fork_draws_from_the_named_state_and_goes_on_there() -> None:
    # Kills: drawing from the accelerator's own state, moving it, or starting the named one over
    # each time.
    tracker = checkpointing.CudaRNGStatesTracker()
    torch.manual_seed(1)
    tracker.add("mine", 7)
    with tracker.fork("mine"):
        first = torch.rand(2)
    with tracker.fork("mine"):
        second = torch.rand(2)
    assert torch.equal(torch.cat([first, second]), drawn(7))
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    with tracker.fork("mine"):
        torch.rand(2)
    assert torch.equal(torch.rand(4), expected)


def test_fork_restores_after_an_error() -> None:
    tracker = checkpointing.CudaRNGStatesTracker()
    tracker.add("mine", 7)
    torch.manual_seed(1)
    with pytest.raises(KeyError), tracker.fork("mine"):
        raise KeyError
    assert torch.equal(torch.rand(4), drawn(1))


def test_names_and_seeds_are_taken_once() -> None:
    tracker = checkpointing.CudaRNGStatesTracker()
    tracker.add("mine", 7)
    with pytest.raises(ValueError, match="seed 7 already exists"):
        tracker.add("other", 7)
    with pytest.raises(ValueError, match="'mine' already exists"):
        tracker.add("mine", 8)
    with pytest.raises(ValueError, match="'none' is not added"), tracker.fork("none"):
        pass
    states = tracker.get_states()
    tracker.reset()
    assert tracker.get_states() == {}
    tracker.set_states(states)
    with tracker.fork("mine"):
        assert torch.equal(torch.rand(4), drawn(7))


@pytest.mark.parametrize("rank", [0, 3])
def test_seeds_of_tensor_parallel_ranks(rank: int) -> None:
    # Kills: equal masks for the parts of a split activation, or different ones for a replicated
    # one. 2718 is Megatron's offset.
    checkpointing.configure(Unit(rank))
    tracker = checkpointing.get_cuda_rng_tracker()
    checkpointing.model_parallel_cuda_manual_seed(100)
    replicated = torch.rand(4)
    with tracker.fork():
        split = torch.rand(4)
    assert torch.equal(replicated, drawn(100))
    assert torch.equal(split, drawn(100 + 2718 + rank))
    torch.manual_seed(1)
    checkpointing.model_parallel_reconfigure_tp_seed(200)
    with tracker.fork():
        split = torch.rand(4)
    assert torch.equal(torch.rand(4), drawn(1))
    assert torch.equal(split, drawn(200 + 2718 + rank))
