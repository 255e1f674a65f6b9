"""The observer that compares what ranks are about to do before they do it.

Every rank of the group leaves its intent in the store; the first, its leader, compares them and
says "go"; the others wait for that. So each collective, an asynchronous one too, is a rendezvous on
the host while the check is on. They compare by number in the group: a rank that skips one meets the
others with its next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as torch_dist

from deepspeed.accelerator import get_accelerator
from deepspeed.comm import process_groups
from deepspeed.comm.watch.intent.intent_store import IntentStore
from deepspeed.comm.watch.intent.pairs import PAIR_OPERATIONS, PairCheck
from deepspeed.comm.watch.intent.rules import Intent, divergence, intent_of, outer_site
from deepspeed.comm.watch.observation import CollectiveCall

_MAX_FOLLOWERS = 1024


@dataclass
class _Group:
    """One process group as this rank knows it: how many collectives it has begun there, the last
    that was agreed on, and (the leader) which came after which, since programs repeat themselves.
    """

    name: str
    ranks: list[int]
    issued: int = 0
    agreed: Intent | None = None
    followers: dict[str, str] = field(default_factory=dict)


class IntentCheck:
    """Compares the intents of all ranks before each operation. `number` is how many checks there
    were before, alike on all ranks: old notes must not be taken for new ones.
    """

    def __init__(self, timeout_s: float, number: int) -> None:
        self.timeout_s = timeout_s
        self._number = number
        self._world: Any = None
        self._num_worlds = 0
        self._rank = 0
        self._store: IntentStore | None = None
        self._pairs: PairCheck | None = None
        self._groups: dict[str, _Group] = {}

    def run(self, call: CollectiveCall, proceed: Callable[[], Any]) -> Any:
        if torch_dist.get_rank(call.group) < 0:
            return proceed()  # not in the group: torch says what it thinks of that
        store, pairs = self._connection()
        group = self._group(call.group)
        if len(group.ranks) == 1:
            return proceed()
        if store.failed:
            store.raise_if_failed()
        if call.name in PAIR_OPERATIONS:
            return pairs.run(call, group.name, proceed)
        self._agree(store, group, intent_of(call, group.ranks, self._rank))
        return proceed()

    def announced(self, what: str, group: process_groups.Group) -> None:
        """Compare what the next operations are for, asked for wherever in the program."""
        if torch_dist.get_rank(group) < 0:
            return
        store, _ = self._connection()
        known = self._group(group)
        if len(known.ranks) > 1:
            if store.failed:
                store.raise_if_failed()
            facts = {"operation": what, "group": list(known.ranks)}
            self._agree(store, known, Intent(facts, what, outer_site(), ""))

    def set_timeout(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        if self._store is not None:
            self._store.timeout_s = timeout_s

    def abort(self, why: str) -> None:
        if self._store is not None:
            self._store.abort(why)

    def leave(self, why: str, stay: bool) -> None:
        if self._store is not None:
            self._store.leave(why, stay)

    # -- who and where -----------------------------------------------------------------------------

    def _connection(self) -> tuple[IntentStore, PairCheck]:
        world = process_groups.get_world_group()
        if self._store is None or self._pairs is None or world is not self._world:
            self._connect(world)
            return self._connection()
        return self._store, self._pairs

    def _connect(self, world: object) -> None:
        """Begin anew: the first operation, or the process group was destroyed and made again."""
        self._world = world
        self._num_worlds += 1
        self._rank = torch_dist.get_rank()
        self._groups = {}
        prefix = f"deepspeed_intent/{self._number}.{self._num_worlds}"
        shared = torch_dist.PrefixStore(prefix, process_groups.get_store())
        self._store = IntentStore(
            shared, self._rank, torch_dist.get_world_size(), self.timeout_s, _start_deferred
        )
        self._pairs = PairCheck(self._store, self._rank)

    def _group(self, group: process_groups.Group) -> _Group:
        name = (group or self._world).group_name
        known = self._groups.get(name)
        if known is None:
            known = self._groups[name] = _Group(
                name, process_groups.get_all_ranks_from_group(group)
            )
        return known

    # -- collectives -------------------------------------------------------------------------------

    def _agree(self, store: IntentStore, group: _Group, mine: Intent) -> None:
        number = group.issued
        group.issued += 1
        what = f"{mine} (number {number} in the group of ranks {group.ranks})"
        # One note per rank and group, overwritten each time: nobody goes on before all have been
        # read.
        posts = [f"post/{group.name}/{rank}" for rank in group.ranks]
        go = f"go/{group.name}"
        # In this order: who finds the intent must find a fresh `seen` too.
        store.write(
            {
                f"seen/{self._rank}": what,
                f"post/{group.name}/{self._rank}": f"{number} {mine.encoded()}",
            }
        )

        leader = group.ranks[0]

        def missing() -> list[int]:
            posted = zip(group.ranks, posts, strict=True)
            absent = [rank for rank, post in posted if _number(store.read(post)[0]) < number]
            # When all have come, the leader is waited for: it may end before it has said "go".
            return absent or [leader] * (
                self._rank != leader and _number(store.read(go)[0]) < number
            )

        if self._rank == leader:
            found: list[str] = []

            def all_posted() -> bool:
                found[:] = store.read(*posts)
                return all(_number(post) >= number for post in found)

            store.wait(all_posted, missing, what)
            self._compare(store, group, dict(zip(group.ranks, found, strict=True)), mine)
            store.write({go: str(number)})
        else:
            store.wait(lambda: _number(store.read(go)[0]) >= number, missing, what)
        group.agreed = mine

    def _compare(
        self, store: IntentStore, group: _Group, posts: Mapping[int, str], mine: Intent
    ) -> None:
        # Equal texts are equal intents, and nearly always are; what ranks send each other has to be
        # matched all the same.
        if mine.sends or len(set(posts.values())) > 1:
            intents = {rank: Intent.decoded(post.partition(" ")[2]) for rank, post in posts.items()}
            difference = divergence(intents)
            if difference is not None:
                store.fail(_mismatch(group, intents, difference))
        if group.agreed is not None:
            if len(group.followers) >= _MAX_FOLLOWERS:
                group.followers.clear()
            group.followers[str(group.agreed)] = str(mine)


def _number(note: str) -> int:
    """The number of a collective at the beginning of a note; -1 if there is none yet."""
    return int(note.partition(" ")[0]) if note else -1


def _mismatch(group: _Group, intents: Mapping[int, Intent], difference: str) -> str:
    by_text: dict[str, list[int]] = {}
    for rank, intent in intents.items():
        by_text.setdefault(str(intent), []).append(rank)
    lines = [
        f"ranks {group.ranks} are about to do different things in collective {group.issued - 1} of "
        f"their group: {difference}."
    ]
    lines += [f"  {_name(ranks)}: {text}" for text, ranks in by_text.items()]
    if group.agreed is not None:
        lines.append(f"  all ranks, before: {group.agreed}")
    return "\n".join([*lines, _explanation(group, by_text, difference)])


def _explanation(group: _Group, by_text: Mapping[str, list[int]], difference: str) -> str:
    """Say who skipped what, as far as can be known."""
    # The rule is what most ranks do; of two, what the first does.
    most = max(by_text, key=lambda text: len(by_text[text]))
    others = {text: ranks for text, ranks in by_text.items() if text != most}
    name = _name([rank for ranks in others.values() for rank in ranks])
    if others and all(group.followers.get(most) == text for text in others):
        return (
            f"{name} skipped it or is one ahead: the last time, what it does now came right after "
            "what the other ranks do."
        )
    if others and group.agreed is not None and all(text == str(group.agreed) for text in others):
        return f"{name} does the one before once more, or the other ranks did it once less."
    if (
        difference != "the operation differs"
        and len({text.rpartition(" at ")[2] for text in by_text}) == 1
    ):
        return (
            "The call is the same: look at what the ranks pass to it; or, if it stands in a loop, "
            "at who skipped a pass."
        )
    if difference == "the call sites differ":
        return (
            f"{name} skipped a collective or is one ahead; or the program branches by rank here: "
            "then call it in one place."
        )
    return f"{name} skipped it or is one ahead, or takes another branch than the other ranks."


def _name(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _start_deferred() -> None:
    """On a device that defers collectives, start those issued: other ranks may wait for one."""
    if get_accelerator().defers_collectives:
        # startup: for simulated devices only.
        from deepspeed.comm.sim import stream_collectives

        stream_collectives.start_issued()
