"""What users of Lightning do: the Trainer."""

from __future__ import annotations

import io
import json
import os
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch.utils.data import DataLoader, DistributedSampler

import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.lr_schedules import WarmupLR
from unit.clients.matrix import reference
from unit.clients.matrix.reference import assert_close, layers, samples, sgd, trained, whole
from unit.clients.matrix.row import Row, main, scenario

ROWS: dict[str, Row] = {}
BATCHES = 8  # of an epoch, on each of two ranks


class Host(CUDAAccelerator):
    """The host in the place of CUDA devices, as docs/clients/lightning.md has it."""

    def setup_device(self, device: torch.device) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cpu", index) for index in devices]

    @staticmethod
    def is_available() -> bool:
        return True


class Regression(pl.LightningModule):
    """`layers`, trained by the optimizer that it is given."""

    def __init__(self, make: reference.Optimizers | None = sgd, late: bool = False) -> None:
        super().__init__()
        self.make = make
        self.losses: list[float] = []
        if not late:
            self.layers = layers()

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            self.layers = layers()

    def loss(self, batch: Any) -> torch.Tensor:
        return reference.loss_of(self.layers, batch)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("validation", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        self.log("tested", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.layers(batch[0])

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters()) if self.make else None


def loader() -> DataLoader[Any]:
    """Every second sample for each rank, in their order; Lightning's own sampler would shuffle."""
    rank = int(os.environ["RANK"])
    sampler = DistributedSampler(samples(), reference.RANKS, rank, shuffle=False)
    return DataLoader(samples(), batch_size=reference.MICRO, sampler=sampler)


def trainer(
    folder: Path, stage: int, strategy: dict[str, Any] | None = None, **words: Any
) -> pl.Trainer:
    """A Trainer on two ranks of the host."""
    options = strategy or {}
    options = options if "config" in options else {"stage": stage, **options}
    given = {"max_epochs": 1, "enable_checkpointing": False, "enable_model_summary": False}
    given |= {"accelerator": Host(), "devices": 2, "enable_progress_bar": False, "logger": False}
    made = DeepSpeedStrategy(process_group_backend="gloo", **options)
    return pl.Trainer(default_root_dir=folder, strategy=made, **{**given, **words})


def fit(folder: Path, stage: int, model: pl.LightningModule, **words: Any) -> pl.Trainer:
    """Train ``model`` on the samples."""
    made = trainer(folder, stage, **words)
    made.fit(model, loader())
    return made


def fit_as_plain(folder: Path, stage: int, model: Any, **words: Any) -> pl.Trainer:
    """The same, held to plain torch."""
    made = fit(folder, stage, model, **words)
    assert_close(whole(model), trained(steps=BATCHES))
    return made


@scenario(ROWS, 0, 1, 2, 3)
def fit_equals_plain_torch(folder: Path, stage: int) -> None:
    model = Regression(late=stage == 3)
    made = fit(folder, stage, model, accumulate_grad_batches=2, gradient_clip_val=0.5, max_epochs=2)
    assert isinstance(made.model, deepspeed.DeepSpeedEngine)
    if stage:
        assert isinstance(made.strategy.optimizers[0], DeepSpeedOptimizer)
    assert made.global_step == BATCHES
    assert_close(whole(model), trained(steps=BATCHES, accumulation=2, clip=0.5))


@scenario(ROWS, 1, 2, 3)
def half_precision(folder: Path, stage: int) -> None:
    for precision in ("bf16-mixed", "bf16-true"):
        model = Regression()
        fit(folder, stage, model, precision=precision, max_epochs=2)
        assert whole(model)[0].dtype is torch.bfloat16, precision
        assert_close(whole(model), trained(steps=2 * BATCHES), 0.1)


@scenario(ROWS, 1, 2, 3)
def fp16_skips_and_learns(folder: Path, stage: int) -> None:
    model = Regression()
    strategy = {"initial_scale_power": 8}
    fit(folder, stage, model, precision="16-mixed", strategy=strategy, max_epochs=2)
    assert whole(model)[0].dtype is torch.float16
    assert_close(whole(model), trained(steps=2 * BATCHES), 0.05)


@scenario(ROWS, 1, 2, 3)
def offload(folder: Path, stage: int) -> None:
    words = {"lr": reference.LR, "weight_decay": 0.1}
    model = Regression(partial(DeepSpeedCPUAdam, **words))
    strategy = {"offload_optimizer": True, "offload_parameters": stage == 3}
    fit(folder, stage, model, strategy=strategy)
    assert_close(whole(model), trained(partial(torch.optim.AdamW, **words), steps=BATCHES), 1e-5)


@scenario(ROWS, 1, 2, 3)
def optimizer_and_schedule_of_the_configuration(folder: Path, stage: int) -> None:
    rates = {"warmup_min_lr": reference.LR / 2, "warmup_max_lr": reference.LR}
    warmup = {**rates, "warmup_num_steps": 4, "warmup_type": "linear"}
    config = {**plan(stage), "train_micro_batch_size_per_gpu": reference.MICRO}
    config["optimizer"] = {"type": "SGD", "params": {"lr": reference.LR, "momentum": 0.9}}
    config["scheduler"] = {"type": "WarmupLR", "params": warmup}
    model = Regression(None)
    made = fit(folder, stage, model, strategy={"config": config})
    (schedule,) = made.lr_scheduler_configs
    assert isinstance(schedule.scheduler, WarmupLR)
    assert schedule.scheduler.get_last_lr() == [reference.LR]
    assert model.losses[-1] < model.losses[0]


def plan(stage: int, **zero: Any) -> dict[str, Any]:
    """A configuration, anew each time: Lightning writes into what it is given."""
    return {"zero_optimization": {"stage": stage, **zero}, "zero_allow_untested_optimizer": True}


def sharded() -> dict[str, Any]:
    """A strategy with which nothing stays whole between steps."""
    return {"config": plan(3, stage3_param_persistence_threshold=0)}


class Scheduled(Regression):
    """With a schedule that Lightning steps, and dropout."""

    def configure_model(self) -> None:
        super().configure_model()
        if not isinstance(self.layers[1], torch.nn.Dropout):
            self.layers.insert(1, torch.nn.Dropout(0.2))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=reference.LR)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        torch.manual_seed(self.global_step)  # Lightning does not keep dropout's generator
        return super().training_step(batch, index)


