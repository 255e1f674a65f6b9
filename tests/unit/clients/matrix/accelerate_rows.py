"""What users of accelerate do."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from accelerate.utils.deepspeed import get_active_deepspeed_plugin
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import deepspeed
from deepspeed.runtime.lr_schedules import WarmupDecayLR, WarmupLR
from deepspeed.utils import groups
from unit.clients.matrix.reference import (
    LR,
    MICRO,
    assert_close,
    assert_equal,
    layers,
    samples,
    sgd,
    trained,
    whole,
)
from unit.clients.matrix.row import Row, main, scenario
from unit.clients.test_sequence_parallel import TOLERANCE
from unit.clients.train_with_sequence_parallel import with_accelerate

ROWS: dict[str, Row] = {}
BATCHES = 8  # of an epoch, on each of two ranks
ADAM = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
DECAY = {"type": "WarmupDecayLR", "params": {**WARMUP["params"], "total_num_steps": "auto"}}


def config(stage: int, **blocks: Any) -> dict[str, Any]:
    """A configuration as accelerate's pages write it."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": "auto",
        },
        "steps_per_print": float("inf"),
        "wall_clock_breakdown": False,
        **blocks,
    }


class Network(torch.nn.Module):
    """`layers`, with the hidden size that accelerate looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.config = type("Config", (), {"hidden_size": 12})()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs.to(self.layers[0].weight.dtype)).float()


def forget() -> None:
    """Accelerate's state of the process, with the backend that a host needs."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")


def accelerator(precision: str = "no", accumulation: int = 1, **words: Any) -> Accelerator:
    """With a plugin of these words."""
    plugin = DeepSpeedPlugin(gradient_accumulation_steps=accumulation, **words)
    return Accelerator(
        mixed_precision=precision, deepspeed_plugin=plugin, gradient_accumulation_steps=accumulation
    )


def loader() -> DataLoader[Any]:
    """The samples in their order; accelerate gives each rank every second batch."""
    return DataLoader(samples(), batch_size=MICRO)


def train(
    made: Accelerator, model: Any, optimizer: Any, scheduler: Any, batches: Any
) -> list[float]:
    """One epoch of accelerate's documented loop; the rates of the steps."""
    rates = []
    for inputs, wanted in batches:
        with made.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), wanted)
            assert torch.isfinite(loss)
            made.backward(loss)
            if made.sync_gradients:
                made.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        if made.sync_gradients:
            rates.append(optimizer.param_groups[0]["lr"])
    return rates


@scenario(ROWS, 0, 1, 2, 3)
def accumulation_equals_plain_torch(folder: Path, stage: int) -> None:
    offloads = ("none", "cpu") if stage == 3 else ("none",)
    for offload in offloads:
        for accumulation in (1, 2, 4):
            forget()
            made = accelerator(
                accumulation=accumulation,
                zero_stage=stage,
                gradient_clipping=0.5,
                offload_param_device=offload,
            )
            model = Network()
            optimizer = sgd(model.parameters())
            model, optimizer, batches = made.prepare(model, optimizer, loader())
            assert type(model) is deepspeed.DeepSpeedEngine
            train(made, model, optimizer, None, batches)
            steps = BATCHES // accumulation
            assert_close(whole(model.module), trained(sgd, steps, accumulation, clip=0.5))


@scenario(ROWS, 1, 2, 3)
def offloaded_optimizer(folder: Path, stage: int) -> None:
    def adam(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=LR, weight_decay=0.1)

    made = accelerator(
        zero_stage=stage,
        gradient_clipping=1.0,
        offload_optimizer_device="cpu",
        offload_param_device="cpu" if stage == 3 else "none",
    )
    model = Network()
    optimizer = adam(model.parameters())
    model, optimizer, batches = made.prepare(model, optimizer, loader())
    assert type(model.optimizer.optimizer).__name__ == "DeepSpeedCPUAdam"
    train(made, model, optimizer, None, batches)
    assert_close(whole(model.module), trained(adam, BATCHES, clip=1.0), 1e-5)


