"""What users of Lightning do: Fabric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CUDAAccelerator
from lightning.fabric.strategies import DeepSpeedStrategy

import deepspeed
from unit.clients.matrix import reference
from unit.clients.matrix.lightning_rows import Host, begin, plan
from unit.clients.matrix.reference import assert_close, layers, samples, sgd, trained, whole
from unit.clients.matrix.row import Row, main, scenario

ROWS: dict[str, Row] = {}


class FabricHost(CUDAAccelerator):
    """`Host` for Fabric."""

    setup_device = Host.setup_device
    parse_devices = staticmethod(Host.parse_devices)
    get_parallel_devices = staticmethod(Host.get_parallel_devices)
    is_available = staticmethod(Host.is_available)


def fabric(stage: int, precision: Any = None, **words: Any) -> Fabric:
    """On two ranks of the host."""
    strategy = DeepSpeedStrategy(stage=stage, process_group_backend="gloo", **words)
    made = Fabric(accelerator=FabricHost(), devices=2, strategy=strategy, precision=precision)
    made.launch()
    return made


def set_up(made: Fabric) -> Any:
    """A model and its optimizer."""
    model = layers()
    return made.setup(model, sgd(model.parameters()))


def go_backward(made: Fabric, model: Any, batch: int, divided_by: int = 1) -> None:
    """With every second sample of a batch for each rank."""
    loss = reference.loss_of(model, reference.samples_of(batch, made.global_rank))
    made.backward(loss / divided_by, model=model)  # of several it has to be told which


def steps(made: Fabric, model: Any, optimizer: Any, first: int = 0, count: int = 4) -> None:
    """Optimizer steps, one with each batch."""
    for step in range(first, first + count):
        go_backward(made, model, step)
        optimizer.step()
        optimizer.zero_grad()


@scenario(ROWS, 0, 1, 2, 3)
def training_equals_plain_torch(folder: Path, stage: int) -> None:
    made = fabric(stage)
    with made.init_module():
        model, optimizer = set_up(made)
    steps(made, model, optimizer)
    # The key's default. At stage 0 Fabric steps torch's optimizer itself.
    assert_close(whole(model.module), trained(clip=1.0 if stage else 0.0))


@scenario(ROWS, 1, 2, 3)
def accumulation(folder: Path, stage: int) -> None:
    """As Fabric's pages have it: the optimizer steps after every second batch."""
    made = fabric(stage)
    model, optimizer = set_up(made)
    for step in range(4):
        for part in range(2):
            go_backward(made, model, 2 * step + part, divided_by=2)
        optimizer.step()
        optimizer.zero_grad()
    assert_close(whole(model.module), trained(steps=4, accumulation=2, clip=1.0))


@scenario(ROWS, 1, 2, 3)
def several_models(folder: Path, stage: int) -> None:
    made = fabric(stage)
    pairs = [set_up(made) for _ in range(2)]
    for step in range(4):
        for model, optimizer in pairs:
            steps(made, model, optimizer, step, 1)
    for number, (model, _) in enumerate(pairs):
        assert_close(whole(model.module), trained(clip=1.0))  # the key's default
        made.save(folder / str(number), {"model": model})
    both = {f"model{number}": model for number, (model, _) in enumerate(pairs)}
    with pytest.raises(ValueError, match="multiple DeepSpeed engine"):
        made.save(folder / "both", both)


@scenario(ROWS, 1, 2, 3)
def saving_and_going_on(folder: Path, stage: int) -> None:
    results = []
    for resumed in (False, True):
        made = fabric(stage, "bf16-mixed")
        torch.manual_seed(0)
        model = layers()
        model, optimizer = made.setup(model, torch.optim.AdamW(model.parameters(), lr=0.05))
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "steps": 0}
        if resumed:
            left = made.load(folder / "half", state)
            assert state["steps"] == 2 and "ds_version" in left, left
        else:
            steps(made, model, optimizer, 0, 2)
            made.save(folder / "half", {**state, "steps": 2})
        steps(made, model, optimizer, 2, 2)
        results.append(whole(model.module))
    reference.assert_equal(*results)


@scenario(ROWS, 1, 2, 3)
def a_model_alone(folder: Path, stage: int) -> None:
    """Without an optimizer, beside one that is trained."""
    made = fabric(stage)
    if stage == 3:
        asked = made.setup(layers())
        asked.eval()
        with torch.no_grad():
            found = asked(samples()[:4][0])
        assert torch.allclose(found, layers()(samples()[:4][0]), atol=1e-6)
    model, optimizer = set_up(made)
    steps(made, model, optimizer)
    assert_close(whole(model.module), trained(clip=1.0))  # the key's default


@scenario(ROWS, 1, 2, 3)
def clipping_is_the_configurations(folder: Path, stage: int) -> None:
    own = {"train_micro_batch_size_per_gpu": reference.MICRO, "gradient_clipping": 0.5}
    made = fabric(stage, config={**plan(stage), **own})
    model, optimizer = set_up(made)
    assert type(made.strategy.model) is deepspeed.DeepSpeedEngine
    with pytest.raises(NotImplementedError):
        made.clip_gradients(model, optimizer, max_norm=0.5)
    steps(made, model, optimizer)
    assert_close(whole(model.module), trained(clip=0.5))


if __name__ == "__main__":
    main(ROWS, begin, lambda: None)
