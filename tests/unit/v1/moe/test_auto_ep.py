"""Experts of transformers' models spread over ranks: equal to one process with the whole model."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.ds_to_universal import main, parse_arguments
from deepspeed.comm.watch import intent
from deepspeed.moe.expert_rows import rows_of
from deepspeed.runtime.engine_parts.model_setup import cast_module
from deepspeed.runtime.zero import model_sharding
from deepspeed.runtime.zero.parameters.zero_parameter import is_zero_param
from deepspeed.utils import groups, safe_get_full_fp32_params, safe_get_full_grads
from deepspeed.utils.exceptions import MisuseError
from deepspeed.utils.tensor_fragment import logical_shape
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.verify.oracle import UsageError
from deepspeed.verify.oracle.plan import shape_of
from unit import one_process
from unit.common import DistributedTest
from unit.models import config_of, sgd
from unit.one_process import OneProcess, own_loss
from unit.v1.checkpoint.runs import by_name
from unit.v1.checkpoint.runs import differences as unlike
from unit.v1.gathering import from_all_ranks

pytest.importorskip("transformers.integrations.moe", reason="older releases have lists of experts")

from transformers.integrations import HfDeepSpeedConfig

from unit.clients.architectures import ARCHITECTURES, LENGTH, VOCABULARY, Architecture, text

LR, CLIP = 0.5, 0.3
# What is left is the order of sums: over ranks, over the tokens of an expert.
TOLERANCE = 2e-5

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_DENSE_FIRST = {"n_routed_experts": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8}
_LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "num_key_value_heads": 4}
_ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}
_OTHERS = {
    name: Architecture(f"{kind}ForCausalLM", {**_SMALL, **words})
    for name, kind, words in (
        ("deepseek_v2", "DeepseekV2", {**_DENSE_FIRST, **_LATENT, "n_shared_experts": 1}),
        ("granitemoe", "GraniteMoe", {"num_local_experts": 4}),
        ("glm4_moe", "Glm4Moe", {**_DENSE_FIRST, "head_dim": 8}),
        ("ernie4_5_moe", "Ernie4_5_Moe", {**_ERNIE, "moe_intermediate_size": 24}),
    )
}
_KNOWN = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3")
MODELS = {**{name: ARCHITECTURES[name] for name in _KNOWN}, **_OTHERS}
# Of these a layer is like the next. Of gpt_oss both count: a rank whose experts get no token shows
# in the order in which layers are reduced.
for _name in ("qwen2_moe", "qwen3_moe", "olmoe"):
    MODELS[_name] = replace(MODELS[_name], words={**MODELS[_name].words, "num_hidden_layers": 1})


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        alone: The router sends everything to the first two experts.
        recomputes: Activations are recomputed in backward.
        client: The optimizer is a client's, made before the experts are spread.
        frozen: Experts are not trained.
    """

    name: str
    ep_size: int
    stage: int
    precision: str = "fp32"
    accumulation: int = 1
    alone: bool = False
    recomputes: bool = False
    client: bool = False
    frozen: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def steps(self) -> int:
        """Whether updates reach the next forward is asked at stages 0, 2 and 3."""
        return 2 if self.alone and self.ep_size == 2 else 1

    @property
    def tolerance(self) -> float:
        """bf16: products of other shapes are rounded otherwise, as in `runner`."""
        return 4 * 2.0**-8 if self.precision == "bf16" else TOLERANCE

    def model(self, seed: int = 3) -> Any:
        """The model in plain torch."""
        architecture = MODELS[self.name]
        torch.manual_seed(seed)
        model = architecture.cls(architecture.config(self.name)).eval()
        with torch.no_grad():
            for name, param in model.named_parameters():
                # Routers that know what they want.
                if name.endswith(("gate.weight", "router.weight", "router.layer.weight")):
                    param.mul_(20)
                if self.alone and name.endswith("router.bias"):
                    param.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
                param.requires_grad_(not (self.frozen and ".experts." in name))
                # Exact in bf16, so that masters start with them.
                param.copy_(param.bfloat16().float())
        return model

    def config(self) -> dict[str, Any]:
        """Of the engine."""
        keys: dict[str, Any] = {
            "gradient_clipping": CLIP,
            "optimizer": sgd(LR),
            "zero_optimization": zero_block(self.stage),
            "expert_parallel": {"enabled": True, "autoep_size": self.ep_size},
            **dict(self.options),
        }
        return config_of(self.stage, 2, self.accumulation, self.precision, **keys)


def zero_block(stage: int) -> dict[str, Any]:
    """With several buckets; of stage 3 biases of experts persist, and weights may be gathered."""
    block: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 2000}
    if stage == 3:
        block["stage3_param_persistence_threshold"] = 200
        block["stage3_gather_16bit_weights_on_model_save"] = True
    return block


def batch(model: Any, step: int, rank: int, micro: int) -> dict[str, torch.Tensor]:
    """Other tokens on each rank; rank 1 sees few different ones, so that its routes are uneven."""
    tokens = text(model.config, torch.Generator().manual_seed(97 * step + 10 * rank + micro))
    tokens = tokens["input_ids"] % (5 if rank == 1 else VOCABULARY)
    assert tokens.shape == (2, LENGTH)
    return {"input_ids": tokens, "labels": tokens.clone()}


