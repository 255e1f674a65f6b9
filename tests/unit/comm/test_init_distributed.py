"""Finding the other ranks: arguments, environment, MPI, Slurm, nobody."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from deepspeed import comm as dist
from deepspeed.comm import discovery, initialization, utils
from deepspeed.comm.discovery import first_slurm_host
from deepspeed.comm.watch.backend_threads import yielding_threads
from unit.comm.starts import SPAWNED, Start, begin, verdict
from unit.common import DistributedTest, get_master_port, python_path
from unit.launcher.starting import ROOT, until

FOREIGN = ("OMPI_", "PMI_", "MPI_", "MV2_", "SLURM_", "AZUREML_", "SM_")
OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def bare_env(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No launcher, no scheduler; what discovery sets is undone."""
    saved = dict(os.environ)
    for name in list(os.environ):
        if name in OWN or name.startswith(FOREIGN):
            del os.environ[name]
    yield monkeypatch
    monkeypatch.undo()
    os.environ.clear()
    os.environ.update(saved)


MISSING = {
    "RANK=0": "WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
    "WORLD_SIZE=2": "RANK, MASTER_ADDR, MASTER_PORT",
    "RANK=0 WORLD_SIZE=2 MASTER_PORT=1": "MASTER_ADDR",
    "RANK=0 WORLD_SIZE=2": "MASTER_ADDR, MASTER_PORT",
}


@pytest.mark.parametrize("given", MISSING)
def test_missing_variables_are_named_with_the_remedy(
    bare_env: pytest.MonkeyPatch, given: str
) -> None:
    os.environ.update(word.split("=") for word in given.split())
    told = f"environment variables {MISSING[given]} are not set; start the script with"
    with pytest.raises(ValueError, match=told) as caught:
        dist.init_distributed("gloo")
    assert "torchrun" in str(caught.value) and not dist.is_initialized()


