"""What a user is told who gives `initialize` something wrong; the other ranks when one dies."""

import copy
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from unit.clients.launching import environment, run_ranks
from unit.common import DistributedTest, get_master_port

MICRO = "train_micro_batch_size_per_gpu"
GOOD: dict[str, Any] = {MICRO: 2}
GOOD["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
BF16 = {"bf16": {"enabled": True}}


def give(*drop: str, **keys: Any) -> Callable[[], Any]:
    """Initialize with the good configuration, less some keys, plus others."""
    configuration = {key: value for key, value in {**GOOD, **keys}.items() if key not in drop}
    return lambda: deepspeed.initialize(model=torch.nn.Linear(4, 4), config=configuration)


def zero(stage: Any, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


def of_model(model: Any, **keys: Any) -> Callable[[], Any]:
    return lambda: deepspeed.initialize(model=model, config={**GOOD, **keys})


def given(args: Any, model: Any, config: Any = None) -> Callable[[], Any]:
    return lambda: deepspeed.initialize(args, model, config=config)


def client(make: Callable[[torch.nn.Module], Any], **keys: Any) -> Callable[[], Any]:
    """Initialize with an optimizer of the client's for a model."""

    def initialize() -> Any:
        model = torch.nn.Linear(4, 4)
        return deepspeed.initialize(model=model, optimizer=make(model), config={**GOOD, **keys})

    return initialize


class Exotic(torch.optim.SGD):
    """An optimizer that nobody knows, and that looks at all parameters."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


class Rotation(torch.nn.Module):
    """Has complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))


WHOLE = torch.nn.Linear(4, 4)
SGD, STAGES = torch.optim.SGD, (0, 1, 2, 3)
HOST = {"offload_optimizer": {"device": "cpu"}}


def beside(model: Any) -> torch.optim.Optimizer:
    """An optimizer of a parameter that the model has not."""
    others = [model.bias, torch.zeros(3, requires_grad=True)]
    return SGD([{"params": [model.weight]}, {"params": others}], lr=0.1)