@scenario(ROWS, 0, 1, 2, 3)
def dummies_and_their_blocks(folder: Path, stage: int) -> None:
    """Every pairing of real and dummy optimizers and schedulers, and `warmup_num_steps: 0`."""
    for warmup in (0, 3):
        for block, expected in ((WARMUP, WarmupLR), (DECAY, WarmupDecayLR)):
            forget()
            plan = config(stage, optimizer=ADAM, scheduler=block)
            made = accelerator(hf_ds_config=plan)
            model = Network()
            optimizer = DummyOptim(model.parameters(), lr=LR, weight_decay=0.1)
            scheduler = DummyScheduler(optimizer, total_num_steps=8, warmup_num_steps=warmup)
            prepared = made.prepare(model, optimizer, loader(), scheduler)
            model, optimizer, batches, scheduler = prepared
            assert type(scheduler.scheduler) is expected and type(model.lr_scheduler) is expected
            rates = train(made, model, optimizer, scheduler, batches)
            assert len(rates) == BATCHES and max(rates) <= LR + 1e-12
            if warmup == 0 and expected is WarmupLR:
                # accelerate 1.15 writes 1 for 0, others write 0.
                assert rates[1:] == [LR] * (BATCHES - 1), rates
            written = made.deepspeed_config["scheduler"]["params"]["warmup_num_steps"]
            assert written in (warmup, max(1, warmup))
    # The configuration's optimizer with a schedule of the client's: a function of the optimizer.
    forget()
    made = accelerator(hf_ds_config=config(stage, optimizer=ADAM))
    model = Network()
    optimizer = DummyOptim(model.parameters(), lr=LR)
    scheduler = DummyScheduler(
        optimizer, lr_scheduler_callable=lambda made: LambdaLR(made, lambda step: 0.5**step)
    )
    model, optimizer, batches, scheduler = made.prepare(model, optimizer, loader(), scheduler)
    rates = train(made, model, optimizer, scheduler, batches)
    assert rates[0] > rates[-1], rates
    # A client's optimizer and schedule.
    forget()

    def halved(made: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(made, lambda step: 0.5 ** (step // 2))

    made = accelerator(hf_ds_config=config(stage, gradient_clipping=0.0))
    model = Network()
    optimizer = sgd(model.parameters())
    scheduler = halved(optimizer)
    model, optimizer, batches, scheduler = made.prepare(model, optimizer, loader(), scheduler)
    train(made, model, optimizer, scheduler, batches)
    # accelerate steps a client's schedule once for each rank.
    assert_close(
        whole(model.module),
        trained(sgd, BATCHES, schedule=lambda made: LambdaLR(made, lambda step: 0.5**step)),
    )


@scenario(ROWS, 1, 2, 3)
def save_state_and_load_state(folder: Path, stage: int) -> None:
    results = []
    for resumed in (False, True):
        forget()
        made = accelerator("bf16", 2, hf_ds_config=config(stage, gradient_accumulation_steps=2))
        model = Network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
        prepared = made.prepare(model, optimizer, loader(), scheduler)
        model, optimizer, batches, scheduler = prepared
        if resumed:
            made.load_state(str(folder / "state"))
        else:
            train(made, model, optimizer, scheduler, batches)
            made.save_state(str(folder / "state"))
        train(made, model, optimizer, scheduler, batches)
        results.append(whole(model.module))
        results[-1].append(torch.tensor(scheduler.get_last_lr()))
    assert_equal(*results)


@scenario(ROWS, 0, 1, 2, 3)
def half_precision(folder: Path, stage: int) -> None:
    for precision in ("bf16", "fp16"):
        forget()
        blocks = (
            {"fp16": {"enabled": "auto", "initial_scale_power": 8}} if precision == "fp16" else {}
        )
        made = accelerator(precision, hf_ds_config=config(stage, **blocks))
        model = Network()
        optimizer = sgd(model.parameters())
        model, optimizer, batches = made.prepare(model, optimizer, loader())
        train(made, model, optimizer, None, batches)
        assert_close(whole(model.module), trained(sgd, BATCHES, clip=1.0), 0.05)


@scenario(ROWS, 1, 2, 3)
def several_models_of_one_accelerator(folder: Path, stage: int) -> None:
    """One is trained and another only asked, and each has a plugin."""
    student = DeepSpeedPlugin(hf_ds_config=config(stage, gradient_clipping=0.0))
    teacher = DeepSpeedPlugin(hf_ds_config=config(3))
    made = Accelerator(deepspeed_plugins={"student": student, "teacher": teacher})
    assert get_active_deepspeed_plugin(made.state) is student
    model = Network()
    optimizer = sgd(model.parameters())
    model, optimizer, batches = made.prepare(model, optimizer, loader())
    made.state.select_deepspeed_plugin("teacher")
    teacher.deepspeed_config["train_micro_batch_size_per_gpu"] = MICRO
    asked = made.prepare(Network())
    asked.eval()
    made.state.select_deepspeed_plugin("student")
    for inputs, wanted in batches:
        with torch.no_grad():
            constant = asked(inputs).mean()
        loss = torch.nn.functional.mse_loss(model(inputs), wanted) + constant
        made.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert_close(whole(model.module), trained(sgd, BATCHES))
    assert_equal(whole(asked.module), [param.detach() for param in layers().parameters()])


@scenario(ROWS, 1, 2, 3)
def several_trained_models(folder: Path, stage: int) -> None:
    """Each with an accelerator."""
    first = DeepSpeedPlugin(hf_ds_config=config(2, gradient_clipping=0.0))
    second = DeepSpeedPlugin(hf_ds_config=config(stage, gradient_clipping=0.0))
    plugins = {"first": first, "second": second}
    one = Accelerator(deepspeed_plugins=plugins)
    other = Accelerator()
    model_a = Network()
    optimizer_a = sgd(model_a.parameters())
    model_a, optimizer_a, batches = one.prepare(model_a, optimizer_a, loader())
    other.state.select_deepspeed_plugin("second")
    second.deepspeed_config["train_micro_batch_size_per_gpu"] = MICRO
    model_b = Network()
    optimizer_b = torch.optim.SGD(model_b.parameters(), lr=LR)
    model_b, optimizer_b = other.prepare(model_b, optimizer_b)
    assert one.deepspeed_engine_wrapped.engine is model_a
    assert other.deepspeed_engine_wrapped.engine is model_b
    pairs = ((one, model_a, optimizer_a), (other, model_b, optimizer_b))
    for inputs, wanted in batches:
        for made, model, optimizer in pairs:
            loss = torch.nn.functional.mse_loss(model(inputs), wanted)
            made.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert_close(whole(model_a.module), trained(sgd, BATCHES))
    plain = trained(lambda params: torch.optim.SGD(params, lr=LR), BATCHES)
    assert_close(whole(model_b.module), plain)


@scenario(ROWS, 0, 1, 2, 3)
def weights_out(folder: Path, stage: int) -> None:
    made = accelerator("bf16", zero_stage=stage, zero3_save_16bit_model=True)
    model = Network()
    optimizer = sgd(model.parameters())
    model, optimizer, batches = made.prepare(model, optimizer, loader())
    train(made, model, optimizer, None, batches)
    values = whole(model.module)
    made.save_model(model, folder / "weights")
    state = made.get_state_dict(model)
    if made.is_main_process:
        assert_equal(list(state.values()), values)
        assert (folder / "weights" / "model.safetensors").is_file()
    assert type(made.unwrap_model(model)) is Network
    made.free_memory()


@scenario(ROWS, 2, 3)
def configuration_from_a_file_and_the_environment(folder: Path, stage: int) -> None:
    file = folder / "config.json"
    if os.environ["RANK"] == "0":
        file.write_text(json.dumps(config(stage, steps_per_print=1, gradient_clipping=0.0)))
    deepspeed.comm.barrier()
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(file)
    os.environ["ACCELERATE_CONFIG_DS_FIELDS"] = "deepspeed_config_file"
    try:
        made = Accelerator()
        model = Network()
        optimizer = sgd(model.parameters())
        model, optimizer, batches = made.prepare(model, optimizer, loader())
        assert model.zero_optimization_stage() == stage
        train(made, model, optimizer, None, batches)
    finally:
        del os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"]
        del os.environ["ACCELERATE_CONFIG_DS_FIELDS"]
    assert_close(whole(model.module), trained(sgd, BATCHES))


@scenario(ROWS, 0, 1, 2, 3)
def sequences_over_ranks(folder: Path, stage: int) -> None:
    worst = with_accelerate(stage)
    groups.reset()
    assert worst <= TOLERANCE, worst


if __name__ == "__main__":
    main(ROWS, forget, forget)
