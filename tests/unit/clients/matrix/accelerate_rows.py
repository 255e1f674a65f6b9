"""What users of accelerate do."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from accelerate.utils.deepspeed import get_active_deepspeed_plugin
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import deepspeed
from deepspeed.runtime.lr_schedules import WarmupDecayLR, WarmupLR
from unit.clients.matrix import reference
from unit.clients.matrix.reference import assert_close, layers, samples, sgd, trained, whole
from unit.clients.matrix.row import Row, main, scenario
from unit.clients.scripts import BATCH, DECAY, WARMUP, auto, begin
from unit.clients.test_parallel import TOLERANCE
from unit.clients.train_with_sequence_parallel import with_accelerate

ROWS: dict[str, Row] = {}
BATCHES = 8  # of an epoch, on each of two ranks
ADAM = {"type": "AdamW", "params": {**auto("lr", "weight_decay"), "torch_adam": True}}


def config(stage: int, **blocks: Any) -> dict[str, Any]:
    """A configuration as accelerate's pages write it."""
    zero = auto("reduce_bucket_size", "stage3_prefetch_bucket_size")
    zero |= auto("stage3_param_persistence_threshold", "stage3_gather_16bit_weights_on_model_save")
    zero |= dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), 1e9)
    zero |= {"overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9}
    quiet = {"steps_per_print": float("inf"), "wall_clock_breakdown": False}
    return {**BATCH, "zero_optimization": {"stage": stage, **zero}, **quiet, **blocks}


class Network(torch.nn.Module):
    """`layers`, with the hidden size that accelerate looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.config = type("Config", (), {"hidden_size": 12})()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs.to(self.layers[0].weight.dtype)).float()


def accelerator(precision: str = "no", accumulation: int = 1, **words: Any) -> Accelerator:
    """With a plugin of these words."""
    plugin = DeepSpeedPlugin(gradient_accumulation_steps=accumulation, **words)
    return Accelerator(
        mixed_precision=precision, deepspeed_plugin=plugin, gradient_accumulation_steps=accumulation
    )


def loader() -> DataLoader[Any]:
    """The samples in their order; accelerate gives each rank every second batch."""
    return DataLoader(samples(), batch_size=reference.MICRO)


class Prepared:
    """`Network`, its optimizer, its schedule if it has one, and the samples, prepared."""

    def __init__(
        self, made: Accelerator, make: Any = sgd, schedule: Any = None, data: bool = True
    ) -> None:
        self.made, model = made, Network()
        optimizer = make(model.parameters())
        more = [*([loader()] if data else []), *([schedule(optimizer)] if schedule else [])]
        self.model, self.optimizer, *more = made.prepare(model, optimizer, *more)
        self.batches, self.scheduler = [*more, None, None][:2]

    def train(self) -> list[float]:
        """One epoch of accelerate's documented loop; the rates of the steps."""
        made, rates = self.made, []
        for batch in self.batches:
            with made.accumulate(self.model):
                loss = reference.loss_of(self.model, batch)
                assert torch.isfinite(loss)
                made.backward(loss)
                if made.sync_gradients:
                    made.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                if self.scheduler is not None:
                    self.scheduler.step()
                self.optimizer.zero_grad()
            if made.sync_gradients:
                rates.append(self.optimizer.param_groups[0]["lr"])
        return rates

    def step(self, loss: torch.Tensor) -> None:
        """The same without accumulation."""
        self.made.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        return whole(self.model.module)


@scenario(ROWS, 0, 1, 2, 3)
def accumulation_equals_plain_torch(folder: Path, stage: int) -> None:
    for offload in ("none", "cpu") if stage == 3 else ("none",):
        for accumulation in (1, 2, 4):
            begin()
            words = {"zero_stage": stage, "gradient_clipping": 0.5, "offload_param_device": offload}
            found = Prepared(accelerator(accumulation=accumulation, **words))
            assert type(found.model) is deepspeed.DeepSpeedEngine
            found.train()
            wanted = trained(sgd, BATCHES // accumulation, accumulation, clip=0.5)
            assert_close(found.weights(), wanted)


@scenario(ROWS, 1, 2, 3)
def offloaded_optimizer(folder: Path, stage: int) -> None:
    adam = partial(torch.optim.AdamW, lr=reference.LR, weight_decay=0.1)
    words = {"gradient_clipping": 1.0, "offload_optimizer_device": "cpu"}
    words |= {"offload_param_device": "cpu" if stage == 3 else "none"}
    found = Prepared(accelerator(zero_stage=stage, **words), adam)
    assert type(found.model.optimizer.optimizer).__name__ == "DeepSpeedCPUAdam"
    found.train()
    assert_close(found.weights(), trained(adam, BATCHES, clip=1.0), 1e-5)


def halved(every: int) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """A schedule that halves the rate after so many steps."""
    return lambda optimizer: LambdaLR(optimizer, lambda step: 0.5 ** (step // every))


@scenario(ROWS, 0, 1, 2, 3)
def dummies_and_their_blocks(folder: Path, stage: int) -> None:
    """Every pairing of real and dummy optimizers and schedulers, and `warmup_num_steps: 0`."""
    adam = partial(DummyOptim, lr=reference.LR, weight_decay=0.1)
    for warmup in (0, 3):
        for block, expected in ((WARMUP, WarmupLR), (DECAY, WarmupDecayLR)):
            begin()
            made = accelerator(hf_ds_config=config(stage, optimizer=ADAM, scheduler=block))
            steps = {"total_num_steps": 8, "warmup_num_steps": warmup}
            found = Prepared(made, adam, partial(DummyScheduler, **steps))
            assert type(found.scheduler.scheduler) is expected
            assert type(found.model.lr_scheduler) is expected
            rates = found.train()
            assert len(rates) == BATCHES and max(rates) <= reference.LR + 1e-12
            if warmup == 0 and expected is WarmupLR:
                # accelerate 1.15 writes 1 for 0, others write 0.
                assert rates[1:] == [reference.LR] * (BATCHES - 1), rates
            written = made.deepspeed_config["scheduler"]["params"]["warmup_num_steps"]
            assert written in (warmup, max(1, warmup))
    # The configuration's optimizer with a schedule of the client's: a function of the optimizer.
    begin()
    made = accelerator(hf_ds_config=config(stage, optimizer=ADAM))
    schedule = partial(DummyScheduler, lr_scheduler_callable=halved(1))
    rates = Prepared(made, partial(DummyOptim, lr=reference.LR), schedule).train()
    assert rates[0] > rates[-1], rates
    # A client's optimizer and schedule, which accelerate steps once for each rank.
    begin()
    made = accelerator(hf_ds_config=config(stage, gradient_clipping=0.0))
    found = Prepared(made, sgd, halved(2))
    found.train()
    assert_close(found.weights(), trained(sgd, BATCHES, schedule=halved(1)))


@scenario(ROWS, 1, 2, 3)
def save_state_and_load_state(folder: Path, stage: int) -> None:
    results = []
    for resumed in (False, True):
        begin()
        made = accelerator("bf16", 2, hf_ds_config=config(stage, gradient_accumulation_steps=2))
        adam = partial(torch.optim.AdamW, lr=reference.LR)
        found = Prepared(made, adam, lambda made: LambdaLR(made, lambda step: 0.9**step))
        if resumed:
            made.load_state(str(folder / "state"))
        else:
            found.train()
            made.save_state(str(folder / "state"))
        found.train()
        results.append([*found.weights(), torch.tensor(found.scheduler.get_last_lr())])
    reference.assert_equal(*results)


@scenario(ROWS, 0, 1, 2, 3)
def half_precision(folder: Path, stage: int) -> None:
    fp16 = {"fp16": {"enabled": "auto", "initial_scale_power": 8}}
    for precision, blocks in (("bf16", {}), ("fp16", fp16)):
        begin()
        found = Prepared(accelerator(precision, hf_ds_config=config(stage, **blocks)))
        found.train()
        assert_close(found.weights(), trained(sgd, BATCHES, clip=1.0), 0.05)


@scenario(ROWS, 1, 2, 3)
def several_models_of_one_accelerator(folder: Path, stage: int) -> None:
    """One is trained and another only asked, and each has a plugin."""
    student = DeepSpeedPlugin(hf_ds_config=config(stage, gradient_clipping=0.0))
    teacher = DeepSpeedPlugin(hf_ds_config=config(3))
    made = Accelerator(deepspeed_plugins={"student": student, "teacher": teacher})
    assert get_active_deepspeed_plugin(made.state) is student
    found = Prepared(made)
    made.state.select_deepspeed_plugin("teacher")
    teacher.deepspeed_config["train_micro_batch_size_per_gpu"] = reference.MICRO
    asked = made.prepare(Network())
    asked.eval()
    made.state.select_deepspeed_plugin("student")
    for inputs, wanted in found.batches:
        with torch.no_grad():
            constant = asked(inputs).mean()
        found.step(torch.nn.functional.mse_loss(found.model(inputs), wanted) + constant)
    assert_close(found.weights(), trained(sgd, BATCHES))
    reference.assert_equal(whole(asked.module), reference.params_of(layers()))


@scenario(ROWS, 1, 2, 3)
def several_trained_models(folder: Path, stage: int) -> None:
    """Each with an accelerator."""
    first = DeepSpeedPlugin(hf_ds_config=config(2, gradient_clipping=0.0))
    second = DeepSpeedPlugin(hf_ds_config=config(stage, gradient_clipping=0.0))
    one = Accelerator(deepspeed_plugins={"first": first, "second": second})
    other = Accelerator()
    a = Prepared(one)
    other.state.select_deepspeed_plugin("second")
    second.deepspeed_config["train_micro_batch_size_per_gpu"] = reference.MICRO
    b = Prepared(other, partial(torch.optim.SGD, lr=reference.LR), data=False)
    assert one.deepspeed_engine_wrapped.engine is a.model
    assert other.deepspeed_engine_wrapped.engine is b.model
    for batch in a.batches:
        for found in (a, b):
            found.step(reference.loss_of(found.model, batch))
    assert_close(a.weights(), trained(sgd, BATCHES))
    assert_close(b.weights(), trained(partial(torch.optim.SGD, lr=reference.LR), BATCHES))


@scenario(ROWS, 0, 1, 2, 3)
def weights_out(folder: Path, stage: int) -> None:
    made = accelerator("bf16", zero_stage=stage, zero3_save_16bit_model=True)
    found = Prepared(made)
    found.train()
    values = found.weights()
    made.save_model(found.model, folder / "weights")
    state = made.get_state_dict(found.model)
    if made.is_main_process:
        reference.assert_equal(list(state.values()), values)
        assert (folder / "weights" / "model.safetensors").is_file()
    assert type(made.unwrap_model(found.model)) is Network
    made.free_memory()


@scenario(ROWS, 2, 3)
def configuration_from_a_file_and_the_environment(folder: Path, stage: int) -> None:
    file = folder / "config.json"
    if os.environ["RANK"] == "0":
        file.write_text(json.dumps(config(stage, steps_per_print=1, gradient_clipping=0.0)))
    deepspeed.comm.barrier()
    told = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    told |= {"ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file"}
    with mock.patch.dict(os.environ, told):
        found = Prepared(Accelerator())
        assert found.model.zero_optimization_stage() == stage
        found.train()
    assert_close(found.weights(), trained(sgd, BATCHES))


@scenario(ROWS, 0, 1, 2, 3)
def sequences_over_ranks(folder: Path, stage: int) -> None:
    worst = with_accelerate(stage)
    assert worst <= TOLERANCE, worst


if __name__ == "__main__":
    main(ROWS, begin, begin)
