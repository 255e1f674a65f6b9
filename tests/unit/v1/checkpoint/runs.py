"""A small training run that can be stopped and resumed, and everything of it that must survive."""

import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.ds_to_universal import main, parse_arguments
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_fp32_params,
    safe_get_full_optimizer_state,
    safe_get_full_optimizer_states,
)
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as fp32_weights
from unit.common import get_master_port
from unit.models import drawn

WIDTH = 8
# 5 micro-batches of 2 per rank and epoch: with 2 accumulation steps every other step spans two
# epochs.
SAMPLES = 20
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}}
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
ACCUMULATE = {**BF16, **SUMS}  # BF16_Optimizer
ADAM: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
TORCH_ADAM = {"optimizer": {**ADAM, "params": {**ADAM["params"], "torch_adam": True}}}
CPU = {"offload_optimizer": {"device": "cpu"}}
TAG = "universal"
UNIVERSAL = {"checkpoint": {"load_universal": True}}
MOMENTS = ("exp_avg", "exp_avg_sq")


class Net(nn.Module):
    """Tied weights, a frozen layer, dropout, a buffer, sizes that two do not divide."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 7)
        self.drop = nn.Dropout(0.2)
        self.tied = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(7, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: (batch, WIDTH)
        self.calls += 1
        hidden = self.drop(torch.tanh(self.first(x)))
        return self.last(self.frozen(torch.tanh(self.again(self.tied(hidden)))))


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets, the same in every run."""
    return list(zip(drawn(5, SAMPLES, WIDTH), drawn(6, SAMPLES, 3), strict=True))


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    """Buckets of 50 elements: every parameter's gradient is spread over several."""
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 50, **keys}}


def decay_groups(module: nn.Module) -> list[dict[str, Any]]:
    """What is trained: weights, and biases without weight decay."""
    trained = [param for param in module.parameters() if param.requires_grad]
    plain = {"params": [param for param in trained if param.dim() <= 1], "weight_decay": 0.0}
    return [{"params": [param for param in trained if param.dim() > 1]}, plain]


def start(
    seed: int = 1, model: nn.Module | None = None, model_parameters: Any = None, **keys: Any
) -> Any:
    """An engine over a fresh `Net`, or another model, with its own dataloader: AdamW, a schedule,
    two accumulation steps and clipping, and further keys of the configuration.
    """
    schedule = {"warmup_num_steps": 3, "total_num_steps": 9, "warmup_max_lr": 1e-2}
    configuration = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "steps_per_print": 1000,
        "optimizer": ADAM,
        "scheduler": {"type": "WarmupDecayLR", "params": schedule},
        **keys,
    }
    torch.manual_seed(seed)
    model = model or Net()
    parameters = decay_groups(model) if model_parameters is None else model_parameters
    given = {"model_parameters": parameters, "training_data": samples()}
    engine = deepspeed.initialize(model=model, config=configuration, **given)[0]
    for seeding in (torch.manual_seed, numpy.random.seed, random.seed):
        seeding(100 * seed + dist.get_rank())
    engine.batches = deepspeed.utils.RepeatingLoader(engine.training_dataloader)
    return engine


def saved(folder: Any, steps: int = 1, tag: str | None = None, **keys: Any) -> Any:
    """An engine that has trained and is saved."""
    engine = start(**keys)
    train(engine, steps)
    engine.save_checkpoint(folder, tag=tag)
    return engine


def loaded(folder: Any, steps: int = 0, tag: str | None = None, seed: int = 2, **keys: Any) -> Any:
    """Another engine, which has loaded after steps of its own."""
    engine = start(seed, **keys)
    train(engine, steps)
    engine.load_checkpoint(folder, tag=tag)
    return engine


def refused(why: str) -> Any:
    """Expect a CheckpointError of this pattern inside."""
    return pytest.raises(CheckpointError, match=why)