@scenario(ROWS, 1, 2, 3)
def resume_is_bit_equal(folder: Path, stage: int) -> None:
    straight = Scheduled()
    fit(folder, stage, straight, precision="bf16-mixed", max_epochs=2)
    first = fit(folder, stage, Scheduled(), precision="bf16-mixed", max_epochs=1)
    first.save_checkpoint(folder / "half.ckpt")
    second = Scheduled()
    made = trainer(folder, stage, precision="bf16-mixed", max_epochs=2)
    made.fit(second, loader(), ckpt_path=folder / "half.ckpt")
    assert made.current_epoch == 2 and made.global_step == 2 * BATCHES
    reference.assert_equal(whole(second), whole(straight))


@scenario(ROWS, 1, 2, 3)
def checkpoint_callback_and_best(folder: Path, stage: int) -> None:
    callback = pl.callbacks.ModelCheckpoint(folder, monitor="validation", save_last=True)
    model = Regression()
    made = trainer(folder, stage, enable_checkpointing=True, callbacks=[callback], max_epochs=2)
    made.fit(model, loader(), loader())
    assert Path(callback.best_model_path, "latest").is_file()
    before = made.validate(model, loader(), verbose=False)
    again = Regression()
    fresh = trainer(folder, stage)
    after = fresh.validate(again, loader(), ckpt_path=callback.best_model_path, verbose=False)
    assert before == after


@scenario(ROWS, 1, 2, 3)
def evaluation_alone(folder: Path, stage: int) -> None:
    wanted = reference.loss_of(layers(), samples()[:]).item()
    model = Regression(late=stage == 3)
    made = trainer(folder, stage)
    (validated,) = made.validate(model, loader(), verbose=False)
    (tested,) = made.test(model, loader(), verbose=False)
    assert abs(validated["validation"] - wanted) < 1e-5 > abs(tested["tested"] - wanted)
    predicted = torch.cat(made.predict(model, loader()))
    own = layers()(samples()[made.global_rank :: 2][0])
    assert torch.allclose(predicted, own, atol=1e-6)


class Manual(Regression):
    """Says itself when to go backward and to step."""

    def __init__(self, **words: Any) -> None:
        super().__init__(**words)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        optimizer = self.optimizers()
        loss = super().training_step(batch, index)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


@scenario(ROWS, 1, 2, 3)
def manual_optimization(folder: Path, stage: int) -> None:
    made = fit_as_plain(folder, stage, Manual(late=stage == 3))
    assert made.global_step == BATCHES


@scenario(ROWS, 3)
def configure_model_keeps_shards_only(folder: Path, stage: int) -> None:
    model = Regression(late=True)
    fit(folder, stage, model, strategy=sharded())
    assert {param.numel() for param in model.parameters()} == {0}
    assert_close(whole(model), trained(steps=BATCHES))


