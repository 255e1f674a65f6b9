"""Elastic training over real hosts: one is killed or cut off, the others go on, it comes back."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cluster as hosts
import pytest
from jobs import NODE_TIMEOUT, SETTINGS, SLACK, Job, await_empty
from unit.elasticity.test_elastic_training import SCRIPT, Nodes, same, steps

WHY_NOT = hosts.why_impossible()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
BATCH = 48
RESTART_SECONDS = 2 * NODE_TIMEOUT + 2 * SLACK
"""From a loss to the next step: the timeout, torch's own 15 seconds, 5 for others to come, and slow
interpreters.
"""


class ElasticJob:
    """An elastic job, its rendezvous on the first host; steps 3 and 6 stop until let go."""

    def __init__(self, cluster: hosts.Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.seen = Nodes(folder)
        self.checkpoints = folder / "checkpoints"
        self.checkpoints.mkdir()
        self.holds = {step: self.checkpoints / f"hold{step}" for step in (3, 6)}
        for hold in self.holds.values():
            hold.touch()
        self.jobs = [self.join(index) for index in range(len(cluster.nodes))]

    def join(self, index: int) -> Job:
        """Start a host's part."""
        limits = ["--min_elastic_nodes", "1", "--max_elastic_nodes", str(len(self.cluster.nodes))]
        rendezvous = ["--master_addr", self.cluster.nodes[0].address]
        script = [str(SCRIPT), "--checkpoints", str(self.checkpoints)]
        flags = ["--num_gpus", "2", "--elastic_training", *limits, *rendezvous]
        return Job(self.cluster, *flags, *script, node=index)

    def until(self, condition: Callable[[], bool], seconds: float) -> float:
        """Wait for a condition; returns the seconds that took."""
        began = time.monotonic()
        while not condition():
            told = "\n".join(job.text for job in self.jobs)
            assert time.monotonic() - began < seconds, f"{self.seen.log()}\n{told}"
            time.sleep(0.05)
        return time.monotonic() - began

    def started(self, step: int, world: int) -> bool:
        """Say whether processes have begun at a step, so many of them, with the job's batch."""
        return {"start": step, "world": world, "batch": BATCH} in self.seen.log()


def kill(job: ElasticJob, lost: int) -> None:
    for pid in job.cluster.nodes[lost].processes():
        os.kill(pid, signal.SIGKILL)


def cut(job: ElasticJob, lost: int) -> None:
    job.cluster.nodes[lost].cut()


def replay(job: ElasticJob, *worlds: tuple[int, int]) -> None:
    """Launch the same (world, last step) one by one, and compare the weights bit by bit."""
    for ranks, last in worlds:
        command = [sys.executable, *"-m deepspeed.launcher.runner --num_gpus".split(), str(ranks)]
        command += [str(SCRIPT), "--checkpoints", str(job.seen.folder / "replayed")]
        given = {**os.environ, **SETTINGS, "STEPS": str(last)}
        how = {"stdin": subprocess.DEVNULL, "timeout": 240}
        done = subprocess.run(command, env=given, capture_output=True, text=True, **how)
        assert done.returncode == 0, done.stdout + done.stderr
    assert same(job.seen.weights(), job.seen.weights("replayed"))


@pytest.mark.parametrize(
    ("size", "lose"),
    [(2, kill), (2, cut), (3, cut)],
    ids=["one of two killed", "one of two cut off", "one of three cut off"],
)
def test_a_host_is_lost_and_comes_back(
    tmp_path: Path, size: int, lose: Callable[[ElasticJob, int], None]
) -> None:
    # Kills: peers that wait for a lost host as long as a collective may take; a host behind a cut
    # that waits for ever; a batch that follows the number of ranks.
    (tmp_path / "hosts").mkdir()
    with hosts.Cluster(size, tmp_path / "hosts", number=4) as cluster:
        job = ElasticJob(cluster, tmp_path)
        lost, all_ranks, fewer = size - 1, 2 * size, 2 * size - 2
        job.until(lambda: (3, all_ranks) in steps(job.seen.log()), 240)
        lose(job, lost)
        job.holds[3].unlink()
        restart = job.until(lambda: (4, fewer) in steps(job.seen.log()), RESTART_SECONDS)
        job.until(lambda: (6, fewer) in steps(job.seen.log()), SLACK)
        # Behind its cut the host ends what it had started.
        code = job.jobs[lost].end(RESTART_SECONDS)
        job.until(lambda: not cluster.nodes[lost].processes(), SLACK)
        if lose is cut:
            assert code == 2 and "rendezvous there has not answered for" in job.jobs[lost].text
            # One of the others says so first; its processes' end is then what the rest notice.
            said = f"(node{size}) has given no sign of life for {NODE_TIMEOUT:g} seconds"
            assert any(said in each.text for each in job.jobs[:lost])
            cluster.nodes[lost].mend()
        job.jobs[lost] = job.join(lost)
        growth = job.until(lambda: job.started(6, all_ranks), RESTART_SECONDS)
        job.holds[6].unlink()
        codes = [each.end() for each in job.jobs]
        assert codes == [0] * size, "\n".join(each.text for each in job.jobs)
        await_empty(cluster)
    took = (
        f"{restart:.0f} s from the loss to the next step, {growth:.0f} s from joining to the start"
    )
    print(f"{size} hosts, {lose.__name__}: {took}")
    ranks = [fewer if step in (4, 5, 6) else all_ranks for step in range(1, 9)]
    assert steps(job.seen.log()) == list(enumerate(ranks, 1))
    assert {entry["batch"] for entry in job.seen.log() if "start" in entry} == {BATCH}
    replay(job, (all_ranks, 3), (fewer, 6), (all_ranks, 8))
