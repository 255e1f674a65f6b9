"""What names and shapes do not tell about known models, by transformers' `model_type`: how fused
layers are laid out, and what else of a model counts heads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.checkpoint.resharding.tensor_parallel import Share
from deepspeed.runtime.tensor_parallel.layers import is_matrix, num_inputs, num_outputs


class CannotCut(ValueError):
    """Why something of a model cannot be cut, to be told with its name."""


class Layout(NamedTuple):
    """How the outputs of a fused layer lie: `unit` neighbouring ones, such as those of a head, stay
    on one rank; `sizes` of the layers that lie behind one another, each cut by itself; empty: one.
    """

    unit: int
    sizes: tuple[int, ...] = ()


def _by_head(attention: nn.Module, layer: nn.Module) -> Layout:
    """Query, key and value of a head, then those of the next."""
    return Layout(3 * head_size(attention))


def _three_behind_one_another(attention: nn.Module, layer: nn.Module) -> Layout:
    width = num_outputs(layer) // 3
    if width != num_inputs(layer):
        raise CannotCut("is no layer of queries, keys and values; cross-attention is not supported")
    return Layout(head_size(attention), (width,) * 3)


def _falcon(attention: Any, layer: nn.Module) -> Layout:
    if attention.config.alibi:
        raise CannotCut("has alibi positions, which are not supported here; use rotary ones")
    if attention.new_decoder_architecture:
        return Layout(num_outputs(layer) // attention.num_kv_heads)  # each with its queries
    if attention.multi_query:
        raise CannotCut("has one key and value for all heads (multi_query), which no ranks can cut")
    return _by_head(attention, layer)


def _phi3_attention(attention: Any, layer: nn.Module) -> Layout:
    size = head_size(attention)
    queries, pairs = attention.config.num_attention_heads, attention.num_key_value_heads
    return Layout(size, (queries * size, pairs * size, pairs * size))


def _two_behind_one_another(mlp: nn.Module, layer: nn.Module) -> Layout:
    width = num_outputs(layer) // 2
    return Layout(1, (width, width))


class OwnAlibi(NamedTuple):
    """Takes this rank's heads of `alibi` `[batch * heads, 1, keys]` before a forward."""

    share: Share

    def __call__(self, module: nn.Module, args: object, kwargs: dict[str, Any]) -> Any:
        alibi: torch.Tensor = kwargs["alibi"]
        by_head = alibi.view(-1, self.share.pieces, *alibi.shape[1:])
        own = by_head[:, self.share.first : self.share.first + self.share.own]
        return args, {**kwargs, "alibi": own.reshape(-1, *alibi.shape[1:])}


def _prepare_bloom(attention: Any, share: Share) -> None:
    attention.register_forward_pre_hook(OwnAlibi(share), with_kwargs=True)


def _check_bloom(attention: Any) -> None:
    if attention.pretraining_tp > 1 and attention.slow_but_exact:
        raise CannotCut("reads slices of weights (slow_but_exact); set pretraining_tp to 1")


def _prepare_phi3(attention: Any, share: Share) -> None:
    """Give it a configuration of its own, where its forward reads the number of heads."""
    attention.config = copy.copy(attention.config)
    attention.config.num_attention_heads = share.of(attention.config.num_attention_heads)


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Family:
    """How fused layers' outputs lie, by their names; names of embeddings in attention whose columns
    are heads; `check` raises `CannotCut` for an attention; `prepare` is called once per attention
    after its layers have been cut, with this rank's heads (of keys, if queries have more).
    """

    fused: Mapping[str, Callable[[nn.Module, nn.Module], Layout]] = field(default_factory=dict)
    embeddings: tuple[str, ...] = ()
    check: Callable[[Any], None] = _nothing
    prepare: Callable[[Any, Share], None] = _nothing


PLAIN = Family()
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        ("gemma", "gemma2", "gemma3_text", "gptj", "llama", "mistral", "opt", "phi"), PLAIN
    ),
    **dict.fromkeys(("qwen2", "qwen3", "starcoder2"), PLAIN),
    "bloom": Family({"query_key_value": _by_head}, check=_check_bloom, prepare=_prepare_bloom),
    "falcon": Family({"query_key_value": _falcon}),
    "gpt2": Family({"c_attn": _three_behind_one_another}),
    "gpt_neox": Family({"query_key_value": _by_head}),
    "phi3": Family(
        {"qkv_proj": _phi3_attention, "gate_up_proj": _two_behind_one_another},
        prepare=_prepare_phi3,
    ),
    "t5": Family(embeddings=("relative_attention_bias",)),
}

_HEAD_SIZES = ("head_dim", "head_size", "key_value_proj_dim")
# Attributes of attention modules that count heads, or outputs of all of them.
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads")
_PAIRS = ("num_key_value_heads", "num_kv_heads")
_COUNTS = (*_HEADS, *_PAIRS, "inner_dim", "split_size")


def counts_of(scope: nn.Module) -> dict[str, int]:
    """Return the numbers of a module that are divided with its layers, by attribute."""
    found = {name: scope.__dict__.get(name) for name in _COUNTS}
    return {name: count for name, count in found.items() if type(count) is int}


def head_size(attention: nn.Module) -> int:
    """Return the width of a head: what the module says, else its queries' outputs by its own number
    of heads; 0 if neither is there, or its keys are of other heads. A model's configuration does
    not count: an attention may read its number there, where nothing divides it.
    """
    size = _first_number(attention, _HEAD_SIZES)
    heads = _first_number(attention, _HEADS)
    queries = _first_layer(attention, ("q_proj", "q"))
    if size or not heads or queries is None or num_outputs(queries) % heads:
        return size
    width, keys = num_outputs(queries) // heads, _first_layer(attention, ("k_proj", "k"))
    pairs = _first_number(attention, _PAIRS)
    if keys is None or num_outputs(keys) == width * (pairs or num_outputs(keys) // width):
        return width
    return 0


def _first_number(module: nn.Module, names: Iterable[str]) -> int:
    found = (getattr(module, name, None) for name in names)
    return next((number for number in found if isinstance(number, int)), 0)


def _first_layer(module: nn.Module, names: Iterable[str]) -> nn.Module | None:
    found = (getattr(module, name, None) for name in names)
    return next((layer for layer in found if layer is not None and is_matrix(layer)), None)