def whole_batch(model: Any, case: Case, step: int) -> dict[str, torch.Tensor]:
    """All ranks' micro-batches."""
    ranks, micros = range(dist.get_world_size()), range(case.accumulation)
    parts = [batch(model, step, rank, micro) for rank in ranks for micro in micros]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def own_rows(whole: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """What of a whole parameter is this rank's."""
    rows = rows_of(param)
    return whole if rows is None else whole.narrow(0, rows.first, logical_shape(param)[0])


Params = dict[str, nn.Parameter]


def sharded(params: Params) -> Params:
    """Those of which ranks have shards of masters, or masters at least."""
    return {name: param for name, param in params.items() if hasattr(param, "_hp_mapping")}


def own_grads(params: Params) -> dict[str, torch.Tensor]:
    """What the next step will use of gradients."""
    linked = sharded(params)
    grads = {name: param.grad for name, param in params.items() if name not in linked}
    grads |= dict(zip(linked, safe_get_full_grads(list(linked.values())) or (), strict=False))
    missing = {name: param for name, param in params.items() if grads.get(name) is None}
    zeros = {name: param.new_zeros(logical_shape(param)) for name, param in missing.items()}
    return {**grads, **zeros}


def own_values(params: Params) -> dict[str, torch.Tensor]:
    """Master weights, or the parameters."""
    linked = sharded(params)
    masters = safe_get_full_fp32_params(list(linked.values()))
    others = {name: param for name, param in params.items() if name not in linked}
    with deepspeed.zero.GatheredParameters(list(others.values())):
        values = {name: param.detach().clone() for name, param in others.items()}
    return {**values, **dict(zip(linked, masters, strict=True))}


def started(case: Case) -> Any:
    """An engine. Ranks come with other weights; the first one's count."""
    model = case.model(seed=3 + dist.get_rank())
    if case.recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    config = case.config()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR) if case.client else None
    if case.client:
        del config["optimizer"]
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def differences(case: Case) -> list[str]:
    """What is not as in one process that sees the whole batch. All ranks call it."""
    engine = started(case)
    whole, rank = case.model(), dist.get_rank()
    if case.precision == "bf16":
        whole = whole.bfloat16()
    process = OneProcess(whole, LR, clip=CLIP)
    params = dict(engine.module.named_parameters())
    spread = [name for name, param in params.items() if rows_of(param) is not None]
    found = [] if spread else ["nothing is spread"]
    try:
        for step in range(case.steps):
            for micro in range(case.accumulation):
                if micro:
                    engine.step()
                engine.backward(own_loss(engine, batch(whole, step, rank, micro)))
            process.backward([whole_batch(whole, case, step)])
            right, grads = process.grads(), own_grads(params)
            process.update()
            norm = process.norm.item()
            size = max(norm, 1e-3)
            for name, wanted in whole.named_parameters():
                grad = own_rows(right.get(name, torch.zeros_like(wanted)), params[name]).float()
                error = (grads[name].float() - grad).norm().item()
                bound = min(case.tolerance * size, max(0.5 * grad.norm().item(), 1e-7))
                if case.precision == "bf16":
                    bound = case.tolerance * size
                if not error <= bound:
                    found.append(f"step {step}: gradient of {name} is off by {error:.1e}")
            engine.step()
            got = float(engine.get_global_grad_norm())
            if not math.isclose(got, norm, rel_tol=case.tolerance):
                found.append(f"step {step}: norm {got} instead of {norm}")
            for name, value in own_values(params).items() if case.precision == "fp32" else ():
                wanted = own_rows(whole.get_parameter(name), params[name])
                error = (value - wanted).norm().item()
                if not error <= 3 * case.tolerance * LR * CLIP:
                    found.append(f"step {step}: {name} is off by {error:.1e}")
    finally:
        engine.destroy()
    return [f"{case}: {line}" for line in found]


ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}


def resumable(case: Case, seed: int, **options: Any) -> Any:
    """An engine with moments to save, of other weights per seed; `ep_size` 1 spreads nothing."""
    keys = {**case.config(), "optimizer": ADAM, **options}
    return deepspeed.initialize(model=case.model(seed), config=keys)[0]


def train(engine: Any, steps: int) -> None:
    """Adam steps on other tokens at each rank."""
    for _ in range(steps):
        tokens = batch(engine.module, engine.global_steps, dist.get_rank(), 0)
        one_process.train(engine, [tokens])


def whole_state(engine: Any) -> dict[str, torch.Tensor]:
    """Masters and moments by name, whole, put together by where each rank's rows begin; on the
    first rank.
    """
    own: dict[str, Any] = {}
    for kind_and_name, value in by_name(engine).items():
        kind, name = kind_and_name.split(".", 1)
        rows = rows_of(engine.module.get_parameter(name))
        own[kind_and_name] = (None if rows is None else rows.first, value)
    everywhere = from_all_ranks(own, first_alone=True)
    found = {}
    for name, (first, value) in own.items() if everywhere else ():
        parts = {} if first is None else dict(rank[name] for rank in everywhere)
        whole = value if first is None or value is None else [parts[at] for at in sorted(parts)]
        found[name] = torch.cat(whole) if isinstance(whole, list) else whole
    return found


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


class Adapter(nn.Module):
    """Holds what it adapts as peft's adapters do."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def convert(source: str, target: str) -> None:
    main(parse_arguments(["--input_folder", source, "--output_folder", target]))


def refused_model(name: str) -> Any:
    if name == "dense":
        return nn.Linear(2, 2)
    if name == "adapted":
        experts = Case("mixtral", 2, 0).model().model.layers[0].mlp.experts
        return nn.ModuleDict({"block": Adapter(experts)})
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
    with pytest.raises(UsageError, match="--world-size 3: expert_parallel.autoep_size is 2"):
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
    config = {"train_batch_size": 4, "expert_parallel": {"autoep_size": 2}}
    with pytest.raises(ValueError, match='autoep_size 2 without "enabled"'):
        deepspeed.initialize(model=refused_model("dense"), config=config)
