"""Experts of ZeRO stage 3 in files: those that are not trained, and all of them for export."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.utils import load_sharded_safetensors
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as fp32_weights
from unit.common import DistributedFixture, DistributedTest
from unit.models import drawn
from unit.one_process import go_through

from .runs import UNIVERSAL, convert, differences, keep, kept, of_kind, on_rank_0, otherwise, zero
from .test_experts import EXPERTS, Net, engine_of, whole

WIDTH = 5
WHOLE = {"stage3_gather_16bit_weights_on_model_save": True}
STAGE_3 = zero(3, stage3_param_persistence_threshold=6, **WHOLE)
DATA_FIRST = "use_data_before_expert_parallelism"
PREFIX = "some.deepspeed_moe.experts.deepspeed_experts"
# What of the model is not trained, by the beginning of names.
FROZEN: dict[str, tuple[str, ...]] = {
    "experts": ("first", "some.deepspeed_moe.experts", "more.deepspeed_moe.experts"),
    # Only some of an expert's parameters; of `more`, experts alone are trained.
    "parts": tuple(f"{PREFIX}.{e}.out" for e in range(EXPERTS)),
    "dense": ("first", "some.deepspeed_moe.gate", "more.deepspeed_moe.gate"),
}


class Tied(nn.Module):
    """An expert with a weight of two names, and a buffer."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again.weight = self.into.weight
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.again(torch.tanh(self.into(x)))) + self.seen[0])


def make(ep_size: int, seed: int, frozen: str, **keys: Any) -> Any:
    """An engine whose experts start with other weights, and buffers, on each rank."""
    torch.manual_seed(10 * seed + dist.get_rank())
    model = Net(ep_size, WIDTH, Tied())
    for index, expert in enumerate(model.some.deepspeed_moe.experts.deepspeed_experts):
        place = dist.get_rank() // (dist.get_world_size() // ep_size)
        place = place if keys.get(DATA_FIRST) else dist.get_rank() % ep_size
        expert.seen.fill_(10.0 * seed + EXPERTS // ep_size * place + index)
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(FROZEN[frozen]))
    adam = {"type": "Adam", "params": {"lr": 1e-2}}
    return engine_of(model, optimizer=adam, **{**STAGE_3, **keys})


def train(engine: Any, steps: int) -> None:
    numbers = range(engine.global_steps, engine.global_steps + steps)
    go_through(engine, (drawn(100 * n + dist.get_rank(), 8, WIDTH) for n in numbers))


def save(folder: str, engine: Any) -> dict[str, Any]:
    """Save after a step; returns what it held."""
    train(engine, 1)
    engine.save_checkpoint(folder)
    held = whole(engine)
    keep(folder, held)
    return held


class SavedFrozen(DistributedFixture):
    """Saved by two ranks that share all experts, with what they held."""

    world_size = 2

    def run(self, class_tmpdir: Any) -> None:
        save(f"{class_tmpdir}/experts-2", make(2, 1, "experts"))


class TestFrozen(DistributedTest):
    """Kills: a frozen expert of all ranks' shards or numbered by each; sharers mistaken."""

    world_size = 4
    exec_timeout = 120

    def test_by_name(self, SavedFrozen: Any, class_tmpdir: Any) -> None:
        for frozen in FROZEN:
            self.check(frozen, str(class_tmpdir), data_first=frozen == "parts")
        self.universal(str(class_tmpdir))

    def check(self, frozen: str, tmpdir: str, data_first: bool) -> None:
        order = {DATA_FIRST: data_first}
        deepspeed.utils.groups.reset()
        folder = f"{tmpdir}/{frozen}-4-{data_first}"
        held = save(folder, make(2, 1, frozen, **order))
        exported = fp32_weights(folder)
        wanted = of_kind(held, "weight")
        assert differences(wanted, {name: exported[name] for name in wanted}) == [], frozen
        tied = [name for name in exported if ".again." in name]
        assert len(tied) == EXPERTS
        assert all(torch.equal(exported[n], exported[n.replace("again", "into")]) for n in tied)
        ways: list[tuple[str, int, dict[str, Any]]] = [(folder, 4, STAGE_3)]
        if frozen == "experts":
            ways += [(folder, 2, zero(2)), (f"{tmpdir}/experts-2", 4, STAGE_3)]
        for name, ep_size, stage in ways:
            found = make(ep_size, 2, frozen, **stage, **order)
            found.load_checkpoint(name)
            assert otherwise(kept(name), whole(found)) == [], (frozen, name, ep_size, stage)
            self.check_buffers(found)
            train(found, 1)

    def check_buffers(self, engine: Any) -> None:
        numbers = engine.module.some.global_expert_ids
        own = engine.module.some.deepspeed_moe.experts.deepspeed_experts
        assert [expert.seen[0].item() for expert in own] == [10.0 + n for n in numbers]

    def universal(self, tmpdir: str) -> None:
        deepspeed.utils.groups.reset()
        folder = f"{tmpdir}/experts-4-False"
        on_rank_0(lambda: convert(folder))
        found = make(4, 3, "experts", **UNIVERSAL)
        found.load_checkpoint(folder)
        assert otherwise(kept(folder), whole(found)) == []
        self.check_buffers(found)


class TestWhole(DistributedTest):
    """Kills: the first rank's experts alone, or under the numbers that each rank has for them."""

    world_size = 4

    def test_export(self, tmp_path: Path) -> None:
        for ep_size, stage, data_first in (
            (4, STAGE_3, False),
            (2, STAGE_3, True),
            (2, zero(0), True),
        ):
            deepspeed.utils.groups.reset()
            order = {DATA_FIRST: data_first}
            engine = make(ep_size, 1, "dense", **stage, **order)
            train(engine, 1)
            wanted = of_kind(whole(engine), "weight")
            engine.save_16bit_model(tmp_path, f"{ep_size}.bin")
            gathers = stage is STAGE_3
            found = engine._zero3_consolidated_16bit_state_dict() if gathers else None
            assert (found is not None) == (gathers and dist.get_rank() == 0)
            exported = tmp_path / f"{ep_size}.safetensors"
            dist.barrier()
            if dist.get_rank() == 0:
                saved = torch.load(tmp_path / f"{ep_size}.bin")
                plain = Net(1, WIDTH, Tied())
                assert list(saved) == list(plain.state_dict())
                plain.load_state_dict(saved)
                assert found is None or differences(saved, found) == []
                assert differences(wanted, {name: saved[name] for name in wanted}) == []
                own = plain.some.deepspeed_moe.experts.deepspeed_experts
                assert [expert.seen[0].item() for expert in own] == [10, 11, 12, 13]
                into, again = (saved[f"{PREFIX}.3.{n}.weight"] for n in ("into", "again"))
                assert into.data_ptr() == again.data_ptr()
                save_file({n: v for n, v in saved.items() if ".again." not in n}, exported)
            dist.barrier()
            if gathers:
                loaded = make(ep_size, 2, "dense", **stage, **order)
                train(loaded, 1)
                load_sharded_safetensors(loaded.module, exported)
                held = whole(loaded)
                assert differences(wanted, of_kind(held, "weight")) == []
                masters = of_kind(held, "master")
                assert masters or dist.get_rank()
                assert differences({n: wanted[n] for n in masters}, masters) == []
