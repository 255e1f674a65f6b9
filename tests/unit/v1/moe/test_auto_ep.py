"""Experts of transformers' models spread over ranks: equal to one process with the whole model."""

from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.ds_to_universal import main, parse_arguments
from deepspeed.comm.watch import intent
from deepspeed.moe.expert_rows import rows_of
from deepspeed.runtime.engine_parts.model_setup import cast_module
from deepspeed.runtime.zero import model_sharding
from deepspeed.runtime.zero.parameters.zero_parameter import is_zero_param
from deepspeed.utils import groups
from deepspeed.utils.exceptions import MisuseError
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.verify.oracle import UsageError
from deepspeed.verify.oracle.plan import shape_of
from unit.common import DistributedTest
from unit.v1.checkpoint.runs import differences as unlike

pytest.importorskip("transformers.integrations.moe", reason="older releases have lists of experts")

from transformers.integrations import HfDeepSpeedConfig

from unit.clients.architectures import ARCHITECTURES
from unit.v1.moe.auto_ep import (
    ADAM,
    MODELS,
    Case,
    differences,
    resumable,
    train,
    whole_state,
    zero_block,
)

LEDGER = ("verify", {"ledger": True})
OVERLAP = ("zero_optimization", {"stage": 2, "overlap_comm": True})
OFFLOAD = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
HOST = (("zero_optimization", {**zero_block(3), **OFFLOAD}), ("zero_force_ds_cpu_optimizer", False))
EVERYWHERE = {"enabled": True, "autoep_size": 4}
DATA_FIRST = ("use_data_before_expert_parallelism", True)
UNEVEN = [
    Case("gpt_oss", 2, 2, alone=True, options=(LEDGER,)),
    Case("gpt_oss", 4, 1, alone=True, accumulation=2),
    Case("gpt_oss", 2, 0, alone=True),
    Case("qwen3_moe", 2, 1, "bf16"),
    Case("mixtral", 4, 2, "bf16", accumulation=2, options=(OVERLAP,)),
    Case("qwen2_moe", 2, 2, recomputes=True, client=True),
    Case("olmoe", 4, 0, client=True),
    Case("mixtral", 2, 2, frozen=True),
    Case("gpt_oss", 2, 3, alone=True, accumulation=2, options=(LEDGER,)),
    Case("qwen3_moe", 2, 3, "bf16", recomputes=True, client=True),
    Case("mixtral", 4, 3, frozen=True, options=HOST),
]
# What is saved, and at which sizes and stages it goes on: a minus is for universal checkpoints.
RESUMED: list[tuple[Case, tuple[tuple[int, int], ...]]] = [
    (Case("qwen3_moe", 2, 2), ((4, 2), (1, 3), (-4, 3))),
    (Case("gpt_oss", 4, 0), ((2, 0),)),
    (Case("qwen3_moe", 2, 0, "bf16"), ((1, 1), (4, 3))),
    (Case("qwen3_moe", 2, 1, "bf16", frozen=True), ((4, 3), (-1, 1))),
    (Case("qwen3_moe", 2, 3, "bf16"), ((2, 3), (4, 3), (1, 2))),
    (Case("qwen3_moe", 2, 3, frozen=True), ((4, 3), (-1, 1))),
    (Case("gpt_oss", 2, 1, options=(DATA_FIRST,)), ((4, 1),)),
    (Case("gpt_oss", 2, 3, options=(DATA_FIRST,)), ((4, 3),)),
]


