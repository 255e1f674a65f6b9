"""Experts of transformers' models spread over ranks: equal to one process with the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.ds_to_universal import main, parse_arguments
from deepspeed.comm import intent
from deepspeed.runtime.model_setup import cast_module
from deepspeed.utils import groups
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.verify.oracle.plan import shape_of
from deepspeed.verify.oracle.usage import UsageError
from unit.common import DistributedTest
from unit.v1.checkpoint.runs import differences as unlike

pytest.importorskip("transformers.integrations.moe", reason="older releases have lists of experts")

from unit.clients.architectures import ARCHITECTURES
from unit.v1.moe.auto_ep import MODELS, Case, differences, resumable, train, whole_state

LEDGER = ("verify", {"ledger": True})
OVERLAP = ("zero_optimization", {"stage": 2, "overlap_comm": True})
DATA_FIRST = ("use_data_before_expert_parallelism", True)
UNEVEN = [
    Case("gpt_oss", 2, 2, alone=True, options=(LEDGER,)),
    Case("gpt_oss", 4, 1, alone=True, accumulation=2),
    Case("gpt_oss", 2, 0, alone=True),
    Case("gpt_oss", 4, 2, alone=True, options=(OVERLAP,)),
    Case("qwen3_moe", 2, 1, "bf16"),
    Case("mixtral", 4, 2, "bf16", accumulation=2),
    Case("qwen2_moe", 2, 2, recomputes=True, client=True),
    Case("olmoe", 4, 0, client=True),
    Case("mixtral", 2, 2, frozen=True),
]
# What is saved, and at which sizes it goes on: a minus is for universal checkpoints, 0 for stage 3.
RESUMED = [
    (Case("qwen3_moe", 2, 2), (4, 0, -4)),
    (Case("gpt_oss", 4, 0), (2,)),
    (Case("gpt_oss", 2, 1, "bf16"), (4,)),
    (Case("qwen3_moe", 2, 0, "bf16"), (1,)),
    (Case("qwen3_moe", 2, 1, "bf16", frozen=True), (4, -1)),
    (Case("gpt_oss", 2, 1, options=(DATA_FIRST,)), (4,)),
]


def convert(source: str, target: str) -> None:
    main(
        parse_arguments(
            ["--input_folder", source, "--output_folder", target, "--inject_missing_state"]
        )
    )


def refused_model(name: str) -> Any:
    if name == "dense":
        return torch.nn.Linear(2, 2)
    if name == "switch":
        architecture = ARCHITECTURES["switch_transformers"]
        return architecture.cls(architecture.config("switch_transformers"))
    return Case(name, 2, 0).model()


class TestFourRanks(DistributedTest):
    world_size = 4
    exec_timeout = 120

    def test_equals_one_process(self) -> None:
        """Ten architectures; then routes to the experts of one rank only, a client's optimizer,
        accumulation, recomputation.

        Kills: a rank that stays away from an exchange, in backward too, or from a reduction,
        because no token came to its experts; experts of other than the first rank's weights.
        """
        assert len(MODELS) == 10
        cases = [
            Case(name, ep_size, (index + ep_size // 2) % 3)
            for index, name in enumerate(MODELS)
            for ep_size in (2, 4)
        ]
        failures = [failure for case in cases for failure in differences(case)]
        intent.enable(timeout_s=20)
        try:
            failures += [failure for case in UNEVEN for failure in differences(case)]
        finally:
            intent.disable()
        assert not failures, "\n".join(failures)

    def test_files_and_refusals(self, tmpdir: Any) -> None:
        """Kills: a file with the experts of one rank, or with those of all ranks in another order;
        moments and masters that are put together in the order of ranks, or as dense ones.
        """
        weights_are_the_models_own(f"{tmpdir}/weights")
        what_cannot_be_spread_is_refused()
        for number, (case, sizes) in enumerate(RESUMED):
            goes_on(f"{tmpdir}/{number}", case, sizes)


def goes_on(folder: str, case: Case, sizes: tuple[int, ...]) -> None:
    """A checkpoint has what the engine had, at other sizes."""
    if DATA_FIRST in case.options:
        groups.reset()
    engine = resumable(case, 1)
    train(engine, 2)
    engine.save_checkpoint(folder, "tag")
    held = whole_state(engine)
    engine.destroy()
    if dist.get_rank() == 0 and min(sizes) < 0:
        convert(f"{folder}/tag", f"{folder}/universal")
    dist.barrier()
    for size in sizes:
        block = {"enabled": abs(size) > 1, "autoep_size": max(abs(size), 1)}
        keys = {"expert_parallel": block, "checkpoint": {"load_universal": size < 0}}
        if size == 0:
            keys["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 0}
        other = resumable(case, 2, **keys)
        other.load_checkpoint(folder, "universal" if size < 0 else "tag")
        assert unlike(held, whole_state(other)) == [], (case, size)
        other.destroy()


def weights_are_the_models_own(folder: str) -> None:
    """Names, shapes, values: of state dicts and of files, in both directions."""
    case = Case("deepseek_v3", 2, 2, "bf16")
    engine, plain = resumable(case, 1), case.model(seed=1)
    cast_module(plain, torch.bfloat16)
    wanted = plain.state_dict()
    assert unlike(dict(wanted), dict(engine.module.state_dict())) == []
    engine.module.load_state_dict(case.model(seed=2).state_dict())
    assert unlike(dict(wanted), dict(engine.module.state_dict())) != []
    engine.module.load_state_dict(wanted)
    assert unlike(dict(wanted), dict(engine.module.state_dict())) == []
    train(engine, 1)
    engine.save_16bit_model(folder)
    engine.save_checkpoint(folder, "tag")
    trained = dict(engine.module.state_dict())
    one = engine._consolidated_16bit_state_dict()
    assert (one is None) == (dist.get_rank() > 0)
    masters = whole_state(engine)
    engine.destroy()
    if one is None:
        return
    saved = torch.load(f"{folder}/pytorch_model.bin")
    model_file = torch.load(f"{folder}/tag/mp_rank_00_model_states.pt", weights_only=False)
    for state in (saved, one, model_file["module"]):
        assert unlike(trained, dict(state)) == []
        plain.load_state_dict(state)
    exported = get_fp32_state_dict_from_zero_checkpoint(folder, "tag")
    assert exported.keys() == wanted.keys()
    for name, _ in plain.named_parameters():
        assert torch.equal(exported[name], masters[f"master.{name}"]), name


def what_cannot_be_spread_is_refused() -> None:
    """By errors that name key, value and remedy, on all ranks."""
    config = Case("mixtral", 2, 2).config()
    with pytest.raises(UsageError, match="expert_parallel"):
        shape_of(config, 4)
    for name, stage, keys, message in (
        ("mixtral", 1, {"autoep_size": 3}, "must divide the 4 data-parallel ranks"),
        ("switch", 1, {"autoep_size": 2}, "SwitchTransformersExperts.*transformers 5"),
        ("dense", 1, {"autoep_size": 2}, "no experts that can be spread. They"),
        ("dense", 1, {"autoep_size": 2, "preset": "x"}, "no such key.*preset"),
        ("dense", 3, {"autoep_size": 2}, "expert_parallel.enabled: true at .*stage 0, 1 or 2"),
    ):
        block = {"enabled": True, **keys}
        config = {**Case("mixtral", 2, stage).config(), "expert_parallel": block}
        with pytest.raises(ValueError, match=message):
            deepspeed.initialize(model=refused_model(name), config=config)
    lamb = {"type": "Lamb", "params": {"lr": 1e-2}}
    with pytest.raises(ValueError, match="as a whole, and expert_parallel .* use AdamW"):
        resumable(Case("mixtral", 2, 1), 1, optimizer=lamb)
    with pytest.raises(ValueError, match='autoep_size 2 without "enabled"'):
        deepspeed.initialize(
            model=refused_model("dense"),
            config={"train_batch_size": 4, "expert_parallel": {"autoep_size": 2}},
        )
