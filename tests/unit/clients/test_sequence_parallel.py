"""accelerate and the Trainer, unmodified, train with split sequences as torch with whole ones."""

import importlib.metadata
from pathlib import Path

import pytest

from unit.clients.launching import launch, need

# fp32, relative to how far weights moved: sums are grouped otherwise over ranks, and eight steps of
# a learning rate of 0.1 carry that on (6e-5 found). Gradients that are clipped are off by 0.6.
TOLERANCE = 3e-4
# Earlier ones were not tried: accelerate learned of `sp_backend` late, and other functions make the
# masks of transformers.
OLDEST = {"accelerate": (1, 15), "transformers": (5, 23)}


def test_as_whole_sequences(tmp_path: Path) -> None:
    need(*OLDEST)
    for name, oldest in OLDEST.items():
        version = importlib.metadata.version(name)
        if tuple(map(int, version.split(".")[:2])) < oldest:
            pytest.skip(f"{name} {version} was not tried")
    found = launch("train_with_sequence_parallel.py", tmp_path, "2", "3")
    assert len(found) == 4
    assert {name: error for name, error in found.items() if error > TOLERANCE} == {}
