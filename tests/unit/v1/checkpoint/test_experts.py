"""Checkpoints of models with experts: files per expert, other numbers of ranks that share them."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.experts import renumbered
from deepspeed.moe.layer import MoE
from deepspeed.runtime.checkpointing.model_files import ModelExperts
from deepspeed.utils import groups
from unit.common import DistributedFixture, DistributedTest
from unit.models import drawn
from unit.one_process import go_through
from unit.v1.gathering import from_all_ranks

from . import runs
from .runs import ACCUMULATE, BF16, FP16, TORCH_ADAM, UNIVERSAL, by_name, kept, zero

WIDTH = 6
EXPERTS = 4
ROWS, STEPS, AFTER = 16, 2, 4
# Ranks, and those that share one set of experts.
DIVIDED = [(2, 1), (2, 2), (4, 2), (4, 4)]
STAGE_3 = zero(3, stage3_param_persistence_threshold=10)
DATA_FIRST = {"use_data_before_expert_parallelism": True}
CASES: dict[str, dict[str, Any]] = {
    "fp32-0": {},
    "fp32-2": zero(2),
    "bf16-1": {**BF16, **zero(1)},
    "accumulate-1": {**ACCUMULATE, **zero(1)},
    "fp32-3": STAGE_3,
    "fp16-0": FP16,
    "fp32-2-data-first": {**zero(2), **DATA_FIRST},
    "fp32-0-data-first": DATA_FIRST,
    "bf16-3-data-first": {**BF16, **STAGE_3, **DATA_FIRST},
}


class Net(nn.Module):
    """Two layers with experts, the second with two experts for each rank at least; `expert` is one
    of the first, and without it the second has a residual expert too.
    """

    def __init__(self, ep_size: int, width: int = WIDTH, expert: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        one = expert or nn.Linear(width, width)
        self.some = MoE(width, one, EXPERTS, ep_size, drop_tokens=False)
        more = {"drop_tokens": False, "use_residual": expert is None}
        self.more = MoE(width, nn.Linear(width, width), EXPERTS, min(2, ep_size), **more)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.some, self.more):
            x = x + layer(torch.tanh(self.first(x)))[0]
        return x.float().pow(2).mean()


def cases() -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Number, name and keys; groups are forgotten where other ranks come to share experts."""
    for number, (case, keys) in enumerate(CASES.items()):
        if case == "fp32-2-data-first":
            groups.reset()
        yield number, case, keys


EVERYWHERE = ("fp32-2", "fp32-3")


def saved(number: int, case: str) -> list[tuple[int, int]]:
    """Divisions in which a case is saved; the first in that in which stages change."""
    return DIVIDED if case in EVERYWHERE else [DIVIDED[(number + 1) % 4]]