# What is wrong -> what is done, and what its message must say.
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown key": (give(gradient_cliping=1.0), r"gradient_cliping.*gradient_clipping"),
    "unknown nested key": (give(**zero(1, overlap_com=True)), r"overlap_com.*overlap_comm"),
    "wrong type": (give(gradient_clipping="a lot"), r"gradient_clipping.*a lot"),
    "wrong nested type": (give(**zero("two")), r"zero_optimization\.stage.*two"),
    "inconsistent batch sizes": (
        give(train_batch_size=7, gradient_accumulation_steps=2),
        r"train_batch_size = 7.*train_micro_batch_size_per_gpu = 2.*"
        r"gradient_accumulation_steps = 2.*world size = 1",
    ),
    "no batch size": (give(MICRO), f"train_batch_size|{MICRO}"),
    "auto left over": (give(**{MICRO: "auto"}), f"{MICRO}.*auto|auto.*train_micro_batch"),
    "stage 4": (give(**zero(4)), r"zero_optimization\.stage.*4"),
    "a key that stage 3 has not": (
        give(**zero(3, elastic_checkpoint=True)),
        r"zero_optimization\.elastic_checkpoint.*use false",
    ),
    "fp16 and bf16": (give(fp16={"enabled": True}, **BF16), r"fp16.*bf16|bf16.*fp16"),
    "missing configuration file": (given(None, WHOLE, "no/such/file.json"), r"no/such/file\.json"),
    "no configuration": (given(None, WHOLE), "no configuration; give config="),
    "two configurations": (
        given(Namespace(deepspeed_config="a.json"), WHOLE, GOOD),
        r"given 2 times \(config, args\.deepspeed_config\); give it once",
    ),
    "no model": (given(None, None, GOOD), "model is required"),
    "not a model": (of_model(lambda x: x), "model: expected a torch.nn.Module, got function"),
    "no optimizer at stage 1": (
        give("optimizer", **zero(1)),
        "zero stage 1 requires an optimizer.*'optimizer'",
    ),
    "unknown optimizer": (give(optimizer={"type": "Adamw2"}), r"optimizer\.type.*'Adamw2'.*AdamW"),
    "unknown optimizer argument": (
        give(optimizer={"type": "AdamW", "params": {"learning_rate": 1}}),
        r"optimizer\.params\.learning_rate.*lr",
    ),
    "unknown scheduler": (give(scheduler={"type": "Warmup"}), r"scheduler.*'?Warmup'?.*WarmupLR"),
    "partly half-precision model under ZeRO, without bf16": (
        of_model(torch.nn.Sequential(torch.nn.Linear(4, 4).bfloat16(), WHOLE), **zero(1)),
        r'of 2 dtypes \(0\.weight, 1\.weight.*"bf16": \{"enabled": true\}',
    ),
    **{
        f"{name} at stage {stage}": (give(optimizer={"type": name}, **zero(stage)), reason)
        for name, reason in {
            "LBFGS": "optimizer: LBFGS evaluates the loss anew.*use AdamW",
            "SparseAdam": "optimizer: SparseAdam updates sparse gradients alone.*use AdamW",
        }.items()
        for stage in (0, 1)
    },
    **{
        f"a copy's parameters at stage {stage}": (
            client(lambda model: SGD(copy.deepcopy(model).parameters(), lr=0.1), **zero(stage)),
            r"2 of the 2 parameters in group 0 of SGD are not parameters of the model "
            r"\(Linear\); their shapes are \(4, 4\), \(4,\)\. Make the optimizer.*parameters\(\)",
        )
        for stage in STAGES
    },
    "a copy's parameters as model_parameters": (
        lambda: deepspeed.initialize(
            model=WHOLE, model_parameters=copy.deepcopy(WHOLE).parameters(), config=GOOD
        ),
        r"2 of the 2 parameters in group 0 of FusedAdam are not.*or model_parameters, of",
    ),
    "model_parameters that were used up": (
        lambda: deepspeed.initialize(model=WHOLE, model_parameters=iter([]), config=GOOD),
        r"no trainable parameter|empty parameter list",
    ),
    "a parameter beside the model's": (
        client(beside, **zero(2)),
        r"1 of the 2 parameters in group 1 of SGD.*shapes are \(3,\)\. .*model\.name = module",
    ),
    **{
        f"complex parameters at stage {stage}": (
            of_model(Rotation(), **zero(stage)),
            r"angles is torch\.complex64.*shape \(4, 2\), torch\.view_as_real\(value\)",
        )
        for stage in STAGES
    },
    **{
        f"a sparse embedding at stage {stage}": (
            of_model(torch.nn.Sequential(torch.nn.Embedding(3, 4, sparse=True)), **zero(stage)),
            r"0 is Embedding\(sparse=True\).*use sparse=False",
        )
        for stage in STAGES
    },
    "Adafactor with an elastic checkpoint": (
        give(optimizer={"type": "Adafactor"}, **zero(2, elastic_checkpoint=True)),
        r"zero_optimization\.elastic_checkpoint: true with Adafactor.*remove the key",
    ),
    "a client optimizer that updates parameters from each other": (
        client(
            lambda model: Exotic(model.parameters(), lr=1.0),
            **{**zero(2), "zero_allow_untested_optimizer": True},
        ),
        r"Exotic updates a parameter from others too.*zero_optimization\.stage 0",
    ),
    "Muon's momentum on the device and on the host": (
        give(
            optimizer={"type": "Muon"}, **zero(2, save_muon_momentum_buffer_in_memory=True, **HOST)
        ),
        r"save_muon_momentum_buffer_in_memory: true with offload_optimizer.*remove one",
    ),
    "an unknown way to make matrices orthogonal": (
        give(optimizer={"type": "Muon", "params": {"ns_method": "polar"}}),
        r"ns_method: 'polar' is unknown; use one of",
    ),
    "untested client optimizer under ZeRO": (
        client(lambda model: Exotic(model.parameters(), lr=1.0), **zero(2)),
        'Exotic is not known to work on shards.*"zero_allow_untested_optimizer": true',
    ),
    "a client optimizer that is not made for the host, offloaded": (
        client(lambda model: SGD(model.parameters(), lr=1.0), **zero(2, **HOST)),
        'client optimizer SGD: .*DeepSpeedCPUAdam.*"zero_force_ds_cpu_optimizer": false',
    ),
    "unused parameters an error, with local accumulation": (
        give(
            **{**BF16, **zero(1, ignore_unused_parameters=False)},
            data_types={"grad_accum_dtype": "fp32"},
        ),
        r"ignore_unused_parameters: false with data_types\.grad_accum_dtype.*use true, or stage 2",
    ),
    "a pipeline whose script decides the boundary": (
        lambda: of_model(
            deepspeed.pipe.PipelineModule([torch.nn.Linear(4, 4)], num_stages=1),
            managed_gradient_accumulation=False,
        )(),
        "managed_gradient_accumulation: false is not supported with pipeline parallelism.*remove",
    ),
    "nothing to train": (
        of_model(torch.nn.Linear(4, 4).requires_grad_(False)),
        r"no trainable parameter|empty parameter list",
    ),
}


