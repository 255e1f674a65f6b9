"""The contract of stage 3: the configurations of stage 2, times what is whole when.

A rank uses parameters, or a whole unit, that others leave out: its data takes another branch.
"""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.runtime.zero.gathering.units import plan_units
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus
from unit.common import DistributedTest
from unit.v1.contract.matrix import CHUNKS_PER_WORLD, FACTORS, Case, chunk, of_world, pairwise
from unit.v1.contract.model import ContractModel, ModelOfBlocks, make_model
from unit.v1.contract.reference import Tensors
from unit.v1.contract.runner import CaseRun, on_host, run_cases, run_simulated

BLOCK_NUMEL = 7 * 31 + 31 + 31 * 9 + 7  # of the largest block


@dataclasses.dataclass(frozen=True)
class Stage3Case(Case):
    """A configuration of stage 3; None is a key's default.

    Attributes:
        persistence, prefetch, reuse: The keys `stage3_...`; by default all of this model.
        broadcast: Gather by broadcasts (`allgather_partitions: false`).
        units: What is gathered together: the "model", "blocks" or "layers".
        fusion: `stage3_unit_fusion_size`.
        host: What is there: "none", "optimizer" or "both", parameters too.
        secondary: `zero_hpz_partition_size`.
    """

    persistence: int | None = None
    prefetch: int | None = None
    reuse: int | None = None
    broadcast: bool = False
    units: str = "layers"
    fusion: int | None = 0
    host: str = "none"
    secondary: int = 1

    @property
    def name(self) -> str:
        words = {field: getattr(self, field) for field in (*OWN_FACTORS, "secondary")}
        return "-".join([super().name, *(f"{word}:{value}" for word, value in words.items())])


OWN_FACTORS: dict[str, tuple[Any, ...]] = {
    "persistence": (0, 12, None),
    "prefetch": (0, BLOCK_NUMEL, None),
    "reuse": (0, None),
    "broadcast": (False, True),
    "units": ("model", "blocks", "layers"),
    "fusion": (0, None),
    "host": ("none", "optimizer", "both"),
}
# Of stages 0 to 2; what is on the host is a factor of its own here.
SHARED_FACTORS = {name: FACTORS[name] for name in FACTORS if name not in ("stage", "offload")}
# The whole product leaves out what pairs show.
PRODUCT_FACTORS: dict[str, tuple[Any, ...]] = {
    **SHARED_FACTORS,
    "persistence": (0, None),
    "prefetch": (0, BLOCK_NUMEL, None),
    "units": ("blocks", "layers"),
    "host": ("none", "optimizer", "both"),
}
# Four ranks in groups: as many optimizer instances, or copies of gathered shards among so many.
GROUPS: dict[str, dict[str, int]] = {
    "2 instances": {"instances": 2},
    "4 instances": {"instances": 4},
    "near": {"secondary": 2},
}
GROUP_FACTORS: dict[str, tuple[Any, ...]] = {
    **{name: SHARED_FACTORS[name] for name in ("accumulation", "clip", "overlap")},
    "precision": ("fp32", "bf16", "fp16+fp32"),
    "reduce_scatter": (True, False),
    "bucket": ("tiny", "exact"),
    "persistence": (0, 12),
    "prefetch": (0, None),
    "units": ("blocks", "layers"),
    "host": ("none", "optimizer", "both"),
    "group": tuple(GROUPS),
}


def case_of(row: dict[str, Any], **more: Any) -> Stage3Case:
    """A row of factors."""
    return Stage3Case(stage=3, offload=row["host"] != "none", **row, **more)


def stage3_cases() -> list[Stage3Case]:
    """All pairs of values, and stateful optimizers wherever their state is and all persists."""
    rows = pairwise({**SHARED_FACTORS, **OWN_FACTORS, "persistence": (0, 12)}, [150])
    rows += [{**row, "persistence": None} for row in rows[:3]]
    first = {name: values[0] for name, values in {**SHARED_FACTORS, **OWN_FACTORS}.items()}
    with_state = (
        {**first, "accumulation": 3, "clip": True, "overlap": True, "bucket": "tiny", "world": 2}
        | {"precision": precision, "units": "blocks", "host": host}
        for precision, host in (("fp32", "both"), ("bf16", "none"), ("fp16+fp32", "optimizer"))
    )
    return [case_of(row) for row in rows] + [case_of(row, optimizer="adamw") for row in with_state]


def group_cases() -> list[Stage3Case]:
    """All pairs of values in groups of four ranks whose units go at once."""
    cases = []
    for row in pairwise(GROUP_FACTORS, [2806]):
        group = row.pop("group")
        if (group, row["host"]) == ("near", "both"):
            row["host"] = "none"
        cases.append(case_of(row, world=4, reuse=0, **GROUPS[group]))
    return cases


def product_cases() -> list[Stage3Case]:
    """The whole product."""
    values = itertools.product(*PRODUCT_FACTORS.values())
    return [case_of(dict(zip(PRODUCT_FACTORS, row, strict=True))) for row in values]


