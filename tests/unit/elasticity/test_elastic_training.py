"""Elastic launches with real processes, a `deepspeed` command for each node: who goes and comes."""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from unit.clients.launching import run_ranks
from unit.common import get_master_port
from unit.launcher.starting import ROOT, Commands, Process, until

SCRIPT = ROOT / "examples" / "elastic_train.py"
PATIENCE = 240.0


class Nodes(Commands):
    """Starts launchers that share a folder of checkpoints."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = int(get_master_port())

    def start(
        self, *flags: str, elastic: bool = True, checkpoints: str = "checkpoints", **variables: str
    ) -> Process:
        if elastic:
            flags += ("--elastic_training", "--master_addr", "127.0.0.1")
            flags += ("--master_port", str(self.port))
        words = (*flags, str(SCRIPT), "--checkpoints", checkpoints)
        with open(self.folder / f"output{len(self.processes)}", "wb") as output:
            return super().start(*words, output=output, variables=variables)

    def someone_listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def log(self, checkpoints: str = "checkpoints") -> list[dict[str, Any]]:
        path = self.folder / checkpoints / "log.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def weights(self, checkpoints: str = "checkpoints") -> dict[str, torch.Tensor]:
        return torch.load(self.folder / checkpoints / "weights.pt")

    def said(self) -> str:
        outputs = "".join(path.read_text() for path in self.folder.glob("output*"))
        return f"{self.log()}\n{outputs}"

    def until(self, condition: Callable[[], bool]) -> None:
        until(condition, PATIENCE, self.said)

    def end(self, node: Process) -> None:
        self.until(lambda: node.poll() is not None)
        assert node.returncode == 0, self.said()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with Nodes(tmp_path) as nodes:
        yield nodes


def steps(log: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """(step, ranks) of the steps that were kept: one that was done again replaces the first try."""
    return sorted({entry["step"]: entry["world"] for entry in log if "step" in entry}.items())


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


def test_a_killed_rank_is_started_again_and_training_goes_on(nodes: Nodes) -> None:
    # Kills: a restart that begins from the start, or from weights that are not the checkpoint's.
    # Rank 0, which has written down step 4 by then: another would end it while it does.
    broken = {"launcher": "elastic", "FAIL_AT": "4:0:0"}
    run_ranks(SCRIPT, nodes.folder, "--checkpoints", "checkpoints", **broken)
    run_ranks(SCRIPT, nodes.folder, "--checkpoints", "unbroken")
    starts = [entry["start"] for entry in nodes.log() if "start" in entry]
    assert len(starts) == 2 and starts[0] == 0 and starts[1] == 4
    assert steps(nodes.log()) == [(step, 2) for step in range(1, 9)]
    losses = [
        {entry["step"]: entry["loss"] for entry in nodes.log(name) if "step" in entry}
        for name in ("unbroken", "checkpoints")
    ]
    assert losses[0] == losses[1]
    assert same(nodes.weights(), nodes.weights("unbroken"))


@pytest.mark.slow
@pytest.mark.skipif(
    "ELASTIC_CAMPAIGN" not in os.environ,
    reason="waits for a lost node to be noticed; make campaign NAME=elastic runs it",
)
def test_a_node_goes_and_comes_again(nodes: Nodes) -> None:
    # Kills: a batch that follows the number of ranks, and a job that ends with its first node.
    checkpoints = nodes.folder / "checkpoints"
    checkpoints.mkdir()
    holds = {step: checkpoints / f"hold{step}" for step in (3, 6)}
    for hold in holds.values():
        hold.touch()
    limits = ("--min_elastic_nodes", "1", "--max_elastic_nodes", "2")
    stays = nodes.start(*limits)
    # On one machine the first to listen serves the rendezvous; it must be the one that stays.
    nodes.until(nodes.someone_listens)
    goes = nodes.start(*limits)
    nodes.until(lambda: (3, 2) in steps(nodes.log()))
    goes.send_signal(signal.SIGKILL)
    goes.wait()
    holds[3].unlink()
    nodes.until(lambda: (6, 1) in steps(nodes.log()))
    comes = nodes.start(*limits)
    nodes.until(lambda: {"start": 6, "world": 2, "batch": 48} in nodes.log())
    holds[6].unlink()
    nodes.end(stays)
    nodes.end(comes)
    assert steps(nodes.log()) == [(1, 2), (2, 2), (3, 2), (4, 1), (5, 1), (6, 1), (7, 2), (8, 2)]
    assert {entry["batch"] for entry in nodes.log() if "start" in entry} == {48}
    # The same sequence of worlds, each launched for itself.
    for ranks, last in ((2, 3), (1, 6), (2, 8)):
        how = {"elastic": False, "checkpoints": "replayed", "STEPS": str(last)}
        nodes.end(nodes.start("--num_gpus", str(ranks), **how))
    assert same(nodes.weights(), nodes.weights("replayed"))