class TestMistakes(DistributedTest):
    """Kills: an option that is accepted and ignored, an error that does not say what to change."""

    world_size = 1

    def test_each_is_named(self) -> None:
        wrong = {}
        for name, (mistake, pattern) in MISTAKES.items():
            try:
                mistake()
            except (ValueError, FileNotFoundError, NotImplementedError) as error:
                if not re.search(pattern, str(error), re.DOTALL):
                    wrong[name] = f"{type(error).__name__}: {error}"
            else:
                wrong[name] = "was accepted"
        assert wrong == {}

    def test_what_upstream_raises_for_a_client_optimizer_on_the_host(self) -> None:
        mistake, _ = MISTAKES["a client optimizer that is not made for the host, offloaded"]
        with pytest.raises(ZeRORuntimeException) as caught:
            mistake()
        assert isinstance(caught.value, deepspeed.DeepSpeedConfigError)

    def test_the_engine_still_starts_after_them(self) -> None:
        for mistake, _ in MISTAKES.values():
            with pytest.raises((ValueError, FileNotFoundError, NotImplementedError)):
                mistake()
        engine = give(**zero(2))()[0]
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        assert engine.global_steps == 1


class TestHalfSetEnvironment(DistributedTest):
    """Kills: waiting for ranks that never come, or training alone by mistake."""

    world_size = 1
    init_distributed = False
    set_dist_env = False

    def test_it_names_what_is_missing(self) -> None:
        one = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
        others = ({"WORLD_SIZE": "2"}, "RANK.*MASTER_ADDR.*MASTER_PORT|RANK")
        for given, missing in ((one, "WORLD_SIZE"), others):
            os.environ.update(given)
            with pytest.raises(ValueError, match=f"{missing}.*torchrun"):
                give()()
            for name in given:
                del os.environ[name]


DYING = """
import datetime, os, signal, sys, time
import torch, deepspeed
deepspeed.init_distributed(timeout=datetime.timedelta(seconds=float(sys.argv[2])))
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": int(sys.argv[3])},
}
engine = deepspeed.initialize(model=torch.nn.Linear(64, 64), config=config)[0]
others = [0, 0]
torch.distributed.all_gather_object(others, os.getpid())
for step in range(3):
    loss = engine(torch.ones(2, 64)).sum()
    if step == 1 and deepspeed.comm.get_rank() == 1:
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            os.kill(others[0], 0)  # until it has ended
            time.sleep(0.1)
    engine.backward(loss)
    engine.step()
    print("step", step, flush=True)
"""


def test_the_others_end_when_a_rank_dies() -> None:
    """Kills: an error that is swallowed; no launcher is there to end the survivors."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": get_master_port()}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DYING, "killed", "60", "2"],
            env={**environment(), **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        out, err = ranks[0].communicate(timeout=300)  # most of it for two starts
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[0].returncode not in (0, -9)
    # Some of torch's versions say there when gloo has connected.
    assert [line for line in out.splitlines() if not line.startswith("[Gloo]")] == ["step 0"]
    assert "Error" in err


@pytest.mark.parametrize(("how", "stage"), [("killed", "0"), ("stuck", "1")])
def test_the_others_fail_when_a_rank_does_not_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, stage: str
) -> None:
    """Kills: a collective without timeout."""
    (tmp_path / "dying.py").write_text(DYING)
    timeout = "2" if how == "stuck" else "60"
    with pytest.raises(pytest.fail.Exception) as failed:
        run_ranks(tmp_path / "dying.py", tmp_path, how, timeout, stage, timeout=45.0)
    said = str(failed.value)
    assert "did not end" not in said
    assert re.search(r"rank 0 of 2 failed ====\nTraceback .*\n\w*Error: ", said, re.DOTALL), said
    out = capsys.readouterr().out
    assert out.count("step 0") == 2 and "step 1" not in out