def put(path: Path, content: bytes | None) -> None:
    """Make that the file's content, or remove it."""
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)


def environment_of_two() -> dict[str, str]:
    """This process's, for programs that are two ranks."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": get_master_port()}
    return {**os.environ, **world, "OMP_NUM_THREADS": "1"}


def output_of(*command: Any, **how: Any) -> str:
    """What a program prints that ends well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


def on_rank_0(action: Callable[[], Any]) -> None:
    """Change files while no rank reads them."""
    dist.barrier()
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


class Call:
    """Is pickled as the instruction to call `function` with `arguments`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.called = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.called


def convert(folder: Any, *options: str) -> None:
    """Make `<folder>/universal` of the newest checkpoint in `folder`."""
    newest = Path(folder, "latest").read_text()
    folders = ["--input_folder", f"{folder}/{newest}", "--output_folder", f"{folder}/{TAG}"]
    main(parse_arguments([*folders, *options]))


def keep(folder: str, seen: Any) -> None:
    """Lay what a run held beside its checkpoint, for `kept` in other processes."""
    on_rank_0(lambda: torch.save(seen, f"{folder}.pt"))


def kept(folder: str) -> Any:
    """What the run held that was saved in `folder`."""
    return torch.load(f"{folder}.pt", weights_only=False)


def train(engine: Any, steps: int) -> list[dict[str, Any]]:
    """Take `steps` optimizer steps; returns what is seen after each."""
    seen = []
    for _ in range(steps):
        losses = []
        for _ in range(engine.gradient_accumulation_steps()):
            losses.append(backward(engine))
            engine.step()
        seen.append(stepped(engine, losses))
    return seen


def backward(engine: Any) -> float:
    """Forward and backward of the next micro-batch; returns its loss."""
    x, target = next(engine.batches)
    x = x.to(next(engine.module.parameters()).dtype)
    # Host random states matter, too.
    x = x + 0.01 * random.random() + 0.01 * numpy.random.rand()
    loss = (engine(x).float() - target).pow(2).mean()
    engine.backward(loss)
    return loss.item()


def stepped(engine: Any, losses: list[float]) -> dict[str, Any]:
    """What is seen after a step."""
    norm = float(engine.get_global_grad_norm())
    return {"losses": losses, "norm": norm, "lr": engine.get_lr(), **look(engine)}


def look(engine: Any) -> dict[str, Any]:
    """Everything that a resumed run must have in common with one that did not stop."""
    optimizer = engine.optimizer
    state = {f"module.{name}": value.clone() for name, value in engine.module.state_dict().items()}
    for index, tensor in enumerate(getattr(optimizer, "single_partition_of_fp32_groups", [])):
        state[f"master.{index}"] = tensor.detach().clone()
    for position, entry in enumerate(optimizer.state.values()):
        for key, value in entry.items():
            state[f"state.{position}.{key}"] = torch.as_tensor(value).clone()
    scaler = vars(optimizer.loss_scaler) if hasattr(optimizer, "loss_scaler") else {}
    return {
        **state,
        **progress(engine),
        "scaler": dict(scaler),
        "schedule": engine.lr_scheduler.state_dict(),
        "data": engine.training_dataloader.state_dict(),
    }


def progress(engine: Any) -> dict[str, Any]:
    """Counters and random states."""
    host: Any = numpy.random.get_state()
    counters = ("global_steps", "skipped_steps", "global_samples", "micro_steps")
    return {
        "counters": tuple(getattr(engine, name) for name in counters),
        "random": (torch.get_rng_state(), random.getstate(), host[1].tolist(), host[2]),
    }


def counts(engine: Any) -> set[float]:
    """How many steps the states of this rank's optimizer have counted."""
    return {float(own["step"]) for own in engine.optimizer.state.values() if "step" in own}


def whole(param: torch.Tensor) -> torch.Tensor:
    """A parameter's value on every rank, at any stage."""
    with deepspeed.zero.GatheredParameters([param]):
        return param.detach().clone()