class Adapter(torch.nn.Module):
    """Holds what it adapts as peft's adapters do."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def convert(source: str, target: str) -> None:
    main(parse_arguments(["--input_folder", source, "--output_folder", target]))


def refused_model(name: str) -> Any:
    if name == "dense":
        return torch.nn.Linear(2, 2)
    if name == "adapted":
        experts = Case("mixtral", 2, 0).model().model.layers[0].mlp.experts
        return torch.nn.ModuleDict({"block": Adapter(experts)})
    if name == "switch":
        architecture = ARCHITECTURES["switch_transformers"]
        return architecture.cls(architecture.config("switch_transformers"))
    return Case(name, 2, 0).model()


class TestFourRanks(DistributedTest):
    world_size = 4
    exec_timeout = 120

    @pytest.mark.parametrize("share", [0, pytest.param(1, marks=pytest.mark.contract)])
    def test_equals_one_process(self, share: int) -> None:
        """Ten architectures, over 2 and over 4 ranks in turn, and in the contract's run the other
        way round; then routes to the experts of one rank only, a client's optimizer, accumulation,
        recomputation.

        Kills: a rank that stays away from an exchange, in backward too, or from a reduction,
        because no token came to its experts; experts of other than the first rank's weights; at
        stage 3 experts whose shards those share that hold others, or whose norm counts twice.
        """
        assert len(MODELS) == 10
        cases = [
            Case(name, ep_size, (index + index // 4 + ep_size // 2) % 4)
            for index, name in enumerate(MODELS)
            for ep_size in ((2, 4)[(index + share) % 2],)
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
        for stage in (2, 3):
            weights_are_the_models_own(f"{tmpdir}/weights-{stage}", stage)
        made_in_shards(f"{tmpdir}/sharded")
        what_cannot_be_spread_is_refused()
        for number, (case, sizes) in enumerate(RESUMED):
            goes_on(f"{tmpdir}/{number}", case, sizes)


def goes_on(folder: str, case: Case, others: tuple[tuple[int, int], ...]) -> None:
    """A checkpoint has what the engine had, at other sizes and stages."""
    if DATA_FIRST in case.options:
        groups.reset()
    engine = resumable(case, 1)
    train(engine, 1)
    engine.save_checkpoint(folder, "tag")
    held = whole_state(engine)
    engine.destroy()
    if dist.get_rank() == 0 and any(size < 0 for size, _ in others):
        convert(f"{folder}/tag", f"{folder}/universal")
    dist.barrier()
    for size, stage in others:
        keys = {
            "expert_parallel": {"enabled": abs(size) > 1, "autoep_size": abs(size)},
            "checkpoint": {"load_universal": size < 0},
            "zero_optimization": zero_block(stage),
        }
        other = resumable(case, 2, **keys)
        other.load_checkpoint(folder, "universal" if size < 0 else "tag")
        assert unlike(held, whole_state(other)) == [], (case, size, stage)
        other.destroy()


def weights_are_the_models_own(folder: str, stage: int) -> None:
    """Names, shapes, values: of state dicts and of files, in both directions."""
    case = Case("deepseek_v3", 2, stage, "bf16")
    engine, plain = resumable(case, 1), case.model(seed=1)
    cast_module(plain, torch.bfloat16)
    wanted = plain.state_dict()
    state_dicts_are_whole(engine, case) if stage < 3 else state_dicts_are_empty(engine)
    train(engine, 1)
    engine.save_16bit_model(folder)
    engine.save_checkpoint(folder, "tag")
    one = engine._consolidated_16bit_state_dict()
    assert (one is None) == (dist.get_rank() > 0)
    masters = whole_state(engine)
    engine.destroy()
    trained = dict(engine.module.state_dict())
    if one is None:
        return
    states = [torch.load(f"{folder}/pytorch_model.bin"), one]
    if stage < 3:
        path = f"{folder}/tag/mp_rank_00_model_states.pt"
        states.append(torch.load(path, weights_only=False)["module"])
    for state in states:
        assert unlike(trained, dict(state)) == []
        plain.load_state_dict(state)
    exported = get_fp32_state_dict_from_zero_checkpoint(folder, "tag")
    assert exported.keys() == wanted.keys()
    for name, _ in plain.named_parameters():
        assert torch.equal(exported[name], masters[f"master.{name}"]), name


def state_dicts_are_whole(engine: Any, case: Case) -> None:
    """Below stage 3."""
    plain = case.model(seed=1)
    cast_module(plain, torch.bfloat16)
    wanted = plain.state_dict()
    assert unlike(dict(wanted), dict(engine.module.state_dict())) == []
    engine.module.load_state_dict(case.model(seed=2).state_dict())
    assert unlike(dict(wanted), dict(engine.module.state_dict())) != []
    engine.module.load_state_dict(wanted)
    assert unlike(dict(wanted), dict(engine.module.state_dict())) == []


def state_dicts_are_empty(engine: Any) -> None:
    """At stage 3, of experts that persist too; nobody takes those of one rank for whole ones."""
    state = engine.module.state_dict()
    assert all(not state[name].numel() for name in state if ".experts." in name)
    with pytest.raises(NotImplementedError, match=r"compile\(\) at ZeRO stage 3 with expert_paral"):
        engine.compile()
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        with pytest.raises(MisuseError, match="experts of this rank only.*save_16bit_model"):
            engine.module.state_dict()


def made_in_shards(folder: str) -> None:
    """`from_pretrained` under zero.Init: as if whole before, and no rank keeps more than shards."""
    case = Case("mixtral", 2, 3, "bf16")
    if dist.get_rank() == 0:
        case.model(seed=1).save_pretrained(folder)
    dist.barrier()
    config = {**case.config(), "optimizer": ADAM}
    told = HfDeepSpeedConfig(config)
    model = MODELS["mixtral"].cls.from_pretrained(folder, dtype=torch.bfloat16).eval()
    del told
    before = {param.ds_tensor.numel() / param.ds_numel for param in model.parameters()}
    assert before == {0.25}
    ready: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        whole = model_sharding.shard_model

        def shard_model(model: Any, *how: Any) -> Any:
            ready.extend(is_zero_param(param) for param in model.parameters())
            return whole(model, *how)

        patch.setattr(model_sharding, "shard_model", shard_model)
        engine = deepspeed.initialize(model=model, config=config)[0]
    assert ready and all(ready), "experts stood whole until all of them were spread"
    engines = [resumable(case, 1), engine]
    for param in model.parameters():
        assert param.ds_tensor.numel() * (4 if rows_of(param) is None else 2) == param.ds_numel
    for engine in engines:
        train(engine, 1)
    assert unlike(*map(whole_state, engines)) == []
    with pytest.raises(MisuseError, match="spread over 2 ranks by an earlier engine"):
        deepspeed.initialize(model=model, config={**config, "expert_parallel": EVERYWHERE})
    for engine in engines:
        engine.destroy()
    dense = {**config, "expert_parallel": {"enabled": False}}
    earlier = deepspeed.initialize(model=case.model(1), config=dense)[0]
    with pytest.raises(ValueError, match=r"an engine before this one shards model.*destroy\(\)"):
        deepspeed.initialize(model=earlier.module, config=config)
    earlier.destroy()


def what_cannot_be_spread_is_refused() -> None:
    """By errors that name key, value and remedy, on all ranks."""
    config = Case("mixtral", 2, 2).config()
    with pytest.raises(UsageError, match="--world-size 3: autoep_size is 2"):
        shape_of(config, 3)
    for name, stage, keys, message in (
        ("mixtral", 1, {"autoep_size": 3}, "must divide the 4 data-parallel ranks"),
        ("switch", 1, {"autoep_size": 2}, "SwitchTransformersExperts.*transformers 5"),
        ("dense", 1, {"autoep_size": 2}, "no experts that can be spread. They"),
        ("dense", 1, {"autoep_size": 2, "preset": "x"}, "no such key.*preset"),
        ("adapted", 3, {"autoep_size": 2}, "block.base_layer is inside a Adapter.*on other layers"),
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
