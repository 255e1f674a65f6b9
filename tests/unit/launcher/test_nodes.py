"""Launching on several nodes, this machine in the place of all: stand-ins for ssh and mpirun."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from unit.launcher.starting import SHOW, TIMEOUT, Commands, Process, free_pair, shown, until

SSH = """
#!/bin/bash
# Options with a value, then the host; what follows goes to a shell with nothing of this one's
# variables.
while [[ $1 == -* ]]; do shift 2; done
[[ $1 == down ]] && { echo "ssh: connect to host down: No route to host" >&2; exit 255; }
shift
exec env -i PATH="$PATH" HOME="$HOME" bash -c "$*"
"""
MPIRUN = """
#!/bin/bash
[[ $1 == --version ]] && { echo "mpirun (Open MPI) 0"; exit; }
count=$2
while [[ $1 != */python* ]]; do shift; done
for ((rank = 0; rank < count; rank++)); do
  export OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$((rank % 2))
  MARK_FD=9 "$@" 9< <(echo "descriptor of $rank") &
done
wait
"""
FAIL = """
import os, sys, time
print("starts", flush=True)
if os.environ["RANK"] == "2" and "--stay" not in sys.argv:
    sys.excepthook = lambda *info: (sys.__excepthook__(*info), sys.stderr.flush(), os._exit(13))
    raise ValueError("boom")
