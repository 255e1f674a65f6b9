"""Architectures of transformers, small: how each is made, and a batch that it can learn from.

Together they have what stage 3 may stumble over: tied weights, `_init_weights` of their own, models
made of models, packed and unpacked experts, buffers, two stacks, recurrence, foreign reads.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

# What all models import at their first use: here forked ranks have it already.
import transformers.modeling_layers
from transformers import AutoConfig

VOCABULARY, LENGTH, IMAGE, IMAGE_TOKEN = 96, 12, 8, 90
Batch = dict[str, torch.Tensor]
Words = dict[str, Any]

_LAYERS: Words = {"num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES: Words = {"hidden_size": 32, "intermediate_size": 40, **_LAYERS}
_TEXT: Words = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
_NO_ENDS: Words = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
_DENSE: Words = {**_TEXT, **_SIZES, **_NO_ENDS}
_GROUPED: Words = {**_DENSE, "num_key_value_heads": 2, "head_dim": 8}
_EXPERTS: Words = {**_GROUPED, "num_experts_per_tok": 2}
_LOW_RANKS: Words = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
_LOW_RANKS |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
"""Attention of DeepSeek's."""
_STACK: Words = {"layers": 2, "attention_heads": 4, "ffn_dim": 40}
_BART: Words = {
    **_TEXT,
    **{f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in _STACK.items()},
    **{"d_model": 32, "decoder_start_token_id": 2, "forced_eos_token_id": None},
    **{"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2},
}
_T5: Words = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2}
_T5 |= {"num_heads": 4, "decoder_start_token_id": 0}
_VISION: Words = {**_SIZES, "image_size": IMAGE, "patch_size": 4}
_TEXT_PART: Words = {**_GROUPED, "pad_token_id": 0}


def _tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, VOCABULARY - 10, (2, LENGTH), generator=generator)


def _pixels(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(2, 3, IMAGE, IMAGE, generator=generator)


def text(config: Any, generator: torch.Generator) -> Batch:
    """Tokens that are their own labels."""
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def speech(config: Any, generator: torch.Generator) -> Batch:
    """A wave and a short word for it."""
    wave = torch.randn(2, 400, generator=generator)
    return {"input_values": wave, "labels": torch.randint(1, 20, (2, 3), generator=generator)}


def spectrum(config: Any, generator: torch.Generator) -> Batch:
    """A spectrogram and its text."""
    shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
    features = torch.randn(shape, generator=generator)
    return {"input_features": features, "labels": _tokens(generator)}


def picture(config: Any, generator: torch.Generator) -> Batch:
    """A picture and its class."""
    pixels = _pixels(generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (2,), generator=generator)}


def described(config: Any, generator: torch.Generator) -> Batch:
    """A picture and a text that names it."""
    batch = {"pixel_values": _pixels(generator), "input_ids": _tokens(generator)}
    return {**batch, "return_loss": True}  # type: ignore[dict-item]  # an option of the model


def _with_place(generator: torch.Generator, kinds: str) -> Batch:
    """Text with the place of a picture, which is not learned, and where that is as `kinds`."""
    batch = text(None, generator)
    batch["input_ids"][:, 1:5] = IMAGE_TOKEN
    batch["labels"][:, 1:5] = -100
    return {**batch, kinds: (batch["input_ids"] == IMAGE_TOKEN).long()}


def seen(config: Any, generator: torch.Generator) -> Batch:
    """Text with a picture of four patches in it."""
    return {**_with_place(generator, "token_type_ids"), "pixel_values": _pixels(generator)}


