"""Files of pipelines' checkpoints; how they go on in other divisions shows `test_matrix`.

Others train its small pipeline with tied weights, whose batches do not depend on how it is divided.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from unit.common import DistributedTest
from unit.models import drawn
from unit.v1.gathering import from_all_ranks

from . import runs
from .runs import BF16, TORCH_ADAM, by_name, decay_groups, differences, zero

WIDTH = 6
MICRO_BATCHES = 2
# Samples per step over all ranks: 1, 2, 3 or 4 of them take equally many per micro-batch.
BATCH = 24


def transposed(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The other use of the tied weight."""
    return nn.functional.linear(hidden, module.get_parameter("weight").T)


def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean squared error in fp32."""
    return (outputs.float() - labels.float()).pow(2).mean()


def layers() -> list[Any]:
    """Seven layers, one without parameters; the first and the last share a weight."""
    return [
        TiedLayerSpec("tied", nn.Linear, WIDTH, 5, bias=False),
        LayerSpec(nn.Linear, 5, 7),
        LayerSpec(nn.Tanh),
        LayerSpec(nn.Linear, 7, 3),
        LayerSpec(nn.Linear, 3, 7),
        LayerSpec(nn.Linear, 7, 5),
        TiedLayerSpec("tied", nn.Linear, WIDTH, 5, bias=False, forward_fn=transposed),
    ]


def configuration(replicas: int, **keys: Any) -> dict[str, Any]:
    """AdamW, a schedule, two micro-batches and clipping; with further keys."""
    rates = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2}
    return {
        "train_micro_batch_size_per_gpu": BATCH // replicas // MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.5,
        "steps_per_print": 1000,
        **TORCH_ADAM,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, **rates}},
        **keys,
    }


def make(stages: int, seed: int = 1, grouped: bool = False, **keys: Any) -> Any:
    """An engine over a fresh pipeline of all ranks; `grouped`: biases have a group, and one is
    empty, as adapters leave.
    """
    torch.manual_seed(seed)
    how = {"loss_fn": loss_fn, "seed_layers": True, "partition_method": "uniform"}
    module = PipelineModule(layers(), num_stages=stages, base_seed=seed, **how)
    parameters = [*decay_groups(module), {"params": []}] if grouped else None
    settings = configuration(dist.get_world_size() // stages, **keys)
    return deepspeed.initialize(model=module, model_parameters=parameters, config=settings)[0]


def draw(
    step: int, replicas: int, replica: int, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of a step of one data-parallel rank: its part of one rank's."""
    whole = drawn(100 + step, 2, BATCH, WIDTH)
    inputs, labels = (part.view(MICRO_BATCHES, replicas, -1, WIDTH)[:, replica] for part in whole)
    return [(x.to(dtype), y) for x, y in zip(inputs, labels, strict=True)]


def batches(engine: Any, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's micro-batches of a step."""
    parameter = next(engine.module.parameters(), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    return iter(draw(step, engine.grid.data_parallel_size, engine.grid.data_parallel_id, dtype))


def train(engine: Any, steps: int) -> list[tuple[float, float]]:
    """Loss and norm of each of the next steps."""
    seen = []
    for _ in range(steps):
        loss = engine.train_batch(batches(engine, engine.global_steps))
        seen.append((float(loss), float(engine.get_global_grad_norm())))
    return seen


def whole(engine: Any) -> dict[str, Any]:
    """`by_name` of all stages, on the first rank; who has something under a name has the same."""
    found = from_all_ranks(by_name(engine), first_alone=True)
    merged = {name: value for own in found for name, value in own.items()}
    for rank, own in enumerate(found):
        assert differences(own, {name: merged[name] for name in own}) == [], f"rank {rank} differs"
    return merged


class TestFiles(DistributedTest):
    world_size = 2

    def test_names_and_refusals(self, tmp_path: Path) -> None:
        engine = make(2, **BF16, **zero(1))
        train(engine, 1)
        engine.save_checkpoint(tmp_path, tag="t")
        folder = tmp_path / "t"
        # Layer 6 uses layer 0's module on another stage; layer 2 has no parameters, and a file as
        # upstream's.
        layers = [f"layer_0{index}-model_states.pt" for index in range(7)]
        parts = [f"mp_rank_0{stage}_model_states.pt" for stage in range(2)]
        shards = [f"bf16_zero_pp_rank_0_mp_rank_0{stage}_optim_states.pt" for stage in range(2)]
        hosts = [f"host_state_rank_{rank}.pt" for rank in range(2)]
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            ["manifest.json", *layers, *parts, *shards, *hosts]
        )
        model = torch.load(folder / parts[1], weights_only=True)
        assert model["module"] is None
        assert (model["dp_world_size"], model["mp_world_size"]) == (1, 2)
        assert model["checkpoint_parallel_dimensions"] == {"pp_degree": 2, "tp_degree": 1}
        with pytest.raises(ValueError, match="custom_load_fn: a PipelineModule"):
            engine.load_checkpoint(tmp_path, custom_load_fn=print)
        before = whole(engine)
        train(engine, 1)
        changed = whole(engine)
        runs.on_rank_0((folder / layers[5]).unlink)
        with runs.refused(r"layer_05-model_states\.pt is missing"):
            engine.load_checkpoint(tmp_path)
        # Nothing was loaded on the stage that had all its files either.
        assert differences(changed, whole(engine)) == []
        assert dist.get_rank() or differences(before, changed) != []