time.sleep(600)
"""


class Nodes(Commands):
    """Has stand-ins and scripts in its folder."""

    def __init__(self, folder: Path) -> None:
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        super().__init__(folder, PATH=path, DS_MARK="a 'b'; $c", DS_LAUNCH_TIMEOUT="20")
        programs = {"ssh": SSH, "mpirun.openmpi": MPIRUN, "show.py": SHOW, "fail.py": FAIL}
        for name, text in programs.items():
            self.script(text, name)
        self.hosts("alpha slots=2", "beta slots=1")

    def hosts(self, *lines: str) -> None:
        (self.folder / "hostfile").write_text("\n".join(lines))

    def start(self, engine: str, *words: str, **how: Any) -> Process:
        engine = "--no_ssh" if engine == "by hand" else f"--launcher={engine}"
        return super().start("-q", engine, "--hostfile", "hostfile", *words, **how)

    def left(self) -> list[str]:
        """Command lines of processes that were started in this folder and still run."""
        own = [process.pid for process in self.processes]
        return [
            " ".join(process.info["cmdline"] or [])
            for process in psutil.process_iter(["cmdline", "cwd"])
            if process.info["cwd"] == str(self.folder) and process.pid not in own
        ]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    if shutil.which("bash") is None:
        pytest.skip("the stand-ins are scripts for bash")
    with Nodes(tmp_path) as made:
        yield made


def starts(process: Process, ranks: int) -> bool:
    """Whether so many ranks have started."""
    assert process.stdout is not None
    return all("starts" in process.stdout.readline() for _ in range(ranks))


def check_places(ranks: dict[int, dict[str, object]], sizes: list[int]) -> None:
    """Each rank knows where it stands in the whole job, and all know the same place to meet."""
    places = [(node, local) for node, size in enumerate(sizes) for local in range(size)]
    assert sorted(ranks) == list(range(len(places)))
    for rank, (node, local) in enumerate(places):
        seen = ranks[rank]
        numbers = (str(rank), str(local), str(node))
        assert (seen["RANK"], seen["LOCAL_RANK"], seen["CROSS_RANK"]) == numbers
        expected = (str(len(places)), str(sizes[node]), str(len(sizes)))
        assert (seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"], seen["CROSS_SIZE"]) == expected
    assert len({(seen["MASTER_ADDR"], seen["MASTER_PORT"]) for seen in ranks.values()}) == 1


def test_ssh_starts_ranks_of_one_job_on_all_nodes(nodes: Nodes) -> None:
    # Kills: environment lost or expanded on the way, ranks counted per node, cores not bound.
    binds = len(os.sched_getaffinity(0)) > 1
    flags = ["--bind_cores_to_rank", "--bind_core_list", "0-1"] if binds else []
    code, out, err = nodes.run("ssh", *flags, "show.py", "$HOME", "a 'b' c")
    assert code == 0, err
    ranks = shown(out)
    check_places(ranks, [2, 1])
    for seen in ranks.values():
        assert seen["argv"] == [f"--local_rank={seen['LOCAL_RANK']}", "$HOME", "a 'b' c"]
        assert seen["DS_MARK"] == "a 'b'; $c"
    if binds:
        assert [ranks[rank]["cores"] for rank in range(3)] == [[0], [1], [0, 1]]
    assert nodes.left() == []


def test_the_first_failure_on_any_node_is_the_commands(nodes: Nodes) -> None:
    code, _, err = nodes.run("ssh", "--enable_each_rank_log", "logs", "fail.py")
    assert code == 13
    assert "[deepspeed] node 1 (beta): rank 2 (process" in err
    assert "failed first, with exit code 13" in err
    assert err.endswith("ValueError: boom\n")
    logs = sorted(path.name.rpartition("_")[2] for path in (nodes.folder / "logs").iterdir())
    assert logs == ["rank0.log", "rank1.log", "rank2.log"]
    assert nodes.left() == []


def test_a_host_that_cannot_be_reached(nodes: Nodes) -> None:
    nodes.hosts("alpha slots=1", "down slots=1")
    code, _, err = nodes.run("ssh", "show.py")
    assert (code, err.count("\n")) == (2, 1)
    lost = "ssh: connect to host down: No route to host"
    assert f"passwordless ssh does not work: down: {lost}" in err
    code, _, err = nodes.run("ssh", "--no_ssh_check", "show.py")
    assert code == 255
    ended = "exit code 255 of ssh before all nodes had reported"
    assert f"node 1 (down) failed first, with {ended}" in err
    assert nodes.left() == []


def test_nodes_started_by_hand(nodes: Nodes) -> None:
    flags = ["--master_addr", "127.0.0.1", "--master_port", str(free_pair()), "--node_rank"]
    nodes.is_forked = True
    started = [nodes.start("by hand", *flags, str(rank), "show.py") for rank in (0, 1)]
    said = [process.communicate(timeout=TIMEOUT) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    check_places(shown(said[0][0] + said[1][0]), [2, 1])
    assert nodes.left() == []


def test_mpi_starts_each_rank_and_keeps_its_descriptors(nodes: Nodes) -> None:
    # Kills: a launcher between engine and process that closes what MPICH speaks through.
    nodes.hosts("alpha slots=2", "beta slots=2")
    code, out, err = nodes.run("openmpi", "show.py", "$HOME")
    assert code == 0, err
    ranks = shown(out)
    check_places(ranks, [2, 2])
    for rank, seen in ranks.items():
        assert seen["argv"] == ["$HOME"], "no --local_rank, as upstream"
        assert seen["descriptor"] == f"descriptor of {rank}\n"
    assert nodes.left() == []


def test_mpi_that_places_ranks_otherwise_is_refused(nodes: Nodes) -> None:
    nodes.hosts("alpha slots=1", "beta slots=2")
    code, _, err = nodes.run("openmpi", "show.py")
    assert code != 0
    assert "rank 1 is local rank 1" in err and "and should be 0" in err


def test_a_signal_to_the_command_ends_all_nodes(nodes: Nodes) -> None:
    nodes.hosts("alpha slots=2", "beta slots=2")
    process = nodes.start("openmpi", "fail.py", "--stay")
    assert starts(process, 4)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signal.SIGINT
    assert nodes.left() == []


def test_a_killed_command_leaves_nothing_on_any_node(nodes: Nodes) -> None:
    # Kills: launchers that live on when nobody is left to answer to.
    nodes.hosts("alpha slots=2")
    process = nodes.start("openmpi", "--force_multi", "fail.py")
    assert starts(process, 2)
    process.kill()
    until(lambda: not nodes.left(), say=nodes.left)
