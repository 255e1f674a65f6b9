"""Runs a model of transformers with experts over ranks, against plain torch. Collective."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.moe.expert_rows import rows_of
from deepspeed.utils import safe_get_full_fp32_params, safe_get_full_grads
from deepspeed.utils.tensor_fragment import logical_shape
from unit.clients.architectures import ARCHITECTURES, LENGTH, VOCABULARY, Architecture, text
from unit.v1.checkpoint.runs import by_name
from unit.v1.gathering import from_all_ranks

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
_OTHERS = {
    "deepseek_v2": Architecture(
        "DeepseekV2ForCausalLM",
        {
            **_SMALL,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "granitemoe": Architecture("GraniteMoeForCausalLM", {**_SMALL, "num_local_experts": 4}),
    "glm4_moe": Architecture(
        "Glm4MoeForCausalLM",
        {
            **_SMALL,
            "head_dim": 8,
            "n_routed_experts": 4,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
    ),
    "ernie4_5_moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        {
            **_SMALL,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 1,
        },
    ),
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
        """Whether updates reach the next forward is asked of half of the cases."""
        return 2 if self.precision == "fp32" and self.ep_size == 2 else 1

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
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": CLIP,
            "optimizer": {"type": "SGD", "params": {"lr": LR}},
            "bf16": {"enabled": self.precision == "bf16"},
            "zero_optimization": zero_block(self.stage),
            "expert_parallel": {"enabled": True, "autoep_size": self.ep_size},
            **dict(self.options),
        }


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


def reference_step(model: Any, case: Case, step: int, world: int) -> float:
    """Leave gradients of the mean over the whole batch in the model; returns their norm."""
    model.zero_grad()
    parts = [
        batch(model, step, rank, micro)
        for rank in range(world)
        for micro in range(case.accumulation)
    ]
    model(**{key: torch.cat([part[key] for part in parts]) for key in parts[0]}).loss.backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return math.sqrt(sum(grad.double().square().sum().item() for grad in grads))


def take_step(model: Any, norm: float) -> None:
    """SGD with clipping, in place."""
    factor = min(1.0, CLIP / (norm + 1e-6))
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.sub_(LR * factor * param.grad)


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
    whole, world, rank = case.model(), dist.get_world_size(), dist.get_rank()
    if case.precision == "bf16":
        whole = whole.bfloat16()
    params = dict(engine.module.named_parameters())
    spread = [name for name, param in params.items() if rows_of(param) is not None]
    found = [] if spread else ["nothing is spread"]
    try:
        for step in range(case.steps):
            for micro in range(case.accumulation):
                loss = engine(**batch(whole, step, rank, micro)).loss
                engine.backward(loss)
                if micro + 1 < case.accumulation:
                    engine.step()
            norm = reference_step(whole, case, step, world)
            size = max(norm, 1e-3)
            grads = own_grads(params)
            for name, wanted in whole.named_parameters():
                grad = torch.zeros_like(wanted) if wanted.grad is None else wanted.grad
                grad = own_rows(grad, params[name]).float()
                error = (grads[name].float() - grad).norm().item()
                bound = min(case.tolerance * size, max(0.5 * grad.norm().item(), 1e-7))
                if case.precision == "bf16":
                    bound = case.tolerance * size
                if not error <= bound:
                    found.append(f"step {step}: gradient of {name} is off by {error:.1e}")
            engine.step()
            take_step(whole, norm)
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
        engine.backward(engine(**tokens).loss)
        engine.step()


def whole_state(engine: Any) -> dict[str, torch.Tensor]:
    """Masters and moments by name, whole, put together by where each rank's rows begin."""
    own: dict[str, Any] = {}
    for kind_and_name, value in by_name(engine).items():
        kind, name = kind_and_name.split(".", 1)
        rows = rows_of(engine.module.get_parameter(name))
        own[kind_and_name] = (None if rows is None else rows.first, value)
    everywhere = from_all_ranks(own)
    found = {}
    for name, (first, value) in own.items():
        parts = {} if first is None else dict(rank[name] for rank in everywhere)
        whole = value if first is None or value is None else [parts[at] for at in sorted(parts)]
        found[name] = torch.cat(whole) if isinstance(whole, list) else whole
    return found
