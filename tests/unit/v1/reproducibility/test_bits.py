"""Equal bits on 1, 2, 3 and 4 ranks: digests of masters and optimizer state, whatever the stage."""

import json
from pathlib import Path

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from unit.common import DistributedFixture, DistributedTest
from unit.models import seeded
from unit.v1.contract.matrix import all_pairs, pairs_of
from unit.v1.reproducibility.cases import FACTORS, MICRO_BATCHES, Case, pair_cases
from unit.v1.reproducibility.runs import Net, batch_of, config_of, digest_of, engine_of


class on_one_rank(DistributedFixture):  # noqa: N801  # the name of the fixture
    world_size = 1

    def run(self, class_tmpdir: str) -> None:
        if not Path(class_tmpdir, "digests").exists():
            alone = {case.kind: case.alone for case in pair_cases()}
            found = {kind: digest_of(case) for kind, case in alone.items()}
            assert len(set(found.values())) == len(found), found
            Path(class_tmpdir, "digests").write_text(json.dumps(found), encoding="utf-8")


class TestPairs(DistributedTest):
    world_size = [2, 3, 4]

    def test_as_one_rank(self, on_one_rank: None, class_tmpdir: str) -> None:
        # Kills: a leaf twice, two leaves exchanged, a mean by ranks, a norm by blocks, another
        # kernel at the end of a slice, a random state by rank.
        wanted = json.loads(Path(class_tmpdir, "digests").read_text(encoding="utf-8"))
        for case in pair_cases():
            if case.ranks == dist.get_world_size():
                assert digest_of(case) == wanted[case.kind], case.name


class TestTwo(DistributedTest):
    world_size = 2

    def test_what_depends_on_ranks_is_refused(self) -> None:
        for key, value in {
            "gradient_allreduce_op": "sum",
            "prescale_gradients": True,
            "gradient_predivide_factor": 2.0,
            "communication_data_type": "fp32",
            "managed_gradient_accumulation": False,
            "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        }.items():
            with pytest.raises(DeepSpeedConfigError, match=f"world_size_invariant.*{key}"):
                engine_of(Case(2), **{key: value})
        types = {"data_types": {"grad_accum_dtype": "bf16"}}
        with pytest.raises(DeepSpeedConfigError, match=r"data_types\.grad_accum_dtype, which"):
            engine_of(Case(2, "bf16"), **types)
        # Its kernel rounds the end of a slice otherwise than its middle.
        model = seeded(Net, "")
        fused = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
        with pytest.raises(DeepSpeedConfigError, match=r"AdamW\(fused=True\) on the host"):
            config = config_of(Case(2), zero_optimization={"stage": 2})
            deepspeed.initialize(model=model, optimizer=fused, config=config)
        # Blocks that would sum a rank's micro-batches first do nothing.
        found = [digest_of(Case(2), steps=1)]
        for block in ("no_sync", "coalesce_grad_reduction"):
            engine = engine_of(Case(2))
            with getattr(engine, block)():
                for number in range(dist.get_rank(), MICRO_BATCHES, 2):
                    engine.backward(engine(batch_of(0, number)))
            engine.set_gradient_accumulation_boundary(True)
            engine.step()
            found.append(engine.state_digest())
        assert len(set(found)) == 1
        # Last: who shares sequences is known from then on.
        with pytest.raises(DeepSpeedConfigError, match=r"world_size_invariant.*sequence_parallel_"):
            engine_of(Case(2), sequence_parallel_size=2)

    def test_seeds_reach_no_device_but_their_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = engine_of(Case(2))
        monkeypatch.delattr(torch, "manual_seed")  # 400 times as slow: it keeps three stacks
        seeds: list[int] = []
        monkeypatch.setattr(get_accelerator(), "manual_seed", seeds.append)
        engine(batch_of(0, dist.get_rank()))
        assert seeds == [torch.initial_seed()]  # the device's and the host's


def test_pairs_are_covered() -> None:
    found = [vars(case) for case in pair_cases()]
    assert set().union(*(pairs_of(row, FACTORS) for row in found)) == all_pairs(FACTORS)
