"""Short pipeline and expert trainings with one guard switched on, by name (see `scenarios`).

Guards are the ledger, the intent check, the stream checker, the comparison with one process
("oracle"), the schedules' simulator, and what the pipeline engine itself refuses ("engine").
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import deepspeed
from unit.v1.contract.matrix import Case
from unit.v1.pipe.contract.cases import PipeCase
from unit.verify.guards import raised, simulated, watched

INTENT = {"collectives": True, "collectives_timeout": 3}
LEDGER = {"ledger": True}


def case_of(
    pipe: int,
    world: int,
    schedule: str = "1f1b",
    stage: int = 0,
    precision: str = "fp32",
    tied: bool = True,
    **more: Any,
) -> PipeCase:
    """A case with four micro-batches and small buckets."""
    values = vars(Case(stage, precision, 4, False, False, True, False, "tiny", world))
    return PipeCase(**{**values, "pipe": pipe, "schedule": schedule, "tied": tied, **more})


# Every schedule, stage, precision and grid without findings; the mutations use the first ones.
TWO = case_of(2, 2)
TWO_HALF = case_of(2, 2, "zero_bubble", 1, "bf16", overlap=True)
FOUR = case_of(2, 4, "1f1b", 1, overlap=True)
CASES = (
    *(TWO, case_of(2, 2, "interleaved", 1, "bf16+fp32", clip=True), TWO_HALF),
    case_of(2, 2, "zero_bubble", 0, "fp16", dynamic=True),
    FOUR,
    case_of(4, 4, "interleaved", 0, "bf16"),
    case_of(4, 4, "zero_bubble", 1, "bf16+fp32", tied=False, dynamic=True),
    case_of(2, 4, "interleaved", 1, "bf16+fp32", overlap=True),
    case_of(4, 4, "1f1b", 1, "bf16", overlap=True),
)


def train(
    case: PipeCase, verify: dict[str, Any] | None = None, one_group_on_first: bool = False
) -> list[str]:
    """Train and compare with one process; returns what deviates. With `one_group_on_first` the
    first stage has one parameter group and the others three, the last of them empty.
    """

    from unit.v1.pipe.contract import runner

    def groups(named: dict[str, Any]) -> list[dict[str, Any]]:
        made = original(named)
        one = [{"params": list(named.values()), "weight_decay": 0.1}]
        return one if "1.linear.weight" in named else [*made, {"params": []}]

    original, config = runner.parameter_groups, runner.pipe_config
    deepspeed.init_distributed(dist_backend="gloo")
    told = mock.patch.object(
        runner, "pipe_config", lambda case: {**config(case), "verify": verify or {}}
    )
    grouped = groups if one_group_on_first else original
    with told, mock.patch.object(runner, "parameter_groups", grouped):
        return runner.PipeRun(case).run()


def races(case: PipeCase) -> list[str]:
    """What the stream checker finds."""
    with watched() as found:
        train(case)
    return found


def device_numbers(case: PipeCase) -> list[str]:
    """What is not as in one process, on the simulated device."""
    with simulated():
        return numbers(case)


def device_batches(case: PipeCase) -> list[str]:
    """What is not as in one process on the simulated device, until timers count."""
    from unit.v1.pipe.contract import runner

    with mock.patch.object(runner.PipeRun, "steps", 4):
        return device_numbers(case)


def waiting_host(case: PipeCase) -> list[str]:
    """The same if the last stage's host waits, after each instruction, for all it has posted."""
    from deepspeed.runtime.pipe.messages.stage_channels import StageChannels

    issued = StageChannels.issued

    def and_wait(channels: StageChannels, count: int) -> None:
        issued(channels, count)
        if channels._module.stage_id == case.pipe - 1:
            for channel in channels:
                for posted in channel._posted:
                    for work in posted.works:
                        work._event.synchronize()

    with mock.patch.object(StageChannels, "issued", and_wait):
        return device_batches(case)


def numbers(case: PipeCase) -> list[str]:
    """What is not as in one process."""
    return [f"oracle: {failure}" for failure in train(case)]


def experts() -> None:
    """Four experts over two of four ranks, so that two hold each."""
    from unit.v1.moe.runner import Case as ExpertCase
    from unit.v1.moe.runner import CaseRun

    deepspeed.init_distributed(dist_backend="gloo")
    CaseRun(ExpertCase(2, 1, True, 0, "fp32", accumulation=3), ledger=True).run()


def simulate_schedules() -> list[str]:
    """What the simulator finds in the schedules of four stages."""
    from deepspeed.runtime.pipe.schedule import make_schedule
    from deepspeed.runtime.pipe.simulator import ScheduleError, simulate

    found = []
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)):
        try:
            simulate([make_schedule(name, 6, 4, stage, chunks) for stage in range(4)])
        except ScheduleError as error:
            found.append(f"{name}: {error}")
    return found


SCENARIOS: dict[str, Callable[[], list[str]]] = {
    "ledger: pipe": partial(raised, "ledger", partial(train, TWO, LEDGER)),
    "ledger: pipe, zero bubble, bf16": partial(raised, "ledger", partial(train, TWO_HALF, LEDGER)),
    "ledger: pipe, stage 1, 4 ranks": partial(raised, "ledger", partial(train, FOUR, LEDGER)),
    "ledger: experts, 4 ranks": partial(raised, "ledger", experts),
    "intent: pipe": partial(raised, "intent", partial(train, TWO, INTENT)),
    "intent: pipe, zero bubble, bf16": partial(raised, "intent", partial(train, TWO_HALF, INTENT)),
    "intent: pipe, uneven groups": partial(
        raised, "intent", partial(train, TWO, INTENT, one_group_on_first=True)
    ),
    "engine: pipe": partial(raised, "engine", partial(train, TWO)),
    "device: pipe": partial(raised, "device", partial(device_batches, TWO)),
    "device: pipe, waiting host": partial(raised, "device", partial(waiting_host, TWO)),
    "oracle: pipe": partial(numbers, TWO),
    "oracle: pipe on the device": partial(device_numbers, TWO_HALF),
    "streams: pipe": partial(races, TWO),
    "simulator: schedules": simulate_schedules,
}
