"""AutoTP: models of transformers, cut over ranks by the configuration alone, train alike."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.ds_to_universal import main, parse_arguments
from deepspeed.runtime.sharding.model_slices import slices_of
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from unit.common import DistributedTest
from unit.models import config_of, seeded, sgd
from unit.one_process import OneProcess, train
from unit.v1.looping import each
from unit.v1.tensor.architectures import ARCHITECTURES, batch_of, model_of

pytest.importorskip("transformers")

LR = 0.5


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """At stage 3 some parameters stay whole, and some do not."""
    block: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 2000, **more}
    if stage == 3:
        block.setdefault("stage3_param_persistence_threshold", 50)
        block["stage3_gather_16bit_weights_on_model_save"] = True
    return block


def config(size: int, stage: int, rows: int = 2, **more: Any) -> dict[str, Any]:
    cut = {"autotp_size": size}
    keys = {"optimizer": sgd(LR), "tensor_parallel": cut, "zero_optimization": zero(stage), **more}
    return config_of(stage, rows, **keys)


def alike(make: Callable[..., Any], *args: Any, **more: Any) -> tuple[Any, Any]:
    """A model of other weights on each rank, and the first rank's."""
    model = seeded(make, *args, seed=dist.get_rank(), **more)
    first = copy.deepcopy(model)
    for param in first.parameters():
        dist.broadcast(param.data, src=0)
    return model, first


def start(model: Any, size: int, stage: int, **more: Any) -> Any:
    return deepspeed.initialize(model=model, config=config(size, stage, **more))[0]


