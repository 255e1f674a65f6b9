"""What users of transformers.Trainer do, compared with the same Trainer without DeepSpeed."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers.training_args
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments
from transformers.integrations import deepspeed as integration

import deepspeed
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint
from unit.clients.matrix.reference import assert_close, assert_equal, params_of, whole
from unit.clients.matrix.row import Row, main, scenario
from unit.clients.scripts import ADAMW, BATCH, DECAY, TRAINER, auto, begin
from unit.clients.small_models import VOCABULARY, Counting, llama
from unit.clients.test_parallel import TOLERANCE
from unit.clients.train_with_sequence_parallel import with_trainer

ROWS: dict[str, Row] = {}
STEPS, WARMUP, LR = 4, 2, 1e-2
DATA = Counting(64, 12)
Schedules = tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None]
Make = Callable[[PreTrainedModel], Schedules]
NOTHING: Make = lambda model: (None, None)  # noqa: E731  the Trainer makes its own
# Refused on a host without a GPU; only this gate is opened, bf16 itself works there.
transformers.training_args.is_torch_bf16_gpu_available = lambda: True


def built() -> PreTrainedModel:
    """A model from its configuration; sharded at once, transformers draws other numbers."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama(heads=2, pad_token_id=0))


def loaded(folder: Path, **words: Any) -> PreTrainedModel:
    """The same model each time, from a file; sharded if a configuration of stage 3 is there."""
    start = folder / "start"
    if not start.exists():
        kept = integration._hf_deepspeed_config_weak_ref
        integration.unset_hf_deepspeed_config()
        model = built()
        integration._hf_deepspeed_config_weak_ref = kept
        deepspeed.comm.barrier()
        if deepspeed.comm.get_rank() == 0:
            model.save_pretrained(start, max_shard_size="5KB")
        deepspeed.comm.barrier()
    return AutoModelForCausalLM.from_pretrained(start, **words)


def config(stage: int, *, optimizer: bool = False, scheduler: bool = False, **zero: Any) -> Any:
    """As transformers' pages write it."""
    blocks = {"optimizer": ADAMW} if optimizer else {}
    return {
        **BATCH,
        "fp16": {"enabled": "auto", "initial_scale_power": 8},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            **auto("reduce_bucket_size", "stage3_prefetch_bucket_size"),
            **{"stage": stage, "stage3_param_persistence_threshold": 0},
            **{
                "stage3_max_live_parameters": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            **zero,
        },
        **blocks,
        **({"scheduler": DECAY} if scheduler else {}),
    }


def forget(deepspeed_is_used: bool = True) -> None:
    """What accelerate and transformers keep for the process."""
    integration.unset_hf_deepspeed_config()
    begin(deepspeed_is_used)


def arguments(folder: Path, plan: dict[str, Any] | None, **words: Any) -> TrainingArguments:
    """Of a run with a configuration, or without DeepSpeed."""
    forget(plan is not None)
    given = {"output_dir": str(folder), "deepspeed": plan, "seed": 3, "max_steps": STEPS}
    given |= {"per_device_train_batch_size": 2, "learning_rate": LR, "logging_steps": 1}
    given |= {"save_strategy": "no", **({"use_cpu": True} if plan is None else {})}
    return TrainingArguments(**{**TRAINER, **given, **words})


def warmed(model: PreTrainedModel) -> Schedules:
    """The optimizer and the schedule of `config`, for a run without DeepSpeed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    return optimizer, WarmupDecayLR(optimizer, STEPS, 0.0, LR, WARMUP)


def run(
    folder: Path, plan: Any, resume: bool = False, make: Make = NOTHING, **words: Any
) -> Trainer:
    """Train `loaded`, or go on; returns the Trainer. Without a ``plan``, without DeepSpeed."""
    given, model = arguments(folder, plan, **words), loaded(folder)
    made = Trainer(model, given, train_dataset=DATA, eval_dataset=DATA, optimizers=make(model))
    made.train(resume_from_checkpoint=resume or None)
    if plan is not None:
        assert type(made.model_wrapped) is deepspeed.DeepSpeedEngine
        assert made.model_wrapped.zero_optimization_stage() == plan["zero_optimization"]["stage"]
    return made


def said(made: Trainer, key: str) -> list[float]:
    """What the Trainer logged under ``key`` at each step."""
    return [float(entry[key]) for entry in made.state.log_history if key in entry]


def as_plain(folder: Path, plan: Any, tolerance: float, make: Make = NOTHING, **words: Any) -> None:
    """Compare a run with the same Trainer's without DeepSpeed, which gets what ``make`` makes."""
    found = run(folder, plan, **words)
    values = whole(found.model)
    if "scheduler" in plan:
        assert type(found.model_wrapped.lr_scheduler) is WarmupDecayLR
    wanted = run(folder, None, make=make, **words)
    assert_close(values, params_of(wanted.model), tolerance)
    # The engine steps a schedule over an optimizer of its own before the Trainer reads the rate.
    own = not {"optimizer", "scheduler"} & plan.keys()
    for key, within in (("loss", 1e-4), ("grad_norm", 1e-3), *[("learning_rate", 1e-9)] * own):
        pairs = zip(said(found, key), said(wanted, key), strict=True)
        worst = max(abs(a - b) for a, b in pairs)
        assert worst <= within, f"{key} differs by {worst}"


