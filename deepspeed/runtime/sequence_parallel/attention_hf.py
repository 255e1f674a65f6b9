"""Ulysses attention in models of transformers, which are not changed: their attention function is,
for one model, or for all of a kind.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.comm.parallel_map import Axis, ParallelMap, make_mesh
from deepspeed.runtime.sequence_parallel.sequence_masks import LocalMask, check_library
from deepspeed.sequence.layer import DistributedAttention, plan_heads

# A layer's own function, which no other can stand for, and one whose masks are compiled for it.
UNSUPPORTED_CORES = ("eager", "flex_attention")
# Arguments of attention functions with something per head or per document of this rank.
PER_HEAD = ("s_aux", "sinks", "position_bias")
PER_DOCUMENT = ("cu_seq_lens_q", "cu_seq_lens_k")
KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def _asks(axis: str, what: str) -> Callable[[SequenceGroups], Any]:
    """Make one of Megatron's getters: the `what` of an axis of the map."""
    return lambda groups: getattr(getattr(groups._map, axis), what)


class SequenceGroups:
    """An mpu that knows who shares a sequence: `size` neighbouring ranks each."""

    def __init__(self, size: int) -> None:
        world = dist.get_world_size()
        if size < 1 or world % size:
            raise ValueError(
                f"sequence_parallel_size {size} does not divide the {world} ranks of the world: "
                "choose one that does"
            )
        self._map = ParallelMap(mesh=make_mesh(world // size, size))

    @property
    def replicas(self) -> Axis:
        return self._map.replicas

    get_sequence_parallel_group = _asks("sequence", "group")
    get_sequence_parallel_world_size = _asks("sequence", "size")
    get_sequence_parallel_rank = _asks("sequence", "rank")
    get_data_parallel_group = _asks("data", "group")
    get_data_parallel_world_size = _asks("data", "size")
    get_data_parallel_rank = _asks("data", "rank")


class _OnWholeSequences(nn.Module):
    """transformers' attention function, [b, h, s, d] in and out, for `DistributedAttention`."""

    def __init__(self, attn: Callable[..., Any]) -> None:
        super().__init__()
        self.attn = attn

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        module: nn.Module,
        mask: object,
        options: dict[str, Any],
    ) -> torch.Tensor:
        if hasattr(module, "num_key_value_groups"):
            # The layer's ratio of heads is not this rank's where key heads were repeated.
            layer: Any = copy.copy(module)
            layer.num_key_value_groups = query.shape[1] // key.shape[1]
            module = layer
        context: torch.Tensor = self.attn(module, query, key, value, mask, **options)[0]
        return context.transpose(1, 2)


class UlyssesSPAttentionHF(nn.Module):
    """An attention function of transformers on sequences that the P ranks of `process_group` share.

    `attn` sees whole sequences: called with (layer, query, key, value, mask) and options, it
    returns ([b, s, h, d], anything). The model has `attn_head_count` query heads of
    `attn_head_size` and `kv_head_count` key heads. Lengths per rank and in all, and `batch_size`,
    are checked unless `seq_length_is_variable`. With `disable_in_eval` layers in evaluation mode
    hold whole sequences. ValueError for more ranks than heads, key heads that don't divide the
    query heads, or lengths that contradict each other.
    """

    def __init__(
        self,
        attn: Callable[..., Any],
        batch_size: int,
        attn_head_count: int,
        attn_head_size: int,
        kv_head_count: int,
        num_hidden_layers: int,
        process_group: dist.Group,
        seq_length_is_variable: bool = False,
        local_seq_length: int | None = None,
        global_seq_length: int | None = None,
        disable_in_eval: bool = False,
    ) -> None:
        super().__init__()
        self.attn, self.process_group = attn, process_group
        self.ranks = dist.get_world_size(process_group)
        self.disable_in_eval = disable_in_eval
        self.model = (num_hidden_layers, attn_head_count, kv_head_count, attn_head_size)
        plan_heads(attn_head_count, kv_head_count, self.ranks)
        if not seq_length_is_variable and (
            local_seq_length is None or global_seq_length != local_seq_length * self.ranks
        ):
            raise ValueError(
                f"local_seq_length {local_seq_length} times {self.ranks} ranks is not "
                f"global_seq_length {global_seq_length}: give both, or seq_length_is_variable=True"
            )
        self.fixed = None if seq_length_is_variable else (batch_size, local_seq_length)
        self.whole = DistributedAttention(
            _OnWholeSequences(attn), process_group, scatter_idx=1, gather_idx=2
        )

    def extra_repr(self) -> str:
        layers, heads, key_heads, size = self.model
        return (
            f"{layers} layers, {heads} heads of {size}, {key_heads} key heads, {self.ranks} ranks"
        )

    def is_split(self, module: nn.Module) -> bool:
        """Tell whether this layer holds a piece of a sequence now."""
        return self.ranks > 1 and (module.training or not self.disable_in_eval)

    def forward(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        given: bool = True,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend over whole sequences; returns [b, s / P, h, d], and None: weights are not
        gathered.

        `query` is [b, h, s / P, d], `key` and `value` have as many heads or a divisor of them.
        `attention_mask` is a `LocalMask`, or None, which the function gets as it is; `given`:
        position ids come from the caller of the model. `kwargs` are options of the function, with
        `position_ids` [b, s / P] where there is a mask. The function gets those of the whole
        sequence if documents are packed, with their limits where there is one row, else None.
        """
        if not self.is_split(module):
            mask = (
                attention_mask.here() if isinstance(attention_mask, LocalMask) else attention_mask
            )
            result: tuple[torch.Tensor, None] = self.attn(
                module, query, key, value, mask, *args, **kwargs
            )
            return result
        self._check(query, args, kwargs)
        mask = attention_mask
        if isinstance(attention_mask, LocalMask):
            mask, options = attention_mask.whole(
                self._positions(module, kwargs), self.process_group, given
            )
            kwargs |= options
        elif attention_mask is not None:
            raise ValueError(
                f"an attention mask of shape {tuple(attention_mask.shape)} knows this rank's "
                "positions only: give the model [b, s / P], where 0 is padding, or none"
            )
        context = self.whole(query, key, value, 0, None, module, mask, kwargs)
        return context.transpose(1, 2), None

    def _check(self, query: torch.Tensor, args: object, kwargs: dict[str, Any]) -> None:
        if self.fixed is not None and (query.shape[0], query.shape[2]) != self.fixed:
            raise ValueError(
                f"queries of {query.shape[0]} rows and {query.shape[2]} positions; registered were "
                f"{self.fixed[0]} and {self.fixed[1]} per rank: register seq_length and "
                "micro_batch_size as they are, or seq_length_is_variable=True"
            )
        if args or any(kwargs.get(name) is not None for name in PER_HEAD):
            raise ValueError(
                f"attention with one of {PER_HEAD}, or positional options, cannot be split over "
                "ranks: these have something for each head; use no sequence parallelism"
            )
        if any(kwargs.get(name) is not None for name in PER_DOCUMENT):
            raise ValueError(
                f"{PER_DOCUMENT} are those of this rank's positions: leave them out; position_ids "
                "that begin at 0 for each document say the same"
            )

    def _positions(self, module: nn.Module, kwargs: dict[str, Any]) -> torch.Tensor:
        positions = kwargs.get("position_ids")
        if not isinstance(positions, torch.Tensor) or positions.dim() != 2:
            raise ValueError(
                f"{type(module).__name__} hands no position_ids [b, s / P] to its attention, from "
                "which masks of whole sequences are made: this model cannot be split over ranks"
            )
        return positions

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: object,
        core_attn_implementation: str | None,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> SequenceGroups:
        """Split the attention of a model over ranks; collective. Returns the mpu for `initialize`.

        `model_name_or_path` is the model; or the name or folder of a configuration, and all models
        of that type are meant, also those still to be made. `core_attn_implementation` is the
        function that sees whole sequences, as the model's `attn_implementation` names it (None: the
        model's), not "eager" or "flex_attention". `max_length` is upstream's older name of
        `seq_length`. ValueError for what cannot be split so, ImportError for a transformers that is
        too old.
        """
        check_library()
        length = seq_length if max_length is None else max_length
        if None not in (seq_length, max_length) and seq_length != max_length:
            raise ValueError(f"seq_length {seq_length} and max_length {max_length}: give one")
        _check_length(length, seq_length_is_variable, sequence_parallel_size)
        model = model_name_or_path if isinstance(model_name_or_path, nn.Module) else None
        config = _config_of(model_name_or_path)
        core = _core_of(model, config, core_attn_implementation)
        dist.init_distributed()
        groups = SequenceGroups(sequence_parallel_size)
        door = _Door.of(core)
        text = config.get_text_config()
        heads = text.num_attention_heads
        attention = cls(
            attn=door.attend,
            batch_size=micro_batch_size,
            attn_head_count=heads,
            attn_head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
            kv_head_count=getattr(text, "num_key_value_heads", None) or heads,
            num_hidden_layers=text.num_hidden_layers,
            process_group=groups.get_sequence_parallel_group(),
            seq_length_is_variable=seq_length_is_variable,
            local_seq_length=None if length is None else length // sequence_parallel_size,
            global_seq_length=length,
            disable_in_eval=disable_in_eval,
        )
        door.put(_Registered(attention, model, config))
        return groups


def _check_length(length: int | None, variable: bool, ranks: int) -> None:
    if length is None and not variable:
        raise ValueError("give seq_length, or seq_length_is_variable=True")
    if length is not None and not variable and length % ranks:
        raise ValueError(
            f"seq_length {length} cannot be split over {ranks} ranks: pad it to a multiple of "
            f"{ranks}"
        )


def _config_of(model_name_or_path: Any) -> Any:
    if not isinstance(model_name_or_path, nn.Module):
        from transformers import AutoConfig  # startup: a client's library, once it is used

        return AutoConfig.from_pretrained(model_name_or_path)
    config = getattr(model_name_or_path, "config", None)
    if config is None:
        raise ValueError(
            f"{type(model_name_or_path).__name__} has no config: give a model of transformers; for "
            "others use deepspeed.sequence.layer.DistributedAttention"
        )
    return config


def _core_of(model: nn.Module | None, config: Any, asked: str | None) -> str:
    """Name the attention function; refuse one that cannot be wrapped, or that the model doesn't
    use, and layers that see other positions than attention does.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # startup: see above

    used = config._attn_implementation
    core = asked or used or "sdpa"
    if core in UNSUPPORTED_CORES or core not in ALL_ATTENTION_FUNCTIONS:
        known = sorted(set(ALL_ATTENTION_FUNCTIONS) - set(UNSUPPORTED_CORES))
        raise ValueError(
            f"core_attn_implementation {core!r} cannot be split over ranks: choose one of {known}"
        )
    if model is not None and used != core:
        raise ValueError(
            f"core_attn_implementation {core!r}, but the model uses {used!r}: make it with "
            f"attn_implementation={core!r}"
        )
    layers = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if layers - KNOWN_LAYERS:
        raise ValueError(
            f"layers of type {sorted(layers - KNOWN_LAYERS)} look at other positions than masks of "
            "a whole sequence say: use a model with full or sliding attention"
        )
    return core


class _Registered:
    """An attention and the layers that it is for: a model's, or (None) a configuration type's."""

    def __init__(
        self, attention: UlyssesSPAttentionHF, model: nn.Module | None, config: Any
    ) -> None:
        self.attention = attention
        self.is_of_one_model = model is not None
        self._modules = weakref.WeakSet(model.modules() if model is not None else ())
        configs = [config, config.get_text_config()]
        for module in self._modules:
            configs.append(getattr(module, "config", None))
        self._configs = {id(item): item for item in configs if item is not None}
        self._types = {item.model_type for item in (config, config.get_text_config())}
        if model is not None:
            model.register_forward_pre_hook(self._want_positions, with_kwargs=True)

    def is_over(self) -> bool:
        return self.is_of_one_model and not self._modules

    def has_layer(self, module: nn.Module) -> bool:
        if self.is_of_one_model:
            return module in self._modules
        return getattr(getattr(module, "config", None), "model_type", None) in self._types

    def has_config(self, config: Any) -> bool:
        return id(config) in self._configs or (
            not self.is_of_one_model and config.model_type in self._types
        )

    def _want_positions(self, model: Any, args: Any, kwargs: Any) -> None:
        """Every rank's positions begin somewhere else, which a model doesn't know by itself."""
        if not self.attention.is_split(model) or kwargs.get("position_ids") is not None:
            return
        bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
        if bound.arguments.get("position_ids") is None:
            raise ValueError(
                f"{type(model).__name__} holds a piece of each sequence and got no position_ids: "
                "give it those of its piece, cut from 0 to s - 1 or from those of packed documents "
                "(UlyssesSPDataLoaderAdapter does)"
            )


class _Door:
    """The place of one of transformers' attention functions, and of its masks, taken once. Layers
    that nobody registered go on as before.
    """

    _taken: dict[str, _Door] = {}

    def __init__(self, core: str) -> None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # startup: see above
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # startup: see above

        self.attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[core]
        self._make_mask: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS[core]
        self._registered: list[_Registered] = []
        ALL_ATTENTION_FUNCTIONS.register(core, self._attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(core, self._mask)

    @classmethod
    def of(cls, core: str) -> _Door:
        if core not in cls._taken:
            cls._taken[core] = cls(core)
        return cls._taken[core]

    def put(self, registered: _Registered) -> None:
        """Register an attention; what was registered last counts first."""
        living = [item for item in self._registered if not item.is_over()]
        self._registered = [registered, *living]

    def _attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object,
        *args: object,
        **kwargs: object,
    ) -> Any:
        for item in self._registered:
            if item.has_layer(module):
                if item.attention.is_split(module):
                    kwargs["given"] = item.is_of_one_model
                    _refuse_ready(attention_mask)
                return item.attention(module, query, key, value, attention_mask, *args, **kwargs)
        mask = attention_mask.here() if isinstance(attention_mask, LocalMask) else attention_mask
        return self.attend(module, query, key, value, mask, *args, **kwargs)

    def _mask(self, *args: object, **kwargs: object) -> Any:
        config = kwargs.get("config")
        if args or not any(item.has_config(config) for item in self._registered):
            return self._make_mask(*args, **kwargs)
        return LocalMask(self._make_mask, kwargs)


def _refuse_ready(mask: object) -> None:
    if not isinstance(mask, LocalMask):
        raise ValueError(
            f"the attention of a split sequence got a mask of its own ({type(mask).__name__}): "
            "give the model an attention_mask [b, s / P], where 0 is padding, or none"
        )