class Stage3Run(CaseRun):
    """One case."""

    case: Stage3Case

    def __init__(self, case: Stage3Case) -> None:
        super().__init__(case)
        plain = ModelOfBlocks.plain_name
        self.params = {plain(name): param for name, param in self.params.items()}
        self.weight_decay = {plain(name): decay for name, decay in self.weight_decay.items()}

    def _model(self, case: Case) -> torch.nn.Module:
        assert isinstance(case, Stage3Case)
        return make_model(kind=ModelOfBlocks if case.units == "blocks" else ContractModel)

    def _config(self) -> dict[str, Any]:
        config, case = super()._config(), self.case
        given = {
            "stage3_param_persistence_threshold": case.persistence,
            "stage3_prefetch_bucket_size": case.prefetch,
            "stage3_max_reuse_distance": case.reuse,
            "stage3_unit_fusion_size": case.fusion,
        }
        zero = {name: value for name, value in given.items() if value is not None}
        zero["allgather_partitions"] = not case.broadcast
        zero["zero_hpz_partition_size"] = case.secondary
        if case.host == "both":
            zero["offload_param"] = {"device": "cpu"}
        if case.units == "model":
            leaf = f"{ContractModel.__module__}.{ContractModel.__qualname__}"
            zero["leaf_module"] = {"classes": [leaf]}
        config["zero_optimization"] |= zero
        return config

    def _check_replicas(self, step: int, masters: Tensors) -> None:
        """What is gathered is the rounded masters."""
        with GatheredParameters(self.params.values()):
            super()._check_replicas(step, masters)

    def _check_rest(self, step: int) -> None:
        """Frozen parameters are untouched, padding is zero, and only what persists is whole."""
        live = self.engine.parameter_offload.param_coordinator.live_numel
        if live:
            self.fail(step, f"{live} elements are still gathered")
        for name, param in self.model.named_parameters():
            persists = param.ds_persist
            if (param.ds_status is ZeroParamStatus.AVAILABLE) is not persists:
                self.fail(step, f"{name} is {param.ds_status}, persistent: {persists}")
            with on_host():
                own = param._zero3.own_part(torch.empty(param.ds_shape)).numel()
            if own < param.ds_tensor.numel() and param.ds_tensor[own:].count_nonzero():
                self.fail(step, f"padding of {name} is not zero")
        with GatheredParameters(self.model.parameters()):
            for name, before in self.frozen.items():
                if not torch.equal(self.model.get_parameter(name), before):
                    self.fail(step, f"frozen {name} changed")


class TestPairs(DistributedTest):
    """All pairs of values; on four ranks several copies of the shards, and of gathered ones."""

    world_size = [1, 2, 3, 4]
    exec_timeout = 300

    def test(self) -> None:
        # Kills: a bucket that misses a parameter or takes padding for one, masters that do not
        # reach the shards, memory that is kept; gradients summed or parameters gathered over the
        # wrong ranks, copies that drift or are old.
        run_cases(of_world(stage3_cases() + group_cases(), dist.get_world_size()), Stage3Run)


class TestSimulated(DistributedTest):
    """The same on the simulated device, where every missing wait is an error."""

    world_size = 2
    exec_timeout = 400

    def test(self) -> None:
        # Kills: a unit read before it is gathered or after its memory was given away, a shard
        # gathered before it is updated.
        # Two micro-batches follow each other as three do; where all persists nothing is gathered.
        cases = [case for case in of_world(stage3_cases(), 2) if case.persistence is not None]
        few = [dataclasses.replace(case, accumulation=min(case.accumulation, 2)) for case in cases]
        run_simulated(few, Stage3Run)


@pytest.mark.contract
@pytest.mark.parametrize("share", range(CHUNKS_PER_WORLD))
class TestStage3Product(DistributedTest):
    """The whole product, cut into shares (`make campaign NAME=stage3`)."""

    world_size = list(FACTORS["world"])
    exec_timeout = 7200

    def test(self, share: int) -> None:
        # Kills: what only three or more settings together bring out.
        run_cases(chunk(of_world(product_cases(), dist.get_world_size()), share), Stage3Run)


def test_what_is_covered() -> None:
    # Kills: factors that no case has, a kind of unit that the models do not have.
    def names(kind: type[ContractModel]) -> set[str]:
        return {plan.name for plan in plan_units(make_model(kind=kind), lambda _: False)}

    assert {"pairs.0", "pairs.1"} < names(ModelOfBlocks)
    assert {"lift", "twice", "wide", "back"} < names(ContractModel)
    assert not names(ContractModel) & names(ModelOfBlocks) & {"lift", "pairs.0"}
    for factor, values in OWN_FACTORS.items():
        assert {getattr(case, factor) for case in stage3_cases()} == set(values)
    in_groups = {(case.instances, case.secondary) for case in group_cases()}
    assert in_groups == {(2, 1), (4, 1), (1, 2)}
    assert len(set(product_cases())) == 25_920