@scenario(ROWS, 1, 2, 3)
def one_model_fitted_tested_and_fitted_again(folder: Path, stage: int) -> None:
    model = Regression(late=stage == 3)
    made = fit(folder, stage, model, strategy=sharded() if stage == 3 else None)
    again = layers()
    for param, value in zip(again.parameters(), trained(steps=BATCHES), strict=True):
        param.data = value
    loss = reference.loss_of(again, samples()[:]).item()
    (tested,) = made.test(model, loader(), verbose=False)
    assert abs(tested["tested"] - loss) < 1e-5
    trainer(folder, stage, sharded() if stage == 3 else None).fit(model, loader())
    assert_close(whole(model), trained(steps=BATCHES, model=again))


@scenario(ROWS, 1, 2, 3)
def one_file_of_a_checkpoint(folder: Path, stage: int) -> None:
    model = Regression()
    made = fit(folder, stage, model, precision="bf16-mixed")
    made.save_checkpoint(folder / "all.ckpt")
    masters = whole(model)
    if made.global_rank == 0:
        convert_zero_checkpoint_to_fp32_state_dict(folder / "all.ckpt", folder / "one.pt")
        found = torch.load(folder / "one.pt", weights_only=False)
        names = [name for name, _ in model.named_parameters()]
        assert list(found["state_dict"]) == names and found["global_step"] == BATCHES
        for name, low in zip(names, masters, strict=True):
            assert found["state_dict"][name].dtype is torch.float32
            assert torch.equal(found["state_dict"][name].bfloat16(), low)
    made.strategy.barrier()
    if stage == 3:
        again = Regression()
        full = trainer(folder, stage, {"load_full_weights": True}, precision="bf16-mixed")
        full.test(again, loader(), ckpt_path=folder / "one.pt", verbose=False, weights_only=False)
        reference.assert_equal(whole(again), masters)


@scenario(ROWS, 1, 2, 3)
def frozen_parameters_are_left_out(folder: Path, stage: int) -> None:
    model = Regression()
    model.layers[0].requires_grad_(False)
    made = fit(folder, stage, model, strategy={"exclude_frozen_parameters": True})
    made.save_checkpoint(folder / "some.ckpt")
    assert torch.equal(whole(model)[0], layers()[0].weight)
    if made.global_rank == 0:
        name = "zero_pp_rank_0_mp_rank_00" if stage == 3 else "mp_rank_00"
        file = folder / "some.ckpt" / "checkpoint" / f"{name}_model_states.pt"
        state = torch.load(file, weights_only=False)
        assert not [key for key in state["module"] if key.startswith("layers.0")]
        assert any(key.startswith("layers.2") for key in state["module"])
    made.strategy.barrier()


class Recomputing(Regression):
    """Forgets activations."""

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, wanted = batch
        hidden = deepspeed.checkpointing.checkpoint(self.layers[:2], inputs)
        return torch.nn.functional.mse_loss(self.layers[2](hidden), wanted)


@scenario(ROWS, 1, 2, 3)
def activation_checkpointing(folder: Path, stage: int) -> None:
    strategy = {"cpu_checkpointing": True, "synchronize_checkpoint_boundary": True}
    fit_as_plain(folder, stage, Recomputing(), strategy=strategy)


@scenario(ROWS, 1, 2, 3)
def model_summary(folder: Path, stage: int) -> None:
    model = Regression(late=stage == 3)
    printed = io.StringIO()
    made = trainer(folder, stage, enable_model_summary=True)
    with redirect_stdout(printed):
        made.fit(model, loader())
    count = sum(param.numel() for param in layers().parameters())
    if made.global_rank == 0:
        text = printed.getvalue()
        assert f"{count} " in text, text
        if stage == 3:
            assert "Params per Device" in text, text


@scenario(ROWS, 2, 3)
def several_models_one_after_the_other(folder: Path, stage: int) -> None:
    for _ in range(2):
        fit_as_plain(folder, stage, Regression(late=stage == 3))


@scenario(ROWS, 2)
def configuration_from_a_file_and_the_environment(folder: Path, stage: int) -> None:
    file = folder / "config.json"
    if os.environ["RANK"] == "0":
        file.write_text(json.dumps(plan(2)))
    deepspeed.comm.barrier()
    with mock.patch.dict(os.environ, {"PL_DEEPSPEED_CONFIG_PATH": str(file)}):
        made = fit_as_plain(folder, stage, Regression())
    assert made.strategy.config["zero_optimization"] == {"stage": 2}


def begin() -> None:
    """The process group that all of them use."""
    deepspeed.init_distributed("gloo")


if __name__ == "__main__":
    main(ROWS, begin, lambda: None)
