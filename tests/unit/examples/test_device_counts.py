"""The benchmark that counts collectives and waits counts what there is, and nothing else."""

import argparse
from pathlib import Path

import device_counts
from unit.clients.launching import run_ranks

PROGRAM = """
import torch, pretended
pretended.install()
with pretended.watch, pretended.counting() as counts:
    x = torch.ones(4)
    x.sum().item(), x.cpu().sum().item(), torch.tensor(1.0).item(), x[x > 0]
    x.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0])), x.copy_(x.cpu(), non_blocking=True)
    side = torch.cpu.Stream()
    with torch.cpu.stream(side):
        x += 1
    with torch.cpu.stream(torch.cpu.Stream()):
        pass
    side.synchronize()
assert counts == {
    "wait item": 1, "wait cpu": 2, "wait index by a mask": 1, "wait blocking copy": 1,
    "wait stream": 1,
}, counts
assert pretended.Device.used == {side}
"""


def test_waits_are_those_for_the_device(tmp_path: Path) -> None:
    # Kills: the host's own numbers counted as the device's, a stream counted that has no work, and
    # each kind of wait that is not seen.
    (tmp_path / "program.py").write_text(PROGRAM)
    run_ranks(tmp_path / "program.py", tmp_path, processes=1)


def test_a_step_of_stage_1() -> None:
    # Kills: a host wait or a collective more per step on a device's path, also with the other ranks
    # of a large world.
    arguments = argparse.Namespace(layers=2, world=64, places=False)
    counts = device_counts.measure("zero1", 2, arguments)
    buckets = counts.pop("collective reduce-scatter")
    assert 10 < buckets < 16
    assert counts == {
        "collective all-gather": buckets,
        "collective all-reduce": 1,
        "wait event": 1,
        "streams": 1,
    }
