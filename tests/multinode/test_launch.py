"""`deepspeed` over two and three real hosts: each engine, what is trained, how a job ends."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import cluster as hosts
import pytest
import slurm
import torch
import train
from jobs import NODE_TIMEOUT, SLACK, Job, await_empty

SCRIPT = Path(__file__).with_name("train.py")
TOOLS = {"ssh": "ssh", "pdsh": "pdsh", "openmpi": "mpirun.openmpi", "mpich": "mpirun.mpich"}
ENGINES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(shutil.which(tool) is None, reason=f"{tool} is not installed"),
    )
    for name, tool in TOOLS.items()
]
pytestmark = pytest.mark.skipif(
    hosts.why_impossible() is not None, reason=str(hosts.why_impossible())
)
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


def engine_flags(cluster: hosts.Cluster, engine: str) -> list[str]:
    flags = ["--launcher", engine, "--hostfile", cluster.hostfile()]
    return (
        flags
        if engine == "slurm" or cluster.ssh_port == 22
        else [*flags, "--ssh_port", str(cluster.ssh_port)]
    )


def reference() -> dict[str, torch.Tensor]:
    """The weights after the same steps by plain torch in one process, on the whole batch."""
    torch.manual_seed(0)
    model = train.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.LEARNING_RATE, weight_decay=0.0)
    batches = train.batches()
    for _ in range(train.STEPS):
        data = next(batches)
        torch.nn.functional.mse_loss(model(data[:, :8]), data[:, 8:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def check_training(job: Job, weights: Path, ranks_per_node: int = 2) -> None:
    """The job ended well on all ranks, with the weights of one process, and nothing is left."""
    assert job.end() == 0, job.text
    started = sorted(line.split("starts ", 1)[1] for line in job.lines if ": starts " in line)
    expected = [
        f"{rank} {node.name} {index} {local_rank} {ARGUMENTS}"
        for index, node in enumerate(job.cluster.nodes)
        for local_rank in range(ranks_per_node)
        for rank in [index * ranks_per_node + local_rank]
    ]
    assert started == expected
    saved = torch.load(weights, weights_only=True)
    for name, tensor in reference().items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-5, atol=1e-6)
    await_empty(job.cluster)


@pytest.mark.parametrize("engine", ENGINES)
def test_two_nodes_train_as_one_process(two: hosts.Cluster, tmp_path: Path, engine: str) -> None:
    # Kills: ranks counted per node, arguments a shell expands, a store other nodes cannot reach.
    weights = tmp_path / "weights.pt"
    job = Job(
        two, "-q", *engine_flags(two, engine), str(SCRIPT), "--save", str(weights), "--", *ARGUMENTS
    )
    check_training(job, weights)


@pytest.mark.parametrize("engine", ENGINES)
def test_three_nodes_train_as_one_process(
    three: hosts.Cluster, tmp_path: Path, engine: str
) -> None:
    weights = tmp_path / "weights.pt"
    job = Job(
        three,
        "-q",
        *engine_flags(three, engine),
        str(SCRIPT),
        "--save",
        str(weights),
        "--",
        *ARGUMENTS,
    )
    check_training(job, weights)


def test_nodes_started_by_hand_train_as_one_process(two: hosts.Cluster, tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    flags = [*"-q --no_ssh --num_nodes 2 --num_gpus 2 --master_addr".split(), two.nodes[0].address]
    script = [str(SCRIPT), "--save", str(weights), "--", *ARGUMENTS]
    jobs = [Job(two, *flags, "--node_rank", str(index), *script, node=index) for index in (0, 1)]
    codes = [job.end() for job in jobs]
    assert codes == [0, 0], "\n".join(job.text for job in jobs)
    saved = torch.load(weights, weights_only=True)
    for name, tensor in reference().items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-5, atol=1e-6)
    await_empty(two)


def test_nodes_started_by_hand_fail_together(two: hosts.Cluster, tmp_path: Path) -> None:
    # Kills: a node that waits for ranks of another one, which has failed.
    flags = [*"-q --no_ssh --num_nodes 2 --num_gpus 2 --master_addr".split(), two.nodes[0].address]
    script = [str(SCRIPT), "--save", str(tmp_path / "none"), "--stay", "--fail_rank", "3"]
    jobs = [Job(two, *flags, "--node_rank", str(index), *script, node=index) for index in (0, 1)]
    for job in jobs:
        assert job.end() == train.FAILURE_CODE, job.text
        assert "failed first, with exit code 13" in job.text
        assert job.lines[-2].endswith("ValueError: rank 3 fails on purpose")
    await_empty(two)


def staying_job(
    cluster: hosts.Cluster, engine: str, folder: Path, *flags: str, **environment: str
) -> Job:
    """A job that trains for ever, once all its ranks have done two steps."""
    script = [str(SCRIPT), "--save", str(folder / "none"), "--stay", *flags]
    job = Job(cluster, "-q", *engine_flags(cluster, engine), *script, **environment)
    job.await_lines("two steps", 2 * len(cluster.nodes))
    return job


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_that_raises_on_the_second_node_is_what_is_reported(
    two: hosts.Cluster, tmp_path: Path, engine: str
) -> None:
    # Kills: blame of peers that noticed the loss; the engine's exit code for the rank's.
    job = staying_job(two, engine, tmp_path, "--fail_rank", "2")
    assert job.end() == train.FAILURE_CODE, job.text
    assert "rank 2 (process" in job.text and "failed first, with exit code 13" in job.text
    assert job.lines[-2].endswith("ValueError: rank 2 fails on purpose")
    await_empty(two)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_launcher_ends_the_job(two: hosts.Cluster, tmp_path: Path, engine: str) -> None:
    job = staying_job(two, engine, tmp_path)
    for pid, line in two.nodes[1].processes().items():
        if "python" in line.split()[0] and "deepspeed.launcher.launch" in line:
            os.kill(pid, signal.SIGKILL)
    assert job.end(NODE_TIMEOUT + SLACK) != 0
    assert "(node2) failed first, with a lost connection" in job.text
    await_empty(two)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_node_that_is_cut_off_ends_the_job_on_all_nodes(
    two: hosts.Cluster, tmp_path: Path, engine: str
) -> None:
    # Kills: waiting a quarter of an hour for the network's timeouts; ranks that train on.
    job = staying_job(two, engine, tmp_path)
    node = two.nodes[1]
    node.cut()
    try:
        began = time.monotonic()
        assert job.end(2 * NODE_TIMEOUT + SLACK) != 0
        assert time.monotonic() - began >= NODE_TIMEOUT / 2, "the cut was not what ended the job"
        assert (
            f"(node2) failed first, with no sign of life for {NODE_TIMEOUT:g} seconds" in job.text
        )
        await_empty(two)
    finally:
        node.mend()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_interrupt_reaches_all_nodes(two: hosts.Cluster, tmp_path: Path, engine: str) -> None:
    job = staying_job(two, engine, tmp_path)
    job.signal(signal.SIGINT)
    assert job.end(NODE_TIMEOUT + SLACK) == 128 + signal.SIGINT, job.text
    await_empty(two)


def test_a_killed_command_leaves_nothing_on_any_node(three: hosts.Cluster, tmp_path: Path) -> None:
    job = staying_job(three, "ssh", tmp_path)
    job.signal(signal.SIGKILL)
    job.end()
    await_empty(three, NODE_TIMEOUT + SLACK)


def test_the_node_of_the_command_cut_off_ends_the_others(
    three: hosts.Cluster, tmp_path: Path
) -> None:
    job = staying_job(three, "ssh", tmp_path)
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


@pytest.fixture(scope="module")
def slurm_cluster(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[hosts.Cluster, dict[str, str]]]:
    if slurm.why_impossible() is not None:
        pytest.skip(str(slurm.why_impossible()))
    with (
        hosts.Cluster(2, tmp_path_factory.mktemp("slurm"), number=3) as made,
        slurm.Slurm(made) as running,
    ):
        made.daemons = {pid for node in made.nodes for pid in node.processes()}
        yield made, running.environment


def test_slurm_trains_as_one_process(
    slurm_cluster: tuple[hosts.Cluster, dict[str, str]], tmp_path: Path
) -> None:
    cluster, environment = slurm_cluster
    weights = tmp_path / "weights.pt"
    flags = ["-q", *engine_flags(cluster, "slurm")]
    job = Job(cluster, *flags, str(SCRIPT), "--save", str(weights), "--", *ARGUMENTS, **environment)
    check_training(job, weights)


def test_slurm_reports_the_first_failure(
    slurm_cluster: tuple[hosts.Cluster, dict[str, str]], tmp_path: Path
) -> None:
    cluster, environment = slurm_cluster
    job = staying_job(cluster, "slurm", tmp_path, "--fail_rank", "2", **environment)
    assert job.end() == train.FAILURE_CODE, job.text
    assert "rank 2 (process" in job.text and "failed first, with exit code 13" in job.text
    assert job.lines[-2].endswith("ValueError: rank 2 fails on purpose")
    await_empty(cluster)


def test_slurm_job_ends_when_interrupted(
    slurm_cluster: tuple[hosts.Cluster, dict[str, str]], tmp_path: Path
) -> None:
    cluster, environment = slurm_cluster
    job = staying_job(cluster, "slurm", tmp_path, **environment)
    job.signal(signal.SIGINT)
    assert job.end(NODE_TIMEOUT + SLACK) == 128 + signal.SIGINT, job.text
    await_empty(cluster)


def test_slurm_job_ends_when_a_node_is_cut_off(
    slurm_cluster: tuple[hosts.Cluster, dict[str, str]], tmp_path: Path
) -> None:
    cluster, environment = slurm_cluster
    job = staying_job(cluster, "slurm", tmp_path, **environment)
    cluster.nodes[1].cut()
    try:
        assert job.end(2 * NODE_TIMEOUT + SLACK) != 0
        assert (
            f"(node2) failed first, with no sign of life for {NODE_TIMEOUT:g} seconds" in job.text
        )
    finally:
        cluster.nodes[1].mend()
    await_empty(cluster, NODE_TIMEOUT + SLACK)
