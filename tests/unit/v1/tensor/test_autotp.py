"""AutoTP: models of transformers, cut over ranks by the configuration alone, train alike."""

import copy
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.runtime.sharding.model_slices import slices_of
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from unit.common import DistributedTest
from unit.v1.looping import each
from unit.v1.tensor.architectures import ARCHITECTURES, batch_of, model_of

pytest.importorskip("transformers")

LR = 0.5


def config(size: int, stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 2000},
        "tensor_parallel": {"autotp_size": size},
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        **more,
    }


def whole(engine: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What all tensor-parallel ranks have, put together."""
    slices = slices_of(engine.module)
    assert slices is not None
    return values | dict(slices.whole(engine.module, values))


def assert_close(what: str, found: torch.Tensor, right: torch.Tensor, scale: float) -> None:
    distance = (found - right).norm().item()
    assert distance <= 1e-5 * scale + 1e-7, f"{what}: off by {distance:.3g} of {scale:.3g}"


def check_training(
    engine: Any, model: torch.nn.Module, name: str, clip: float, steps: int = 2, micros: int = 1
) -> None:
    """Compare gradients, norm and parameters with one process after steps of `micros`."""
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=LR)
    for step in range(steps):
        data = batch_of(name, 2 * micros * engine.dp_world_size, step)
        optimizer.zero_grad()
        reference(**data).loss.backward()
        for micro in range(micros):
            at = 2 * (engine.get_data_parallel_rank() * micros + micro)
            own = {key: value[at : at + 2] for key, value in data.items()}
            engine.backward(engine(**own).loss)
            if micro + 1 < micros:
                engine.step()
        trained = {key: p for key, p in engine.module.named_parameters() if p.requires_grad}
        right = {key: reference.get_parameter(key).grad for key in trained}
        found = {key: safe_get_full_grad(param) for key, param in trained.items()}
        largest = max(grad.norm().item() for grad in right.values())
        for key, grad in whole(engine, found).items():
            assert_close(f"step {step}, gradient of {key}", grad, right[key], largest)
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip or 1e9).item()
        optimizer.step()
        engine.step()
        assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=1e-5)
        masters = {
            key: param.detach() if (value := safe_get_full_fp32_param(param)) is None else value
            for key, param in trained.items()
        }
        for key, value in whole(engine, masters).items():
            wanted = reference.get_parameter(key).detach()
            assert_close(f"step {step}, {key}", value, wanted, LR * largest + wanted.norm().item())


def start(name: str, size: int, stage: int, model: Any = None, **more: Any) -> Any:
    model = model_of(name) if model is None else model
    return deepspeed.initialize(model=model, config=config(size, stage, **more))[0]


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
        torch.manual_seed(dist.get_rank())  # the engine makes them alike
        model = model_of(name) if at_all_stages else model_of(name, num_hidden_layers=1)
        first = copy.deepcopy(model)
        for param in first.parameters():
            dist.broadcast(param.data, src=0)
        clip = 0.0 if stage == 1 else 0.1
        engine = start(name, 2, stage, model, gradient_clipping=clip)
        check_training(engine, first, name, clip, steps=2 if stage == 1 else 1)
        engine.destroy()

    @each(name=["phi3", "t5"], sizes=[(2, 1), (1, 4)])
    def check_resume_with_other_sizes(
        self, name: str, sizes: tuple[int, int], class_tmpdir: str
    ) -> None:
        # Kills: optimizer state or weights sliced otherwise than the model; whole weights put
        # together in the order of ranks where several lie behind one another.
        folder = f"{class_tmpdir}/{name}-{sizes[0]}"
        grouped = {"phi3": {"num_key_value_heads": 4}}.get(name, {})

        def resumable(ranks: int, seed: int) -> Any:
            torch.manual_seed(seed)
            keys = config(ranks, 1, train_micro_batch_size_per_gpu=ranks)
            keys["optimizer"]["params"]["momentum"] = 0.9
            return deepspeed.initialize(model=model_of(name, **grouped), config=keys)[0]

        def train(engine: Any, seed: int) -> None:
            count = 4 // engine.dp_world_size
            rank = engine.get_data_parallel_rank()
            data = batch_of(name, 4, seed).items()
            own = {key: value[count * rank : count * (rank + 1)] for key, value in data}
            engine.backward(engine(**own).loss)
            engine.step()

        first = resumable(sizes[0], 1)
        train(first, 0)
        first.save_checkpoint(folder)
        assert first.save_16bit_model(folder)
        saved = first._consolidated_16bit_state_dict()
        train(first, 1)
        went_on = first._consolidated_16bit_state_dict()
        first.destroy()
        second = resumable(sizes[1], 2)
        second.load_checkpoint(folder)
        loaded = second._consolidated_16bit_state_dict()
        train(second, 1)
        after = second._consolidated_16bit_state_dict()
        second.destroy()
        assert (saved is None) == (dist.get_rank() > 0)
        if saved is not None:
            exported = torch.load(f"{folder}/pytorch_model.bin")
            model_of(name, **grouped).load_state_dict(exported)  # the model's own names and shapes
            for key, value in saved.items():
                assert torch.equal(exported[key], value), key
                assert torch.equal(loaded[key], value), key
                moved = (went_on[key] - value).norm().item()
                off = (after[key] - went_on[key]).norm().item()
                assert off <= 1e-4 * moved + 1e-6, f"{key}: {off} of {moved}"
