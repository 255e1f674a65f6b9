"""`deepspeed` over two and three real hosts: each engine, what is trained, how a job ends."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import cluster as hosts
import pytest
import slurm
import torch
import train
from jobs import NODE_TIMEOUT, SLACK, Job, await_empty
from unit.one_process import OneProcess

Words = dict[str, str]
Running = tuple[hosts.Cluster, Words]
SCRIPT = Path(__file__).with_name("train.py")
TOOLS = {"ssh": "ssh", "pdsh": "pdsh", "openmpi": "mpirun.openmpi", "mpich": "mpirun.mpich"}
ENGINES = [
    pytest.param(name, marks=pytest.mark.skipif(not shutil.which(tool), reason=f"no {tool} here"))
    for name, tool in TOOLS.items()
]
WHY_NOT = hosts.why_impossible()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
SILENT = f"(node2) failed first, with no sign of life for {NODE_TIMEOUT:g} seconds"
ARGUMENTS = ["two words", "$HOME `id` ;'\"&|*", "%n%h 100%", ""]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.Cluster]:
    # The other port shows that --ssh_port is handed to every engine that goes over ssh.
    with hosts.Cluster(2, tmp_path_factory.mktemp("two"), ssh_port=2222) as made:
        yield made


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.Cluster]:
    with hosts.Cluster(3, tmp_path_factory.mktemp("three"), number=2) as made:
        yield made


@pytest.fixture(scope="module")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    if slurm.why_impossible() is not None:
        pytest.skip(str(slurm.why_impossible()))
    with (
        hosts.Cluster(2, tmp_path_factory.mktemp("slurm"), number=3) as made,
        slurm.Slurm(made) as running,
    ):
        made.daemons = {pid for node in made.nodes for pid in node.processes()}
        yield made, running.environment


@dataclass
class Site:
    """Hosts, and an engine that starts jobs on them."""

    cluster: hosts.Cluster
    engine: str
    environment: Words = field(default_factory=dict)

    def job(self, *script: str) -> Job:
        flags = ["--launcher", self.engine, "--hostfile", self.cluster.hostfile()]
        if self.engine != "slurm" and self.cluster.ssh_port != 22:
            flags += ["--ssh_port", str(self.cluster.ssh_port)]
        return Job(self.cluster, "-q", *flags, str(SCRIPT), *script, **self.environment)

    def staying_job(self, *flags: str) -> Job:
        """A job that trains for ever, once all its ranks have done two steps."""
        job = self.job("--save", str(self.cluster.folder / "none"), "--stay", *flags)
        job.await_lines("two steps", 2 * len(self.cluster.nodes))
        return job


@pytest.fixture(params=[*ENGINES, "slurm"])
def site(request: pytest.FixtureRequest) -> Site:
    """Two hosts."""
    if request.param == "slurm":
        cluster, environment = request.getfixturevalue("slurm_cluster")
        return Site(cluster, "slurm", environment)
    return Site(request.getfixturevalue("two"), request.param)


def assert_trained(weights: Path) -> None:
    """What is saved are the weights after the same steps by plain torch, on the whole batch."""
    torch.manual_seed(0)
    model = train.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.LEARNING_RATE, weight_decay=0.0)
    alone = OneProcess(model, optimizer, train.loss_of)
    for batch in islice(train.batches(), train.STEPS):
        alone.step([batch])
    saved = torch.load(weights, weights_only=True)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-5, atol=1e-6)


def check_training(site: Site, folder: Path) -> None:
    """A job ends well on all ranks, with the weights of one process, and nothing is left."""
    weights = folder / "weights.pt"
    job = site.job("--save", str(weights), "--", *ARGUMENTS)
    assert job.end() == 0, job.text
    started = sorted(line.split("starts ", 1)[1] for line in job.lines if ": starts " in line)
    places = [(node, i, local) for i, node in enumerate(job.cluster.nodes) for local in (0, 1)]
    expected = [f"{2 * i + local} {node.name} {i} {local} {ARGUMENTS}" for node, i, local in places]
    assert started == expected
    assert_trained(weights)
    await_empty(job.cluster)


def test_two_nodes_train_as_one_process(site: Site, tmp_path: Path) -> None:
    # Kills: ranks counted per node, arguments a shell expands, a store other nodes cannot reach.
    check_training(site, tmp_path)


@pytest.mark.parametrize("engine", ENGINES)
def test_three_nodes_train_as_one_process(
    three: hosts.Cluster, tmp_path: Path, engine: str
) -> None:
    check_training(Site(three, engine), tmp_path)


def by_hand(two: hosts.Cluster, *script: str) -> list[Job]:
    """The jobs of both nodes, each started on its own."""
    flags = [*"-q --no_ssh --num_nodes 2 --num_gpus 2 --master_addr".split(), two.nodes[0].address]
    own = [["--node_rank", str(index), str(SCRIPT)] for index in (0, 1)]
    return [Job(two, *flags, *own[index], *script, node=index) for index in (0, 1)]


def test_nodes_started_by_hand_train_as_one_process(two: hosts.Cluster, tmp_path: Path) -> None:
    jobs = by_hand(two, "--save", str(tmp_path / "weights.pt"), "--", *ARGUMENTS)
    codes = [job.end() for job in jobs]
    assert codes == [0, 0], "\n".join(job.text for job in jobs)
    assert_trained(tmp_path / "weights.pt")
    await_empty(two)


def check_failure(job: Job, rank: int) -> None:
    """The job has ended as the rank that raised."""
    assert job.end() == train.FAILURE_CODE, job.text
    assert "failed first, with exit code 13" in job.text
    assert job.lines[-2].endswith(f"ValueError: rank {rank} fails on purpose")


def test_nodes_started_by_hand_fail_together(two: hosts.Cluster, tmp_path: Path) -> None:
    # Kills: a node that waits for ranks of another one, which has failed.
    for job in by_hand(two, "--save", str(tmp_path / "none"), "--stay", "--fail_rank", "3"):
        check_failure(job, 3)
    await_empty(two)


def test_a_rank_that_raises_on_the_second_node_is_what_is_reported(site: Site) -> None:
    # Kills: blame of peers that noticed the loss; the engine's exit code for the rank's.
    job = site.staying_job("--fail_rank", "2")
    check_failure(job, 2)
    assert "rank 2 (process" in job.text
    await_empty(site.cluster)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_launcher_ends_the_job(two: hosts.Cluster, engine: str) -> None:
    job = Site(two, engine).staying_job()
    for pid, line in two.nodes[1].processes().items():
        if "python" in line.split()[0] and "deepspeed.launcher.launch" in line:
            os.kill(pid, signal.SIGKILL)
    assert job.end(NODE_TIMEOUT + SLACK) != 0
    assert "(node2) failed first, with a lost connection" in job.text
    await_empty(two)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_node_that_is_cut_off_ends_the_job_on_all_nodes(two: hosts.Cluster, engine: str) -> None:
    # Kills: waiting a quarter of an hour for the network's timeouts; ranks that train on.
    job = Site(two, engine).staying_job()
    node = two.nodes[1]
    node.cut()
    try:
        began = time.monotonic()
        assert job.end(2 * NODE_TIMEOUT + SLACK) != 0
        assert time.monotonic() - began >= NODE_TIMEOUT / 2, "the cut was not what ended the job"
        assert SILENT in job.text
        await_empty(two)
    finally:
        node.mend()


def test_an_interrupt_reaches_all_nodes(site: Site) -> None:
    job = site.staying_job()
    job.signal(signal.SIGINT)
    assert job.end(NODE_TIMEOUT + SLACK) == 128 + signal.SIGINT, job.text
    await_empty(site.cluster)


def test_a_killed_command_leaves_nothing_on_any_node(three: hosts.Cluster) -> None:
    job = Site(three, "ssh").staying_job()
    job.signal(signal.SIGKILL)
    job.end()
    await_empty(three, NODE_TIMEOUT + SLACK)


def test_the_node_of_the_command_cut_off_ends_the_others(three: hosts.Cluster) -> None:
    job = Site(three, "ssh").staying_job()
    three.nodes[0].cut()
    try:
        assert job.end(2 * NODE_TIMEOUT + SLACK) != 0
        await_empty(three, NODE_TIMEOUT + SLACK)
    finally:
        three.nodes[0].mend()


def test_a_host_that_refuses_ssh_is_named(two: hosts.Cluster) -> None:
    flags = ["--launcher", "ssh", "--hostfile", two.hostfile(), "--ssh_port", "2223"]
    job = Job(two, "-q", *flags, str(SCRIPT))
    assert job.end() == 2
    assert "passwordless ssh does not work: node1: " in job.text and "node2: " in job.text
    job = Job(two, "-q", *flags, "--no_ssh_check", str(SCRIPT))
    assert job.end() == 255
    assert "failed first, with exit code 255 of ssh before all nodes had reported" in job.text
    await_empty(two)


def test_slurm_job_ends_when_a_node_is_cut_off(slurm_cluster: Running) -> None:
    cluster, environment = slurm_cluster
    job = Site(cluster, "slurm", environment).staying_job()
    cluster.nodes[1].cut()
    try:
        assert job.end(2 * NODE_TIMEOUT + SLACK) != 0
        assert SILENT in job.text
    finally:
        cluster.nodes[1].mend()
    await_empty(cluster, NODE_TIMEOUT + SLACK)
