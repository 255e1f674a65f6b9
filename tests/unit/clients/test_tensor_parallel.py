"""accelerate and the Trainer, unmodified, train with layers cut over ranks, save whole weights."""

from pathlib import Path

from unit.clients.launching import launch, need

# fp32, relative to how far weights moved; sums are grouped otherwise over ranks. Data that ranks do
# not share, or gradients averaged over ranks that share layers, are off by 0.5 and more.
TOLERANCE = 1e-4


def test_as_whole_layers(tmp_path: Path) -> None:
    need("transformers", "accelerate")
    # With more data-parallel ranks (processes=4) too; ranks that are given different batches raise.
    found = launch("train_with_tensor_parallel.py", tmp_path, "1")
    assert len(found) == 2
    assert {name: error for name, error in found.items() if error > TOLERANCE} == {}