def by_name(engine: Any) -> dict[str, Any]:
    """Weights, masters and moments of every trained parameter, whole, on every rank: what no
    division over ranks may change. At stage 0 in fp32 the weights are the masters.
    """
    params = dict(engine.module.named_parameters())
    if not params:
        return {}  # of a pipeline's stage
    with deepspeed.zero.GatheredParameters(list(params.values())):
        found: dict[str, Any] = {f"weight.{name}": p.detach().clone() for name, p in params.items()}
    trained = {name: param for name, param in params.items() if param.requires_grad}
    sharded = {name: param for name, param in trained.items() if hasattr(param, "_hp_mapping")}
    if sharded:
        # Of all of them at once: ranks wait for each other at every collective.
        masters = safe_get_full_fp32_params(list(sharded.values()))
        found |= {f"master.{name}": own.clone() for name, own in zip(sharded, masters, strict=True)}
        for key in MOMENTS:
            moments = safe_get_full_optimizer_states(list(sharded.values()), key)
            found |= {f"{key}.{name}": m.clone() for name, m in zip(sharded, moments, strict=True)}
    for name, param in trained.items():
        if name not in sharded:
            master = safe_get_full_fp32_param(param)
            found[f"master.{name}"] = (param if master is None else master).detach().clone()
            found |= {f"{key}.{name}": moment(engine, param, key) for key in MOMENTS}
    return found


def of_kind(held: dict[str, Any], kind: str) -> dict[str, Any]:
    """What `by_name` has of a kind, under the parameters' own names."""
    start = f"{kind}."
    return {name.removeprefix(start): v for name, v in held.items() if name.startswith(start)}


def exported_otherwise(folder: Any, held: dict[str, Any]) -> list[str]:
    """What `zero_to_fp32` makes of a folder, where it is not what `by_name` had of the run: masters
    where there are any, else weights. The first rank asks for all.
    """
    if dist.get_rank():
        return []
    weights = {name: value.float() for name, value in of_kind(held, "weight").items()}
    wanted, found = {**weights, **of_kind(held, "master")}, fp32_weights(folder)
    return differences(wanted, {name: found[name] for name in wanted if name in found})


def otherwise(held: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Where what the first rank has found of all ranks is not what was held."""
    return [] if dist.get_rank() else differences(held, found)


def masters_off(found: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> list[str]:
    """Masters, of what the first rank has found, that are further than that from the wanted."""
    if dist.get_rank():
        return []
    own = of_kind(found, "master")
    off = {n: float((own[n] - v).abs().max()) for n, v in of_kind(wanted, "master").items()}
    return [f"{name} is off by {far:.1e}" for name, far in off.items() if not far <= tolerance]


def moment(engine: Any, param: nn.Parameter, key: str) -> torch.Tensor:
    """Optimizer state of a parameter, whole, whoever keeps it."""
    if hasattr(param, "_hp_mapping"):
        found = safe_get_full_optimizer_state(param, key)
        assert found is not None
        return found.clone()
    return engine.optimizer.state[param][key].clone()


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Where two nested values are not bit-equal."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
        return [] if same else [path]
    if type(left) is not type(right):
        return [f"{path}: {type(left).__name__} is not {type(right).__name__}"]
    if isinstance(left, dict):
        keys = [f"{path}.{key} is on one side only" for key in left.keys() ^ right.keys()]
        return keys + [
            found
            for key in left.keys() & right.keys()
            for found in differences(left[key], right[key], f"{path}.{key}")
        ]
    if isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return [f"{path}: {len(left)} is not {len(right)} long"]
        pairs = enumerate(zip(left, right, strict=True))
        return [found for index, (a, b) in pairs for found in differences(a, b, f"{path}[{index}]")]
    same = left == right or left != left and right != right
    return [] if same else [f"{path}: {left!r} is not {right!r}"]