def seen_in_parts(config: Any, generator: torch.Generator) -> Batch:
    """Text with a picture that comes as flat patches, of which four make one token."""
    batch = _with_place(generator, "mm_token_type_ids")
    batch["pixel_values"] = torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=generator)
    return {**batch, "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}


@dataclass(frozen=True)
class Architecture:
    """`words` make its configuration (`model_type` too, if not the entry's name), `lora` peft's
    adapters, which alone are trained. `ways` are how the library's stage 3 can make it: in others
    it fills weights that it has not gathered (transformers 5.23), which raises.
    """

    head: str
    words: Words
    batch: Callable[[Any, torch.Generator], Batch] = text
    lora: Words = field(default_factory=dict)
    ways: tuple[str, ...] = ("from_config", "from_pretrained")

    def config(self, name: str) -> Any:
        """A new configuration."""
        words = dict(self.words)
        return AutoConfig.for_model(words.pop("model_type", name), **words)

    @property
    def cls(self) -> Any:
        """The model's class."""
        return getattr(transformers, self.head)


_WIDTH: Words = {"vocab_size": VOCABULARY, "hidden_size": 32}
_NARROW: Words = {"num_experts": 4, "moe_intermediate_size": 24}
_CAUSAL: dict[str, tuple[str, Words]] = {
    "llama": ("Llama", _GROUPED),
    "qwen2": ("Qwen2", {**_GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", _GROUPED),
    "phi": ("Phi", _DENSE),
    "gpt_neox": ("GPTNeoX", _DENSE),
    "gemma2": ("Gemma2", _GROUPED),
    "olmo2": ("Olmo2", _GROUPED),
    "bloom": ("Bloom", {**_WIDTH, "n_layer": 2, "n_head": 4}),
    "falcon": ("Falcon", _DENSE),
    "opt": ("OPT", {**_DENSE, "ffn_dim": 40, "word_embed_proj_dim": 24, "pad_token_id": 1}),
    "mamba": ("Mamba", {**_WIDTH, "num_hidden_layers": 2, "state_size": 4}),
    "mixtral": ("Mixtral", {**_EXPERTS, "num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", {**_EXPERTS, **_NARROW, "shared_expert_intermediate_size": 40}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, **_NARROW}),
    "olmoe": ("Olmoe", {**_EXPERTS, "num_experts": 4}),
    "gpt_oss": ("GptOss", {**_EXPERTS, "num_local_experts": 4}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_DENSE,
            **_LOW_RANKS,
            **{"num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
            **{"first_k_dense_replace": 1, "moe_intermediate_size": 24},
        },
    ),
}
_GPT2: Words = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}
_SPEECH: Words = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4)}
_SPEECH |= {"num_feat_extract_layers": 2, "apply_spec_augment": False, "ctc_loss_reduction": "mean"}
_SPEECH |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
_SPECTRUM: Words = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
_SPECTRUM |= {"suppress_tokens": None, "begin_suppress_tokens": None}
_SPARSE = {f"num_{key}": 1 for key in ("sparse_encoder_layers", "sparse_decoder_layers")}
_SPARSE_STEPS: Words = {"encoder_sparse_step": 2, "decoder_sparse_step": 2}
_PATCHES: Words = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2}
_ROTARY: Words = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_MARKS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")

ARCHITECTURES: dict[str, Architecture] = {
    **{name: Architecture(f"{head}ForCausalLM", words) for name, (head, words) in _CAUSAL.items()},
    "gpt2": Architecture("GPT2LMHeadModel", {**_GPT2, "n_positions": 64}),
    "bert": Architecture("BertForMaskedLM", {**_DENSE, "pad_token_id": 0}),
    "vit": Architecture("ViTForImageClassification", _VISION, picture),
    "wav2vec2": Architecture(
        "Wav2Vec2ForCTC",
        {**_DENSE, **_SPEECH, "vocab_size": 24, "pad_token_id": 0},
        speech,
        ways=(),
    ),
    "t5": Architecture("T5ForConditionalGeneration", _T5),
    "switch_transformers": Architecture(
        "SwitchTransformersForConditionalGeneration",
        {**_T5, **_SPARSE, "num_decoder_layers": 2, "num_experts": 4, "expert_capacity": 16},
        ways=("from_pretrained",),
    ),
    "bart": Architecture("BartForConditionalGeneration", _BART),
    "nllb_moe": Architecture(
        "NllbMoeForConditionalGeneration",
        {**_BART, **_SPARSE_STEPS, "model_type": "nllb-moe", "num_experts": 4},
    ),
    "whisper": Architecture(
        "WhisperForConditionalGeneration", {**_BART, **_SPECTRUM}, spectrum, ways=("from_config",)
    ),
    "clip": Architecture(
        "CLIPModel",
        {
            "text_config": {**_DENSE, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2},
            "vision_config": _VISION,
            "projection_dim": 16,
        },
        described,
    ),
    "llava": Architecture(
        "LlavaForConditionalGeneration",
        {
            "vision_config": {"model_type": "clip_vision_model", **_VISION},
            "text_config": {"model_type": "llama", **_TEXT_PART},
            **{"image_token_index": IMAGE_TOKEN, "image_seq_length": 4, "vision_feature_layer": -1},
        },
        seen,
    ),
    "paligemma": Architecture(
        "PaliGemmaForConditionalGeneration",
        {
            "vision_config": {"model_type": "siglip_vision_model", **_VISION},
            "text_config": {"model_type": "gemma", **_TEXT_PART},
            **{"image_token_index": IMAGE_TOKEN, "projection_dim": 32},
        },
        seen,
    ),
    "qwen2_vl": Architecture(
        "Qwen2VLForConditionalGeneration",
        {
            "vision_config": {**_PATCHES, "patch_size": 4},
            "text_config": {**_TEXT_PART, "rope_parameters": _ROTARY},
            **{name: IMAGE_TOKEN + number for number, name in enumerate(_MARKS)},
        },
        seen_in_parts,
    ),
    "lora": Architecture(
        "LlamaForCausalLM",
        {**_GROUPED, "model_type": "llama"},
        lora={"r": 4, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]},
    ),
}
