"""Another number of tensor-parallel ranks: slices are joined and cut by the client's patterns."""

import os
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.checkpoint.ds_to_universal import main, parse_arguments
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.utils import groups
from unit.common import DistributedFixture, DistributedTest
from unit.v1.tensor.megatron import CUT, Mpu, Parallel, batch

from .runs import by_name, differences
from .test_universal import TAG, UNIVERSAL, convert

INFO = {
    "universal_checkpoint_version": 0.4,
    "parameter_with_row_parallelism_patterns": [r"row\.weight"],
    "tp_replicated_parameter_patterns": [r"norm\.", r"head\.", r"row\.bias"],
}
CASES: dict[str, dict[str, Any]] = {
    "fp32-0": {},
    "fp32-2": {"zero_optimization": {"stage": 2, "reduce_bucket_size": 30}},
    "bf16-1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
}


def make(size: int, frozen: bool = False, **keys: Any) -> Any:
    """An engine of `size` tensor-parallel ranks; `frozen` freezes the row-parallel weight."""
    groups.reset()
    mpu = Mpu(size)
    model = Parallel(mpu)
    if frozen:
        model.row.weight.requires_grad_(False)
    configuration = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        **keys,
    }
    trained: list[nn.Parameter] = [param for param in model.parameters() if param.requires_grad]
    return deepspeed.initialize(
        model=model, model_parameters=trained, config=configuration, mpu=mpu
    )[0]


def train(engine: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        x, labels = batch(engine.global_steps, 1, 1)
        loss = engine(x[0, 0].to(next(engine.module.parameters()).dtype), labels[0, 0])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def whole(engine: Any) -> dict[str, Any]:
    """`by_name`, whole over the tensor-parallel ranks."""
    found = {}
    for key, value in by_name(engine).items():
        name, group = key.split(".", 1)[1], groups.get_tensor_model_parallel_group()
        if name in CUT:
            parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group=group))]
            dist.all_gather(parts, value.contiguous(), group=group)
            value = torch.cat(parts, CUT[name])
        found[key] = value
    return found


class SavedSlices(DistributedFixture):
    """Runs of one and of two tensor-parallel ranks, with what they held and how they went on."""

    world_size = 2

    def run(self, class_tmpdir: Any) -> None:
        for case, keys in CASES.items():
            for size in (1, 2):
                folder = f"{class_tmpdir}/{case}-{size}"
                engine = make(size, frozen=case == "fp32-2", **keys)
                train(engine, 2)
                engine.save_checkpoint(folder, client_state={UNIVERSAL_CHECKPOINT_INFO: INFO})
                held = whole(engine)
                went_on = train(engine, 2)
                if dist.get_rank() == 0:
                    torch.save({"held": held, "went_on": went_on}, f"{folder}.pt")
                    convert(folder)


class TestOtherTensorRanks(DistributedTest):
    """Kills: a wrong dimension, replicated weights joined, rank 0's slice for all, frozen ones."""

    world_size = 2

    def test_goes_on(self, SavedSlices: Any, class_tmpdir: Any) -> None:
        for case in CASES:
            self.goes_on(str(class_tmpdir), case)

    def goes_on(self, folder: str, case: str) -> None:
        for size, saved, universal in (
            (1, 2, True),
            (2, 1, True),
            (1, 2, False),
            (2, 1, False),
            (2, 2, True),
        ):
            engine = make(
                size, frozen=case == "fp32-2", **CASES[case], **(UNIVERSAL if universal else {})
            )
            with torch.no_grad():
                for param in engine.module.parameters():
                    param.zero_()  # the frozen one, too, must be loaded
            path, client_state = engine.load_checkpoint(f"{folder}/{case}-{saved}")
            assert os.path.basename(path) == (TAG if universal else "global_step2")
            assert client_state[UNIVERSAL_CHECKPOINT_INFO] == INFO
            wanted = torch.load(f"{folder}/{case}-{saved}.pt", weights_only=False)
            assert differences(wanted["held"], whole(engine)) == [], (size, saved, universal)
            # Sums over ranks are rounded otherwise.
            tolerance = 1e-5 if case.startswith("fp32") else 2e-2
            assert train(engine, 2) == pytest.approx(wanted["went_on"], rel=tolerance)

    def test_refusals(self, tmpdir: Any) -> None:
        # Kills: slices concatenated in dimension 0 because nothing said otherwise, and trained on.
        engine = make(2)
        train(engine, 1)
        engine.save_checkpoint(str(tmpdir), tag="silent")
        wrong = {**INFO, "parameter_with_row_parallelism_patterns": []}
        engine.save_checkpoint(
            str(tmpdir), tag="wrong", client_state={UNIVERSAL_CHECKPOINT_INFO: wrong}
        )
        engine = make(1)
        train(engine, 1)
        before = whole(engine)
        with pytest.raises(
            CheckpointError, match="this run has 1: only the model knows.*universal_checkpoint_info"
        ):
            engine.load_checkpoint(str(tmpdir), tag="silent")
        with pytest.raises(
            CheckpointError,
            match=r"row\.weight has shape \(12, 4\).*does not say how row\.weight is sliced",
        ):
            engine.load_checkpoint(str(tmpdir), tag="wrong")
        assert differences(before, whole(engine)) == []
        if dist.get_rank() == 0:
            folders = ["--input_folder", f"{tmpdir}/silent", "--output_folder", f"{tmpdir}/{TAG}"]
            with pytest.raises(CheckpointError, match="The client saves it by save_checkpoint"):
                main(parse_arguments(folders))
        dist.barrier()