def loaded(number: int, case: str, division: tuple[int, int]) -> tuple[int, int]:
    """Where what was saved in one division is loaded: of every second one, not the same, one in
    turns; cases that are saved in all of them show each pair once.
    """
    at = DIVIDED.index(division)
    turn = number + at if case in EVERYWHERE else number
    return DIVIDED[(at + 1) % 2 :: 2][turn // 2 % 2]


def make(ep_size: int, seed: int, **keys: Any) -> Any:
    """An engine whose experts start with other weights on each rank."""
    torch.manual_seed(10 * seed + dist.get_rank())
    return engine_of(Net(ep_size), gradient_clipping=0.5, **{**TORCH_ADAM, **keys})


def engine_of(model: Net, **keys: Any) -> Any:
    config = {"train_micro_batch_size_per_gpu": 4, "steps_per_print": 1000, **keys}
    return deepspeed.initialize(model=model, config=config)[0]


def train(engine: Any, steps: int) -> None:
    """Take steps; all ranks together have the same rows in every division."""
    dtype = next(engine.module.parameters()).dtype
    for step in range(engine.global_steps, engine.global_steps + steps):
        rows = drawn(100 * step, ROWS, WIDTH).to(dtype)
        go_through(engine, [rows.chunk(dist.get_world_size())[dist.get_rank()]])


def whole(engine: Any) -> dict[str, Any]:
    """`by_name` of all ranks' experts, on the first rank."""
    first = ModelExperts(engine.module).first
    kinds = ((*key.split(".", 1), value) for key, value in by_name(engine).items())
    own = {f"{kind}.{renumbered(name, first)}": value for kind, name, value in kinds}
    found = from_all_ranks(own, first_alone=True)
    return {name: value for part in found for name, value in part.items()}


class SavedExperts(DistributedFixture):
    """All cases, with what they held."""

    world_size = [2, 4]
    exec_timeout = 120

    def run(self, class_tmpdir: Any) -> None:
        for number, case, keys in cases():
            for world, ep_size in saved(number, case):
                if world == dist.get_world_size():
                    engine = make(ep_size, 1, **keys)
                    train(engine, STEPS)
                    folder = f"{class_tmpdir}/{case}-{world}-{ep_size}"
                    engine.save_checkpoint(folder)
                    held = whole(engine)
                    assert runs.exported_otherwise(folder, held) == [], folder
                    later = None
                    if case.startswith("fp32"):  # of others the first step is compared
                        train(engine, AFTER)
                        later = whole(engine)
                    runs.keep(folder, (held, later))


class TestOtherExpertGroups(DistributedTest):
    """Kills: a rank's numbers of experts taken for all's, shards in dense order, lost steps."""

    world_size = [2, 4]
    exec_timeout = 120

    def test_the_same_by_name(self, SavedExperts: Any, class_tmpdir: Any) -> None:
        for number, case, keys in cases():
            for world, ep_size in saved(number, case):
                own_world, own_size = loaded(number, case, (world, ep_size))
                if own_world == dist.get_world_size():
                    name = f"{class_tmpdir}/{case}-{world}-{ep_size}"
                    engine = make(own_size, 2, **keys)
                    engine.load_checkpoint(name)
                    held, later = kept(name)
                    assert runs.otherwise(held, whole(engine)) == [], (name, own_size)
                    steps = AFTER if case.startswith("fp32") and own_size == 2 else 1
                    self.goes_on(engine, case, later, steps)
        # One test: the fixture runs for each.
        groups.reset()
        if dist.get_world_size() == 2:
            self.stage_3_and_others(class_tmpdir)

    def goes_on(self, engine: Any, case: str, later: dict[str, Any], steps: int = AFTER) -> None:
        """The next steps are the saver's, who held `later` after all of them."""
        train(engine, steps)
        assert runs.counts(engine) == {STEPS + steps - engine.skipped_steps}, case
        if steps == AFTER:
            # A tenth of the rate, 1e-2, is what a step counted twice makes.
            assert runs.masters_off(whole(engine), later, 1e-4) == [], case

    def stage_3_and_others(self, class_tmpdir: Any) -> None:
        # Kills: experts of stage 3 that are looked for in files of their own, or numbered by each
        # rank, in the stages below it, universal checkpoints and the export.
        for case, other in (
            ("fp32-3-4-2", "fp32-2"),
            ("fp32-2-4-2", "fp32-3"),
            ("fp32-0-2-2", "fp32-3"),
            ("fp32-2-2-2", "fp32-0"),
        ):
            name = f"{class_tmpdir}/{case}"
            held, later = kept(name)
            engine = make(2, 2, **CASES[other])
            engine.load_checkpoint(name)
            assert runs.otherwise(held, whole(engine)) == [], (case, other)
            self.goes_on(engine, case, later)
            if other == "fp32-0":
                continue  # as below stage 3 everywhere
            again = make(2, 3, **CASES[other])
            train(again, 1)
            again.load_checkpoint(name, load_module_only=True)
            weights = (runs.of_kind(seen, "weight") for seen in (held, whole(again)))
            assert runs.otherwise(*weights) == [], (case, other)
        name = f"{class_tmpdir}/fp32-3-4-2"
        held, _ = kept(name)
        runs.on_rank_0(lambda: runs.convert(name))
        for case in ("fp32-2", "fp32-3"):
            engine = make(2, 4, **CASES[case], **UNIVERSAL)
            engine.load_checkpoint(name)
            assert runs.otherwise(held, whole(engine)) == [], case
            train(engine, 1)


class TestFiles(DistributedTest):
    """Names and keys are those that upstream 0.19.6 writes with this model."""

    world_size = 2

    def test_names_and_keys(self, tmp_path: Path) -> None:
        for case in ("fp32-0", "bf16-1"):
            engine = make(2, 1, **CASES[case])
            train(engine, 1)
            engine.save_checkpoint(tmp_path, tag=case)
            dist.barrier()
            folder = tmp_path / case
            each = itertools.product((0, 1), range(EXPERTS))
            weights = [f"layer_{at}_expert_{e}_mp_rank_00_model_states.pt" for at, e in each]
            prefix = "expp_rank" if case == "fp32-0" else "bf16_zero_pp_rank"
            states = [f"{prefix}_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
            hosts = [f"host_state_rank_{rank}.pt" for rank in range(2)]
            dense = ["manifest.json", "mp_rank_00_model_states.pt"]
            assert sorted(os.listdir(folder)) == sorted([*dense, *weights, *states, *hosts])
            last = [
                f"some.deepspeed_moe.experts.deepspeed_experts.3.{n}" for n in ("weight", "bias")
            ]
            assert list(torch.load(folder / weights[3], weights_only=True)) == last
            model = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)
            assert not [name for name in model["module"] if "deepspeed_experts" in name]
            assert model["num_experts"] == [EXPERTS, EXPERTS]
            assert "more.mlp.weight" in model["module"]  # of the residual: every rank has it
            dist.barrier()
