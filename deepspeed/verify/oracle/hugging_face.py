"""Hugging Face models for the oracle, built from a configuration alone: no weights, no network.
What `hf:...` may say is told in docs/ds_verify.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl

import torch
from torch import nn

from deepspeed.verify.oracle import UsageError

# Attributes that turn random behaviour on when they are floats above zero: nn.LSTM.dropout,
# attention_dropout, resid_pdrop ...
RANDOM_ATTRIBUTES = ("dropout", "pdrop", "drop_path", "drop_prob", "layerdrop")
DEFAULT_SEQUENCE = 32
Config = Any
Model = Any
"""A configuration and an automatic model of transformers, which is an extra."""
# Above this a check in double precision is a matter of hours on a laptop.
MAX_PARAMETERS = 500_000_000


def build_model(
    spec: str, seed: int, rows: int
) -> tuple[nn.Module, Callable[[int, int, int], dict[str, torch.Tensor]]]:
    """Build a language model and random token batches for it."""
    try:
        # optional: transformers is an extra
        import transformers
    except ImportError as error:
        remedy = "pip install 'deepspeed[transformers]'"
        raise UsageError(f"--model hf:{spec}: needs transformers; {remedy}") from error
    # Special tokens outside a smaller vocabulary do not matter here.
    transformers.logging.set_verbosity_error()
    name, _, query = spec.partition("?")
    overrides = {key: _value(text) for key, text in parse_qsl(query, keep_blank_values=True)}
    sequence = overrides.pop("sequence", None)
    config = _config(transformers, name, overrides)
    turn_off(config, config.to_dict())
    config.use_cache = False
    try:
        module = _model_class(transformers, config).from_config(config)
    except ValueError as error:
        text = f"{type(config).__name__} is not a language model's; give a function"
        raise UsageError(f"--model hf:{spec}: {text}") from error
    size = sum(param.numel() for param in module.parameters())
    if size > MAX_PARAMETERS:
        text = f"{size:,} parameters; make it smaller, e.g. hf:{name}?n_layer=4&n_embd=64"
        raise UsageError(f"--model hf:{spec}: {text}")
    return module, _random_tokens(config, seed, rows, sequence)


def turn_off(owner: object, values: Mapping[str, object]) -> list[str]:
    """Set what makes `owner` random to 0, and name it."""
    is_on = {key: isinstance(value, float) and value > 0 for key, value in values.items()}
    found = [key for key in values if is_on[key] and key.endswith(RANDOM_ATTRIBUTES)]
    for key in found:
        setattr(owner, key, 0.0)
    return found


def _model_class(transformers: ModuleType, config: Config) -> Model:
    """Find the language model of a configuration: to a sequence, of masked or of next tokens."""
    if config.is_encoder_decoder:
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
        return transformers.AutoModelForSeq2SeqLM
    masked = transformers.AutoModelForMaskedLM
    return masked if type(config) in masked._model_mapping else transformers.AutoModelForCausalLM


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _config(transformers: ModuleType, name: str, overrides: dict[str, object]) -> Config:
    path = Path(name)
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise UsageError(f"--model hf:{name}: the folder has no config.json")
        given = json.loads(file.read_text(encoding="utf-8"))
        kind = given.pop("model_type", None)
    else:
        given, kind = {}, name
    try:
        known = transformers.AutoConfig.for_model(kind)
    except (ValueError, KeyError) as error:
        text = f"transformers knows no model type {kind!r}; use another, or a config.json"
        raise UsageError(f"--model hf:{name}: {text}") from error
    for key in overrides:
        if not hasattr(known, key):
            raise UsageError(f"--model hf:{name}?{key}=...: {type(known).__name__} has no {key!r}")
    return transformers.AutoConfig.for_model(kind, **{**given, **overrides})


def _random_tokens(
    config: Config, seed: int, rows: int, sequence: object
) -> Callable[[int, int, int], dict[str, torch.Tensor]]:
    sizes = ("n_positions", "max_position_embeddings")
    limit = next((getattr(config, key) for key in sizes if hasattr(config, key)), None)
    length = sequence if sequence is not None else min(DEFAULT_SEQUENCE, limit or DEFAULT_SEQUENCE)
    if not isinstance(length, int) or length < 2 or (limit is not None and length > limit):
        text = f"sequence={length} must be an integer from 2 to the model's {limit}"
        raise UsageError(f"--model hf: {text}")
    vocabulary = int(config.vocab_size)

    def batches(step: int, micro_batch: int, rank: int) -> dict[str, torch.Tensor]:
        number = ((seed * 1009 + step) * 1009 + micro_batch) * 1009 + rank
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, vocabulary, (rows, length), generator=generator)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return batches