@scenario(ROWS, 0, 1, 2, 3)
def own_optimizer_and_schedule_equal_plain(folder: Path, stage: int) -> None:
    for accumulation in (1, 2):
        words = {"gradient_accumulation_steps": accumulation, "max_grad_norm": 0.5}
        as_plain(folder, config(stage), 1e-5, warmup_steps=1, **words)


@scenario(ROWS, 0, 1, 2, 3)
def pairings_of_optimizer_and_schedule(folder: Path, stage: int) -> None:
    """Each of the client's or the configuration's; both of the client's are tested above."""
    as_plain(folder, config(stage, optimizer=True), 1e-5, warmup_steps=WARMUP)
    for optimizer in (False, True):
        plan = config(stage, optimizer=optimizer, scheduler=True)
        as_plain(folder, plan, 1e-5, make=warmed, warmup_steps=WARMUP)


@scenario(ROWS, 1, 2, 3)
def adafactor(folder: Path, stage: int) -> None:
    as_plain(folder, config(stage), 1e-5, optim="adafactor")


@scenario(ROWS, 1, 2, 3)
def offload(folder: Path, stage: int) -> None:
    places = {"offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        places["offload_param"] = {"device": "cpu"}
    as_plain(folder, config(stage, optimizer=True, **places), 1e-5)
    as_plain(folder, config(stage, **places), 1e-5)


@scenario(ROWS, 0, 1, 2, 3)
def half_precision(folder: Path, stage: int) -> None:
    wanted = params_of(run(folder, None).model)
    for words, dtype in (({"bf16": True}, torch.bfloat16), ({"fp16": True}, torch.float16)):
        made = run(folder, config(stage), **words)
        values = whole(made.model)
        assert {value.dtype for value in values} == {dtype}
        assert_close(values, wanted, 0.05)
        masters(made.model_wrapped, stage)


def masters(engine: Any, stage: int) -> None:
    """All masters are fp32."""
    names = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups"}
    names[3] = "fp32_partitioned_groups_flat"
    if stage in names:
        found = getattr(engine.optimizer, names[stage])
        assert found and {master.dtype for master in found} == {torch.float32}


@scenario(ROWS, 1, 2, 3)
def a_model_that_is_half_from_the_start(folder: Path, stage: int) -> None:
    for words in ({"bf16": True}, {}):
        given = arguments(folder, config(stage), **words)
        made = Trainer(loaded(folder, dtype=torch.bfloat16), given, train_dataset=DATA)
        made.train()
        # `zero.Init` rounds to the configuration's precision, fp32 where it names none.
        expected = torch.float32 if stage == 3 and not words else torch.bfloat16
        assert {value.dtype for value in whole(made.model)} == {expected}
        losses = said(made, "loss")
        assert losses[-1] < losses[0]


def rename(old: Path, new: Path) -> None:
    """Once for all ranks, which call it."""
    deepspeed.comm.barrier()
    if deepspeed.comm.get_rank() == 0:
        old.rename(new)
    deepspeed.comm.barrier()


@scenario(ROWS, 0, 1, 2, 3)
def resume_is_bit_equal(folder: Path, stage: int) -> None:
    for name, words in (("fp32", {}), ("bf16", {"bf16": True})):
        for own in (False, True):
            plan = config(stage, optimizer=own, scheduler=own)
            place = folder / f"{name}-{own}"
            saving = {"save_strategy": "steps", "save_steps": 2, **words}
            straight = run(place, plan, **saving)
            values, losses = whole(straight.model), said(straight, "loss")
            last = place / f"checkpoint-{STEPS}"
            rename(last, place / "last")
            plan = config(stage, optimizer=own, scheduler=own)
            resumed = run(place, plan, resume=True, **saving)
            assert_equal(whole(resumed.model), values)
            assert said(resumed, "loss") == losses


@scenario(ROWS, 0, 1, 2, 3)
def the_best_model_is_loaded_at_the_end(folder: Path, stage: int) -> None:
    words = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    words |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    words |= {"greater_is_better": True}  # the first
    made = run(folder, config(stage), **words)
    losses = said(made, "eval_loss")
    assert made.state.best_model_checkpoint.endswith("checkpoint-1"), losses
    assert losses[0] == max(losses)
    again = made.evaluate()["eval_loss"]
    assert math.isclose(again, losses[0], rel_tol=1e-6), (again, losses)


@scenario(ROWS, 3)
def evaluation_alone(folder: Path, stage: int) -> None:
    plain = arguments(folder, None)
    whole_model = loaded(folder)
    wanted = Trainer(whole_model, plain, eval_dataset=DATA).evaluate()["eval_loss"]
    for model in (whole_model, None):
        given = arguments(folder, config(3))
        assert integration.is_deepspeed_zero3_enabled()
        if model is None:
            model = loaded(folder)
            assert {param.numel() for param in model.parameters()} == {0}
        loss = Trainer(model, given, eval_dataset=DATA).evaluate()["eval_loss"]
        assert math.isclose(loss, wanted, rel_tol=1e-6), (loss, wanted)
    half = arguments(folder, config(3), bf16_full_eval=True)
    loss = Trainer(loaded(folder), half, eval_dataset=DATA).evaluate()["eval_loss"]
    assert math.isclose(loss, wanted, rel_tol=0.01), (loss, wanted)


@scenario(ROWS, 3)
def made_and_loaded_in_shards(folder: Path, stage: int) -> None:
    forget()
    wanted = params_of(loaded(folder))
    given = arguments(folder, config(3))
    model = loaded(folder)
    assert {param.numel() for param in model.parameters()} == {0}
    assert_equal(whole(model), wanted)
    made = built()
    assert {param.numel() for param in made.parameters()} == {0}
    for found, plain in zip(whole(made), wanted, strict=True):
        assert found.shape == plain.shape and abs(found.std() - plain.std()) < 0.01
    assert given.deepspeed_plugin is not None
    # A head that the file does not have, and one that the model does not.
    torch.manual_seed(5)
    classifier = transformers.AutoModelForSequenceClassification
    found, told = classifier.from_pretrained(
        folder / "start", num_labels=3, output_loading_info=True
    )
    assert set(told["missing_keys"]) == {"score.weight"}, told
    values = whole(found)
    forget()
    torch.manual_seed(5)
    other = classifier.from_pretrained(folder / "start", num_labels=3)
    assert_equal(values, params_of(other))


@scenario(ROWS, 1, 2, 3)
def resized_embeddings(folder: Path, stage: int) -> None:
    def resized() -> Any:
        model = loaded(folder)
        torch.manual_seed(1)
        model.resize_token_embeddings(VOCABULARY + 8)
        return model

    given = arguments(folder, config(stage))
    made = Trainer(resized(), given, train_dataset=DATA)
    made.train()
    values = whole(made.model)
    made.save_model(str(folder / "saved"))
    given = arguments(folder, None)
    plain = Trainer(resized(), given, train_dataset=DATA)
    plain.train()
    assert_close(values, params_of(plain.model), 1e-5)
    deepspeed.comm.barrier()
    again = AutoModelForCausalLM.from_pretrained(folder / "saved")
    assert again.get_input_embeddings().weight.shape[0] == VOCABULARY + 8
    assert_equal(params_of(again), values)


@scenario(ROWS, 1, 2, 3)
def weights_from_a_checkpoint(folder: Path, stage: int) -> None:
    made = run(folder, config(stage), save_strategy="steps", save_steps=STEPS)
    values = whole(made.model)
    saved = folder / f"checkpoint-{STEPS}"
    deepspeed.comm.barrier()
    forget()
    model = load_state_dict_from_zero_checkpoint(built(), str(saved))
    assert_equal(params_of(model), values)
    if deepspeed.comm.get_rank() == 0:
        command = [sys.executable, str(saved / "zero_to_fp32.py"), str(saved), str(folder / "out")]
        subprocess.run(command, check=True, capture_output=True)
        assert list((folder / "out").iterdir())
    deepspeed.comm.barrier()


@scenario(ROWS, 2, 3)
def recomputed_activations(folder: Path, stage: int) -> None:
    as_plain(folder, config(stage), 1e-5, gradient_checkpointing=True)


@scenario(ROWS, 0, 1, 2, 3)
def sequences_over_ranks(folder: Path, stage: int) -> None:
    worst = with_trainer(stage, folder)
    assert worst <= TOLERANCE, worst


if __name__ == "__main__":
    main(ROWS, forget, forget)
