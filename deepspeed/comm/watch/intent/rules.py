"""What a rank is about to do, in a form that ranks can compare, and what must agree. Pure.

Three kinds of facts are compared: those that must be the same everywhere, those that must match
pairwise (what rank i hands to rank j is what j expects of i), and where the call stands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Any

import torch

from deepspeed.accelerator.call_stacks import MAX_DEPTH, PACKAGE, capture
from deepspeed.comm.watch.observation import CollectiveCall, call_site

# Programs write these on purpose in branches by rank ("the first process downloads, the others
# wait"), and they carry no data.
_FREE_OF_SITES = ("barrier", "monitored_barrier")
# Compared in this order: a difference in one explains those that follow.
_FACTS = ("operation", "group", "root", "reduction", "count", "dtype", "shape")


@dataclass(frozen=True)
class Intent:
    """One rank's part of a collective: `facts` must be the same on all ranks; of `site` (`file:line
    in function`) only `place` is compared, because machines may keep the program in different
    directories; `sends` and `expects` are by the other's global rank as text, empty if shapes are
    facts.
    """

    facts: dict[str, Any]
    text: str
    site: str
    place: str
    sends: dict[str, str] = field(default_factory=dict)
    expects: dict[str, str] = field(default_factory=dict)

    def encoded(self) -> str:
        """Equal intents have equal texts."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def decoded(text: str) -> Intent:
        return Intent(**json.loads(text))

    def __str__(self) -> str:
        return f"{self.text} at {self.site}"


def tensor_text(tensor: torch.Tensor) -> str:
    """Dtype and shape, such as `float32[4, 2]`."""
    return f"{_dtype(tensor)}{list(tensor.shape)}"


def current_site() -> tuple[str, str]:
    """(`site`, `place`) of the call outside of the communication layer that led here."""
    frame = call_site()
    if frame is None:
        return "an unknown place", ""
    code, where = frame.f_code, f"{frame.f_lineno} in {frame.f_code.co_name}"
    return (
        f"{code.co_filename}:{where}",
        f"{'/'.join(PurePath(code.co_filename).parts[-2:])}:{where}",
    )


def outer_site() -> str:
    """The place in the user's or a model's code that led here."""
    stack = capture(max_frames=MAX_DEPTH)
    shown = [(code, line) for code, line in stack if not code.co_filename.startswith(PACKAGE)]
    if not shown:
        return "an unknown place"
    code, line = shown[0]
    return f"{code.co_filename}:{line} in {code.co_name}"


def intent_of(call: CollectiveCall, ranks: Sequence[int], rank: int) -> Intent:
    """The intent of global rank ``rank``, about to issue ``call`` in the group of ``ranks``."""
    facts: dict[str, Any] = {"operation": call.name, "group": list(ranks)}
    root = call.argument("src", call.argument("dst"))
    if root is not None:
        facts["root"] = root
    reduction = call.argument("op")
    if reduction is not None:
        # One with a factor is an object whose text holds its address.
        facts["reduction"] = str(getattr(reduction, "name", type(reduction).__name__))
    if call.name == "broadcast_object_list":
        facts["count"] = len(call.argument("object_list"))
    sends, expects = _exchanged(call, ranks, rank)
    tensors = [*call.reads, *call.writes]
    if tensors:
        facts["dtype"] = list(dict.fromkeys(_dtype(tensor) for tensor in tensors))
    if tensors and not (sends or expects):
        facts["shape"] = [list(tensor.shape) for tensor in tensors]
    site, place = current_site()
    return Intent(facts, _in_words(call, facts), site, place, sends, expects)


def divergence(intents: Mapping[int, Intent]) -> str | None:
    """What the ranks (all of the group) disagree about, in words; None if they agree."""
    for fact in _FACTS:
        if len({json.dumps(intent.facts.get(fact)) for intent in intents.values()}) > 1:
            return f"the {fact} differs"
    for source, sender in intents.items():
        for target, receiver in intents.items():
            given, expected = sender.sends.get(str(target)), receiver.expects.get(str(source))
            if given != expected:
                return (
                    f"rank {source} hands {given or 'nothing'} to rank {target}, which expects "
                    f"{expected or 'nothing'}"
                )
    first = next(iter(intents.values()))
    if first.facts["operation"] in _FREE_OF_SITES:
        return None
    # The root of a broadcast often stands in a branch of its own.
    root = first.facts.get("root")
    if len({intent.place for rank, intent in intents.items() if rank != root}) > 1:
        return "the call sites differ"
    return None


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _in_words(call: CollectiveCall, facts: Mapping[str, Any]) -> str:
    words = call.name
    if "reduction" in facts:
        words += f"({facts['reduction']})"
    if "root" in facts:
        words += f" {'from' if call.argument('src') is not None else 'to'} rank {facts['root']}"
    if "count" in facts:
        words += f" of {facts['count']} objects"
    payload = call.reads or call.writes
    if not payload:
        return words
    listed = ", ".join(tensor_text(tensor) for tensor in payload[:4])
    return f"{words} of {listed}" + (f" and {len(payload) - 4} more" if len(payload) > 4 else "")


def _exchanged(
    call: CollectiveCall, ranks: Sequence[int], rank: int
) -> tuple[dict[str, str], dict[str, str]]:
    """What ``rank`` sends to and expects of each rank, of operations whose shapes may differ."""
    tensor = call.argument("tensor")
    root = str(call.argument("src", call.argument("dst")))
    match call.name:
        case "all_gather":
            return _same_for(ranks, tensor), _each(ranks, call.argument("tensor_list"))
        case "reduce_scatter":
            return _each(ranks, call.argument("input_list")), _same_for(
                ranks, call.argument("output")
            )
        case "gather":
            return {root: tensor_text(tensor)}, _each(
                ranks, call.argument("gather_list")
            ) if root == str(rank) else {}
        case "scatter":
            return _each(ranks, call.argument("scatter_list")) if root == str(rank) else {}, {
                root: tensor_text(tensor)
            }
        case "all_to_all":
            return _each(ranks, call.argument("tensor_list")), _each(
                ranks, call.argument("output_list")
            )
        case "all_to_all_single":
            output = call.argument("output")
            sends = _splits(ranks, tensor, call.argument("input_split_sizes"))
            return sends, _splits(ranks, output, call.argument("output_split_sizes"))
    return {}, {}


def _same_for(ranks: Sequence[int], tensor: torch.Tensor) -> dict[str, str]:
    return dict.fromkeys(map(str, ranks), tensor_text(tensor))


def _each(ranks: Sequence[int], tensors: Sequence[torch.Tensor] | None) -> dict[str, str]:
    # A list of the wrong length is torch's to refuse; what is there is compared.
    return {str(rank): tensor_text(one) for rank, one in zip(ranks, tensors or (), strict=False)}


def _splits(
    ranks: Sequence[int], tensor: torch.Tensor, sizes: Sequence[int] | None
) -> dict[str, str]:
    rows = tensor.shape[0] if tensor.dim() else 1
    per_row = tensor.numel() // rows if rows else 0
    sizes = sizes or [rows // len(ranks)] * len(ranks)
    sized, kind = zip(ranks, sizes, strict=False), _dtype(tensor)
    return {str(rank): f"{size * per_row} x {kind}" for rank, size in sized}