def test_inconsistent_variables(bare_env: pytest.MonkeyPatch) -> None:
    texts = {"2": "RANK=2 is not in 0..WORLD_SIZE-1 with WORLD_SIZE=2", "x": "RANK='x' is not"}
    for rank, text in texts.items():
        os.environ.update(RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        with pytest.raises(ValueError, match=text):
            dist.init_distributed("gloo")
    told = "dist_init_required=False, but there is no process group"
    with pytest.raises(RuntimeError, match=told):
        dist.init_distributed("gloo", dist_init_required=False)


def test_ccl_without_its_package_is_refused(bare_env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with pytest.raises(ImportError, match="oneccl_bindings_for_pytorch.*use dist_backend='gloo'"):
        dist.init_distributed("ccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)


def test_mpi_on_one_machine(bare_env: pytest.MonkeyPatch) -> None:
    # As if mpi4py were not installed.
    bare_env.setattr(discovery.importlib.util, "find_spec", lambda name: None)
    os.environ.update(OMPI_COMM_WORLD_RANK="3", OMPI_COMM_WORLD_SIZE="4")
    os.environ.update(OMPI_COMM_WORLD_LOCAL_RANK="3", OMPI_COMM_WORLD_LOCAL_SIZE="4")
    assert discovery.in_mpi()
    dist.mpi_discovery(distributed_port=123)
    assert [os.environ[name] for name in OWN] == ["3", "4", "3", "127.0.0.1", "123"]


def test_mpi_on_several_machines_needs_an_address(bare_env: pytest.MonkeyPatch) -> None:
    bare_env.setattr(discovery.importlib.util, "find_spec", lambda name: None)
    os.environ.update(PMI_RANK="1", PMI_SIZE="4", MPI_LOCALRANKID="1", MPI_LOCALNRANKS="2")
    with pytest.raises(RuntimeError, match="install mpi4py, or set MASTER_ADDR"):
        dist.mpi_discovery()
    os.environ["MASTER_ADDR"] = "head"
    dist.mpi_discovery()
    found = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR")]
    assert found == ["1", "1", "head"]
    del os.environ["PMI_RANK"]
    with pytest.raises(RuntimeError, match="found neither mpi4py nor any of"):
        dist.mpi_discovery()


def test_slurm(bare_env: pytest.MonkeyPatch) -> None:
    os.environ.update(SLURM_PROCID="5", SLURM_NTASKS="8", SLURM_LOCALID="1")
    os.environ["SLURM_JOB_NODELIST"] = "gpu[07-09,12],cpu1"
    discovery.discover(distributed_port=456, verbose=True)
    assert [os.environ[name] for name in OWN] == ["5", "8", "1", "gpu07", "456"]
    # Explicit variables win.
    os.environ.update(MASTER_ADDR="b", MASTER_PORT="7")
    discovery.discover(distributed_port=456, verbose=False)
    assert os.environ["MASTER_ADDR"] == "b" and os.environ["MASTER_PORT"] == "7"


FIRST_HOSTS = {
    **{"node1": "node1", "node1,node2": "node1", "gpu[07-09,12],cpu1": "gpu07"},
    **{"a[1-2]-b[03,7],c": "a1-b03", "rack-2-n[10]": "rack-2-n10"},
}


def test_first_slurm_host() -> None:
    assert {nodes: first_slurm_host(nodes) for nodes in FIRST_HOSTS} == FIRST_HOSTS
    with pytest.raises(ValueError, match="SLURM_JOB_NODELIST='' names no host; set MASTER_ADDR"):
        first_slurm_host("")


def test_cloud_schedulers(bare_env: pytest.MonkeyPatch) -> None:
    os.environ.update(OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="4")
    os.environ.update(OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_LOCAL_SIZE="2")
    os.environ["AZ_BATCH_MASTER_NODE"] = "head:77"
    assert not (dist.in_aml() or dist.in_aws_sm() or dist.in_dlts())
    bare_env.setenv("AZUREML_EXPERIMENT_ID", "1")
    assert dist.in_aml()
    discovery.discover(29500, verbose=False)
    assert [os.environ[name] for name in OWN] == ["1", "4", "1", "head", "77"]
    bare_env.delenv("AZUREML_EXPERIMENT_ID")
    bare_env.setenv("SM_TRAINING_ENV", "{}")
    os.environ["RANK"] = "9"
    discovery.discover(29500, verbose=False)
    assert os.environ["RANK"] == "1"


NAMES = ("world_rank", "local_rank", "world_size")


def test_ranks_from_launchers(bare_env: pytest.MonkeyPatch) -> None:
    asked = [getattr(utils, f"get_{name}_from_launcher") for name in NAMES]
    assert [ask() for ask in asked] == [0, 0, 1]
    os.environ.update(SLURM_PROCID="5", SLURM_LOCALID="2", SLURM_NTASKS="8")
    assert [ask() for ask in asked] == [5, 2, 8]
    os.environ.update(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    assert [ask() for ask in asked] == [1, 1, 2]
    os.environ["RANK"] = "one"
    with pytest.raises(ValueError, match="RANK='one' is not an integer"):
        utils.get_world_rank_from_launcher()


def test_nothing_is_made_at_import() -> None:
    assert initialization.cdb is None or dist.is_initialized()


def test_message_sizes() -> None:
    import torch

    size, two = utils.get_msg_size_from_args, [torch.ones(2), torch.ones(3)]
    assert size(dist.all_reduce, torch.ones(3)) == 12
    assert size(dist.reduce_scatter, torch.ones(1), input_list=two) == 20
    assert size(dist.barrier) == 0


def forget_launch() -> None:
    for name in OWN:
        del os.environ[name]


class TestJoin(DistributedTest):
    world_size = 2
    init_distributed = False

    def test_env(self) -> None:
        dist.init_distributed()
        dist.barrier()  # who leaves first would take the store along, by which the other is joining
        assert dist.get_rank() == int(os.environ["RANK"]) and dist.get_world_size() == 2
        first = dist.cdb
        dist.init_distributed(dist_init_required=False)  # one is there: adopted
        assert dist.cdb is not None and dist.cdb is not first and dist.get_world_size() == 2

    def test_adopts_torchs_group(self) -> None:
        import torch.distributed

        torch.distributed.init_process_group("gloo")
        dist.init_distributed("gloo")
        dist.barrier()
        assert dist.get_backend_name() == "gloo" and dist.cdb is not None

    def test_file_and_arguments(self, tmp_path: Path) -> None:
        rank = int(os.environ["RANK"])
        forget_launch()
        store = f"file://{tmp_path}/store"
        dist.init_distributed("gloo", init_method=store, rank=rank, world_size=2)
        dist.barrier()  # who leaves first would close a connection that the other is still making
        assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)

    def test_slurm(self) -> None:
        rank, port = os.environ["RANK"], os.environ["MASTER_PORT"]
        forget_launch()
        os.environ.update(SLURM_PROCID=rank, SLURM_NTASKS="2", SLURM_LOCALID=rank)
        os.environ["SLURM_JOB_NODELIST"] = "localhost"
        dist.init_distributed("gloo", distributed_port=int(port))
        dist.barrier()  # who leaves first would close a connection that the other is still making
        assert (dist.get_rank(), dist.get_world_size()) == (int(rank), 2)

    def test_timeout_holds_for_later_groups(self) -> None:
        """Of both ranks, only rank 0 calls: it must not wait for torch's half hour."""
        dist.init_distributed("gloo", timeout=timedelta(seconds=1))
        group = dist.new_group([0, 1])
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="(?i)timed? ?out"):
                dist.barrier(group=group)
        else:
            # Stay alive, or the failure is a closed connection instead of the timeout.
            subprocess.run([sys.executable, "-c", "import time; time.sleep(2)"], check=True)


class TestAlone(DistributedTest):
    world_size = 1
    init_distributed = False
    set_dist_env = False

    def test_nobody_launched_it(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", int(get_master_port())))
            taken.listen()
            # Even the port one would choose being taken does not matter: it meets nobody.
            dist.init_distributed("gloo", distributed_port=taken.getsockname()[1])
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        assert os.environ["LOCAL_RANK"] == "0"
        assert dist.new_group([0]) is not None
        dist.destroy_process_group()
        dist.init_distributed("gloo")
        assert dist.get_world_size() == 1

    @pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="threads cannot yield there")
    def test_threads_of_gloo_interrupt_nobody(self) -> None:
        # Kills: threads that are scheduled as others are, and others that are scheduled as these.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # as ranks outside of tests
        for make in (partial(dist.init_distributed, "gloo"), partial(dist.new_group, [0])):
            there = set(os.listdir("/proc/self/task"))
            make()
            added = set(os.listdir("/proc/self/task")) - there
            assert {os.sched_getscheduler(int(thread)) for thread in added} == {os.SCHED_BATCH}
            assert os.sched_getscheduler(0) == os.SCHED_OTHER
        with yielding_threads("nccl"):
            assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_forked_and_spawned_ranks_start_and_end() -> None:
    command = [sys.executable, "-m", "unit.comm.starts"]
    command += "--rounds 2 --load 0 --seed 4".split()
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT, ROOT / "tests")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "seed 4\n2 of 2 ended well\n", done.stdout + done.stderr


ENDS = {
    "": "",
    "codes [3, 0]": "import sys; sys.exit(3)",
    "terminate called": "print('terminate called without an active exception')",
    # Kills: stacks that nobody takes, or that of a rank that is given up only.
    "File": "import faulthandler, time; from signal import *; faulthandler.register(SIGUSR1); "
    "print('registered', flush=True); pthread_sigmask(SIG_UNBLOCK, {SIGUSR1}); time.sleep(600)",
}


@pytest.mark.parametrize("told", ENDS)
def test_what_is_not_well_is_told(tmp_path: Path, told: str) -> None:
    pids = []
    for rank, code in enumerate((ENDS[told], "")):
        output = os.open(tmp_path / f"rank{rank}.out", os.O_WRONLY | os.O_CREAT)
        both = [(os.POSIX_SPAWN_DUP2, output, descriptor) for descriptor in (1, 2)]
        words = [sys.executable, "-c", code]
        # Blocked until it is registered.
        how = {"file_actions": both, "setsigmask": [signal.SIGUSR1]}
        pids.append(os.posix_spawn(sys.executable, words, os.environ, **how))
        os.close(output)
    hangs = told == "File"
    if hangs:
        until(lambda: "registered" in (tmp_path / "rank0.out").read_text())
    said = verdict(pids, tmp_path, limit_s=0.3 if hangs else 60.0)
    assert told in said and bool(said) is bool(told)


def test_a_rank_that_cannot_tell_its_stacks_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a late rank that the campaign itself ends by asking."""
    monkeypatch.setenv("PYTHONPATH", python_path(ROOT, ROOT / "tests"))
    start, port = Start(SPAWNED, stage=0, destroys=True), get_master_port()
    before = signal.getsignal(signal.SIGUSR1)
    try:
        pids = [begin(start, rank, tmp_path, port) for rank in (0, 1)]
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        assert verdict(pids, tmp_path) == ""
    finally:
        signal.signal(signal.SIGUSR1, before)
