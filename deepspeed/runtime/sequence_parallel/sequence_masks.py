"""Masks that transformers makes, for whole sequences. A model that holds a piece of one gets a
`LocalMask`, which its layers hand on to the attention unopened. There it becomes the mask of the
whole sequence, made by transformers' own functions, or the one that the model asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from deepspeed import comm as dist

NO_PADDING = -1
# What transformers calls the cache of keys and values: until 5.23, and from 5.24 on.
_CACHE = ("past_key_values", "cache")


class WholeMask(NamedTuple):
    """The mask of a whole sequence (None: positions see all before them), and what else its
    attention is told of documents.
    """

    mask: Any
    options: dict[str, Any]


class LocalMask:
    """A mask that is not made yet, by transformers' mask function and the model's arguments."""

    def __init__(self, make: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self._make = make
        self.arguments = arguments
        self._here: list[Any] = []
        self._whole: WholeMask | None = None

    def here(self) -> Any:
        if not self._here:
            self._here.append(self._make(**self.arguments))
        return self._here[0]

    def whole(self, positions: torch.Tensor, group: dist.Group, given: bool) -> WholeMask:
        """Make the mask of the sequence that the P ranks of `group` share; collective the first
        time.

        `positions` [b, s / P], or [1, s / P], are those of this rank; if they are not `given` by
        the model's caller, the model may have counted from 0. ValueError on all ranks for a mask
        that is not made of positions and padding, and for positions that are not those of one
        sequence.
        """
        if self._whole is None:
            self._whole = self._gathered(positions, group, given)
        return self._whole

    def _gathered(self, positions: torch.Tensor, group: dist.Group, given: bool) -> WholeMask:
        padding, rows = self.arguments["attention_mask"], self.arguments["batch_size"]
        positions = positions.expand(rows, -1)
        if padding is None:
            padding = torch.full_like(positions, NO_PADDING)
        own = torch.stack((positions, padding.to(positions.dtype)))
        ranks, length = dist.get_world_size(group), own.shape[-1]
        pieces = own.new_empty(ranks * 2, *own.shape[1:])
        dist.all_gather_into_tensor(pieces, own, group=group)
        # [b, P, s / P] each.
        numbers, paddings = pieces.view(ranks, *own.shape).permute(1, 2, 0, 3).unbind(0)
        whole = numbers.flatten(1)
        begins = whole.diff() != 1
        # One wait of the host for all that it has to know.
        padded, unpadded, counted, packed = torch.stack(
            (
                (paddings != NO_PADDING).any(),
                (paddings == NO_PADDING).any(),
                (numbers == torch.arange(length, device=numbers.device)).all(),
                begins.any(),
            )
        ).tolist()
        if padded and unpadded:
            raise ValueError(
                "some of the ranks that share a sequence got an attention_mask and others none: "
                "give every rank its piece, or none"
            )
        if counted and not given:
            raise ValueError(
                f"the position_ids of every one of {ranks} ranks that share a sequence are 0 to "
                f"{length - 1}: give the model position_ids, cut from those of the whole sequence "
                "(UlyssesSPDataLoaderAdapter does). If every rank really holds documents of just "
                "that length, give register_with_transformers the model instead of its name"
            )
        asked = self._of(whole, paddings.flatten(1).bool() if padded else None)
        self._refuse_other(asked)
        # From position ids flash attention learns in every layer where documents begin, and the
        # host waits each time.
        options: dict[str, Any] = {"position_ids": whole if packed else None}
        if packed and not padded and rows == 1:
            options |= _documents(begins[0])
        return WholeMask(asked.here(), options)

    def _of(self, positions: torch.Tensor, padding: torch.Tensor | None) -> LocalMask:
        from transformers import masking_utils  # startup: a client's library, once it is used

        sliding = self.arguments.get("local_size") is not None
        create: Callable[..., Any] = (
            masking_utils.create_sliding_window_causal_mask
            if sliding
            else masking_utils.create_causal_mask
        )
        # Of embeddings it reads shape, dtype and device.
        embeddings = positions.new_empty(*positions.shape, 0, dtype=self.arguments["dtype"])
        asked = create(
            config=self.arguments["config"],
            inputs_embeds=embeddings,
            attention_mask=padding,
            position_ids=positions,
            **{_cache_argument(create): None},
        )
        return LocalMask(self._make, asked.arguments)

    def _refuse_other(self, whole: LocalMask) -> None:
        """Refuse what the model, which knows its own positions only, has laid over the mask."""
        own = self.arguments
        bidirectional = "allow_is_bidirectional_skip" in own
        laid_over = own.get("use_vmap") or (
            whole.arguments["allow_is_causal_skip"] and not own.get("allow_is_causal_skip", True)
        )
        if bidirectional or laid_over:
            raise ValueError(
                f"{type(own['config']).__name__}: its attention is not causal, or uses a mask of "
                "its own, which cannot be made for a sequence that is split over ranks: use a "
                "causal model, or no sequence parallelism"
            )
        if own["q_length"] != own["kv_length"]:
            raise ValueError(
                f"{own['q_length']} queries look at {own['kv_length']} keys: generation cannot "
                "be split over ranks; use model.eval() with disable_in_eval=True"
            )


def _documents(begins: torch.Tensor) -> dict[str, Any]:
    """Where documents lie, as flash attention takes it. `begins` [s - 1] says which of the
    positions after the first begin one.
    """
    edges = F.pad(begins, (1, 1), value=True).nonzero().flatten().to(torch.int32)
    longest = int(edges.diff().max())
    return {
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), edges),
        **dict.fromkeys(("max_length_q", "max_length_k"), longest),
    }


def check_library() -> None:
    """Refuse a transformers that makes masks otherwise, naming the version that is needed."""
    from transformers import __version__, masking_utils  # startup: see above

    create = masking_utils.create_causal_mask
    needed = {"config", "inputs_embeds", "attention_mask", "position_ids"}
    if not _cache_argument(create) or not needed <= set(inspect.signature(create).parameters):
        raise ImportError(
            f"transformers {__version__} makes masks in another way than Ulysses knows: use "
            "transformers >= 5.23"
        )


def _cache_argument(create: Callable[..., Any]) -> str:
    """Name the cache among the arguments of a function that makes masks; "": it has none."""
    taken = inspect.signature(create).parameters
    return next((name for name in _CACHE if name in taken), "")
