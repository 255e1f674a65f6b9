"""accelerate and the Trainer, unmodified, train with layers cut or sequences split over ranks."""

import importlib.metadata
from pathlib import Path

import pytest

from .launching import launch, need

# fp32, relative to how far weights moved; sums are grouped otherwise over ranks. Data that ranks do
# not share, or gradients averaged over ranks that share layers, are off by 0.5 and more.
TOLERANCE_OF_LAYERS = 1e-4
# Eight steps of a learning rate of 0.1 carry that on (6e-5 found). Gradients that are clipped are
# off by 0.6.
TOLERANCE = 3e-4
# Earlier ones were not tried: accelerate learned of `sp_backend` late, and other functions make the
# masks of transformers.
OLDEST = {"accelerate": (1, 15), "transformers": (5, 23)}


def test_as_whole_layers(tmp_path: Path) -> None:
    need("transformers", "accelerate")
    # With more data-parallel ranks (processes=4) too; ranks that are given different batches raise.
    found = launch("train_with_tensor_parallel.py", tmp_path, "1")
    assert len(found) == 2
    assert {name: error for name, error in found.items() if error > TOLERANCE_OF_LAYERS} == {}


def test_as_whole_sequences(tmp_path: Path) -> None:
    need(*OLDEST)
    for name, oldest in OLDEST.items():
        version = importlib.metadata.version(name)
        if tuple(map(int, version.split(".")[:2])) < oldest:
            pytest.skip(f"{name} {version} was not tried")
    found = launch("train_with_sequence_parallel.py", tmp_path, "2", "3")
    assert len(found) == 4
    assert {name: error for name, error in found.items() if error > TOLERANCE} == {}