def whole(engine: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What all tensor-parallel ranks have, put together."""
    slices = slices_of(engine.module)
    assert slices is not None
    return values | dict(slices.whole(engine.module, values))


def assert_close(what: str, found: torch.Tensor, right: torch.Tensor, scale: float) -> None:
    distance = (found - right).norm().item()
    assert distance <= 1e-5 * scale + 1e-7, f"{what}: off by {distance:.3g} of {scale:.3g}"


def called(model: Any, data: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**data).loss


def own_part(engine: Any, samples: int, seed: int, parts: int = 1, part: int = 0) -> dict[str, Any]:
    """This data-parallel rank's of a batch, or one of `parts` micro-batches of it."""
    count = samples // (engine.dp_world_size * parts)
    at = count * (engine.get_data_parallel_rank() * parts + part)
    return {key: value[at : at + count] for key, value in batch_of(samples, seed).items()}


def check_training(
    engine: Any,
    model: torch.nn.Module,
    clip: float = 0.0,
    steps: int = 2,
    micros: int = 1,
    ends: bool = True,
) -> None:
    """Compare gradients, norm and parameters with one process after steps of `micros`."""
    process = OneProcess(copy.deepcopy(model), LR, called, clip)
    samples = 2 * micros * engine.dp_world_size
    for step in range(steps):
        process.backward([batch_of(samples, step)])
        for micro in range(micros):
            if micro:
                engine.step()
            engine.backward(called(engine, own_part(engine, samples, step, micros, micro)))
        trained = {key: p for key, p in engine.module.named_parameters() if p.requires_grad}
        right = process.grads()
        found = {key: safe_get_full_grad(param) for key, param in trained.items()}
        largest = max(right[key].norm().item() for key in trained)
        for key, grad in whole(engine, found).items():
            assert_close(f"step {step}, gradient of {key}", grad, right[key], largest)
        process.update()
        engine.step()
        assert float(engine.get_global_grad_norm()) == pytest.approx(process.norm.item(), rel=1e-5)
        masters = {
            key: param.detach() if (value := safe_get_full_fp32_param(param)) is None else value
            for key, param in trained.items()
        }
        params = process.params()
        for key, value in whole(engine, masters).items():
            wanted = params[key]
            assert_close(f"step {step}, {key}", value, wanted, LR * largest + wanted.norm().item())
    if ends:
        engine.destroy()


# Ranks that share layers and stage of the engine that saves, and of the one that loads, which may
# read a universal checkpoint.
Runs = tuple[tuple[int, int], tuple[int, int], bool]


def goes_on(
    tmpdir: str,
    make: Callable[[], Any],
    saved_by: tuple[int, int],
    loaded_by: tuple[int, int],
    universal: bool = False,
) -> None:
    """Save, load and go on: whole weights are the saved ones, and the step after as without."""
    folder = f"{tmpdir}/{saved_by}"

    def engine_of(size: int, stage: int, seed: int) -> Any:
        keys = config(size, stage, rows=size)
        keys["checkpoint"] = {"load_universal": universal and seed == 2}
        keys["optimizer"]["params"]["momentum"] = 0.9
        return deepspeed.initialize(model=seeded(make, seed=seed), config=keys)[0]

    def weights_around_a_step(engine: Any) -> list[Any]:
        before = engine._zero3_consolidated_16bit_state_dict()
        train(engine, [own_part(engine, 4, 1)], called)
        after = engine._zero3_consolidated_16bit_state_dict()
        engine.destroy()
        assert (before is None) == (dist.get_rank() > 0)
        return [before, after]

    if not Path(folder).exists():
        engine = engine_of(*saved_by, seed=1)
        train(engine, [own_part(engine, 4, 0)], called)
        engine.save_checkpoint(folder, tag="t")
        assert engine.save_16bit_model(folder)
        held = weights_around_a_step(engine)
        if dist.get_rank() == 0:
            torch.save(held, f"{folder}/held")
        dist.barrier()
    if universal and dist.get_rank() == 0:
        main(parse_arguments(["--input_folder", f"{folder}/t", "--output_folder", f"{folder}/u"]))
    dist.barrier()
    engine = engine_of(*loaded_by, seed=2)
    engine.load_checkpoint(folder, tag="u" if universal else "t")
    found = weights_around_a_step(engine)
    if dist.get_rank() > 0:
        return
    exported = torch.load(f"{folder}/pytorch_model.bin")
    make().load_state_dict(exported)  # its names and shapes
    saved, went_on = torch.load(f"{folder}/held")
    for key, value in saved.items():
        assert torch.equal(exported[key], value) and torch.equal(found[0][key], value), key
        moved = (went_on[key] - value).norm().item()
        off = (found[1][key] - went_on[key]).norm().item()
        assert off <= (0 if saved_by == loaded_by else 1e-4 * moved + 1e-6), f"{key}: {off}"


class TestArchitectures(DistributedTest):
    """One group of ranks for all: to start them takes longer than a check."""

    world_size = 4

    def test_four_ranks(self, class_tmpdir: str) -> None:
        self.check_train_like_one_process()
        self.check_resume_with_other_sizes(class_tmpdir=class_tmpdir)

    @each(name=list(ARCHITECTURES), stage=[0, 1, 2])
    def check_train_like_one_process(self, name: str, stage: int) -> None:
        # Kills: a layer cut by columns instead of rows, or in one piece where several lie behind
        # one another; heads, alibi or position bias of other ranks; a norm of heads with its own
        # rank's gradient; slices that are not marked; a bias added on every rank; weights of ranks
        # that were initialized otherwise.
        at_all_stages = name in ("qwen3", "gpt2", "t5")
        if stage < 2 and not at_all_stages:
            return
        more = {} if at_all_stages else {"num_hidden_layers": 1}
        model, first = alike(model_of, name, **more)  # the engine makes them alike
        clip = 0.0 if stage == 1 else 0.1
        engine = start(model, 2, stage, gradient_clipping=clip)
        check_training(engine, first, clip, steps=2 if stage == 1 else 1)

    @each(name=["phi3", "t5"], sizes=[(2, 1), (1, 4)])
    def check_resume_with_other_sizes(
        self, name: str, sizes: tuple[int, int], class_tmpdir: str
    ) -> None:
        # Kills: optimizer state or weights sliced otherwise than the model; whole weights put
        # together in the order of ranks where several lie behind one another.
        heads = {"num_key_value_heads": 4} if name == "phi3" else {}
        runs = [(size, 1) for size in sizes]
        goes_on(f"{class_tmpdir}/{name}", lambda: model_of(name, **heads), *runs)
