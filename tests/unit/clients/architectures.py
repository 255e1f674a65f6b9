"""Architectures of transformers, small: how each is made, and a batch that it can learn from.

Together they have what stage 3 may stumble over: tied weights, `_init_weights` of their own, models
made of models, packed and unpacked experts, buffers, two stacks, recurrence, foreign reads.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoConfig

VOCABULARY, LENGTH, IMAGE, IMAGE_TOKEN = 96, 12, 8, 90
Batch = dict[str, torch.Tensor]
Words = dict[str, Any]

_DENSE: Words = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED: Words = {**_DENSE, "num_key_value_heads": 2, "head_dim": 8}
_EXPERTS: Words = {**_GROUPED, "num_experts_per_tok": 2}
_BART: Words = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5: Words = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_VISION: Words = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": IMAGE,
    "patch_size": 4,
}
_TEXT_PART: Words = {**_GROUPED, "pad_token_id": 0}


def _tokens(generator: torch.Generator, size: int = VOCABULARY - 10) -> torch.Tensor:
    return torch.randint(3, size, (2, LENGTH), generator=generator)


def text(config: Any, generator: torch.Generator) -> Batch:
    """Tokens that are their own labels."""
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def speech(config: Any, generator: torch.Generator) -> Batch:
    """A wave and a short word for it."""
    return {
        "input_values": torch.randn(2, 400, generator=generator),
        "labels": torch.randint(1, 20, (2, 3), generator=generator),
    }


def spectrum(config: Any, generator: torch.Generator) -> Batch:
    """A spectrogram and its text."""
    return {
        "input_features": torch.randn(
            2, config.num_mel_bins, 2 * config.max_source_positions, generator=generator
        ),
        "labels": _tokens(generator),
    }


def picture(config: Any, generator: torch.Generator) -> Batch:
    """A picture and its class."""
    return {
        "pixel_values": torch.randn(2, 3, IMAGE, IMAGE, generator=generator),
        "labels": torch.randint(0, 2, (2,), generator=generator),
    }


def described(config: Any, generator: torch.Generator) -> Batch:
    """A picture and a text that names it."""
    return {
        "pixel_values": torch.randn(2, 3, IMAGE, IMAGE, generator=generator),
        "input_ids": _tokens(generator),
        "return_loss": True,  # type: ignore[dict-item]  # an option of the model
    }


def seen(config: Any, generator: torch.Generator) -> Batch:
    """Text with a picture of four patches in it."""
    tokens = _tokens(generator)
    tokens[:, 1:5] = IMAGE_TOKEN
    labels = tokens.clone()
    labels[:, 1:5] = -100
    return {
        "input_ids": tokens,
        "labels": labels,
        "token_type_ids": (tokens == IMAGE_TOKEN).long(),
        "pixel_values": torch.randn(2, 3, IMAGE, IMAGE, generator=generator),
    }


def seen_in_parts(config: Any, generator: torch.Generator) -> Batch:
    """Text with a picture that comes as flat patches, of which four make one token."""
    batch = text(config, generator)
    batch["input_ids"][:, 1:5] = IMAGE_TOKEN
    batch["labels"][:, 1:5] = -100
    batch["pixel_values"] = torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=generator)
    batch["image_grid_thw"] = torch.tensor([[1, 4, 4]] * 2)
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE_TOKEN).long()
    return batch


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


_CAUSAL: dict[str, tuple[str, Words]] = {
    "llama": ("LlamaForCausalLM", _GROUPED),
    "qwen2": ("Qwen2ForCausalLM", {**_GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", _GROUPED),
    "phi": ("PhiForCausalLM", _DENSE),
    "gpt_neox": ("GPTNeoXForCausalLM", _DENSE),
    "gemma2": ("Gemma2ForCausalLM", _GROUPED),
    "olmo2": ("Olmo2ForCausalLM", _GROUPED),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
    "bloom": (
        "BloomForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "falcon": ("FalconForCausalLM", _DENSE),
    "opt": (
        "OPTForCausalLM",
        {**_DENSE, "ffn_dim": 40, "word_embed_proj_dim": 24, "pad_token_id": 1},
    ),
    "mamba": (
        "MambaForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
    "mixtral": ("MixtralForCausalLM", {**_EXPERTS, "num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {
            **_EXPERTS,
            "num_experts": 4,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 24},
    ),
    "olmoe": ("OlmoeForCausalLM", {**_EXPERTS, "num_experts": 4}),
    "gpt_oss": ("GptOssForCausalLM", {**_EXPERTS, "num_local_experts": 4}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **_DENSE,
            "num_key_value_heads": 4,
            "num_experts_per_tok": 2,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
}

ARCHITECTURES: dict[str, Architecture] = {
    **{name: Architecture(head, words) for name, (head, words) in _CAUSAL.items()},
    "bert": Architecture("BertForMaskedLM", {**_DENSE, "pad_token_id": 0}),
    "vit": Architecture("ViTForImageClassification", _VISION, picture),
    "wav2vec2": Architecture(
        "Wav2Vec2ForCTC",
        {
            **_DENSE,
            "vocab_size": 24,
            "conv_dim": (16, 16),
            "conv_stride": (5, 4),
            "conv_kernel": (10, 4),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
            "apply_spec_augment": False,
            "pad_token_id": 0,
            "ctc_loss_reduction": "mean",
        },
        speech,
        ways=(),
    ),
    "t5": Architecture("T5ForConditionalGeneration", _T5),
    "switch_transformers": Architecture(
        "SwitchTransformersForConditionalGeneration",
        {
            **_T5,
            "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_experts": 4,
            "expert_capacity": 16,
        },
        ways=("from_pretrained",),
    ),
    "bart": Architecture("BartForConditionalGeneration", _BART),
    "nllb_moe": Architecture(
        "NllbMoeForConditionalGeneration",
        {
            **_BART,
            "model_type": "nllb-moe",
            "num_experts": 4,
            "encoder_sparse_step": 2,
            "decoder_sparse_step": 2,
        },
    ),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        {
            **_BART,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        spectrum,
        ways=("from_config",),
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
            "image_token_index": IMAGE_TOKEN,
            "image_seq_length": 4,
            "vision_feature_layer": -1,
        },
        seen,
    ),
    "paligemma": Architecture(
        "PaliGemmaForConditionalGeneration",
        {
            "vision_config": {"model_type": "siglip_vision_model", **_VISION},
            "text_config": {"model_type": "gemma", **_TEXT_PART},
            "image_token_index": IMAGE_TOKEN,
            "projection_dim": 32,
        },
        seen,
    ),
    "qwen2_vl": Architecture(
        "Qwen2VLForConditionalGeneration",
        {
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 32,
                "num_heads": 4,
                "mlp_ratio": 2,
                "patch_size": 4,
            },
            "text_config": {
                **_TEXT_PART,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [1, 1, 2],
                },
            },
            "image_token_id": IMAGE_TOKEN,
            "video_token_id": IMAGE_TOKEN + 1,
            "vision_start_token_id": IMAGE_TOKEN + 2,
            "vision_end_token_id": IMAGE_TOKEN + 3,
        },
        seen_in_parts,
    ),
    "lora": Architecture(
        "LlamaForCausalLM",
        {**_GROUPED, "model_type": "llama"},
        lora={"r": 4, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]},
    ),
}
