"""The `deepspeed` command with real processes: what they see, what is said, who is left."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from unit.common import TORCH
from unit.launcher.starting import SHOW, TIMEOUT, Commands, Process, free_pair, shown

SLEEP = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print("pids", os.getpid(), child.pid, flush=True)
time.sleep(600)
"""

QUICK = """
import os, sys, time, traceback
with open(f"starts{os.environ['RANK']}", "a+") as starts:
    starts.write("x")
    starts.flush()
    starts.seek(0)
    number = len(starts.read())
if number > int(os.environ["FAILURES"]):
    sys.exit()
if os.environ["RANK"] == "1":
    # Rank 0 would be ended before it has counted, and sleep where it should have come to its end.
    while not os.path.exists("starts0") or os.path.getsize("starts0") < number:
        time.sleep(0.01)
    try:
        raise ValueError("boom")
    except ValueError:
        traceback.print_exc()
        os._exit(7)
time.sleep(600)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Commands]:
    with Commands(tmp_path, is_forked=True, OMP_NUM_THREADS=None) as launcher:
        yield launcher


def test_environment_arguments_and_prefixes(launcher: Commands) -> None:
    flags = ("--num_gpus", "2", "--master_port", "0", launcher.script(SHOW))
    code, out, err = launcher.run(*flags, "--a=$$b", "${local_rank}", "c d", is_forked=False)
    assert code == 0, err
    ranks = shown(out)
    assert sorted(ranks) == [0, 1]
    # Kills: ranks told to meet at port 0, which each takes for another one, and wait for ever.
    assert ranks[0]["MASTER_PORT"] == ranks[1]["MASTER_PORT"] not in (None, "0")
    for rank, seen in ranks.items():
        # torch's agent would expand the dollars; they are the user's.
        assert seen["argv"] == [f"--local_rank={rank}", "--a=$$b", "${local_rank}", "c d"]
        assert (seen["RANK"], seen["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"], seen["LOCAL_SIZE"]) == ("2", "2", "2")
        assert (seen["CROSS_RANK"], seen["CROSS_SIZE"]) == ("0", "1")
        assert seen["MASTER_ADDR"] == "127.0.0.1"
        assert seen["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert not list(launcher.folder.glob("deepspeed_*")), "the launcher's folder must go with it"


def test_first_failing_rank_gives_code_and_last_words(launcher: Commands) -> None:
    script = launcher.script("""
        import os, subprocess, sys, time
        if os.environ["RANK"] == "1":
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            print("pids", os.getpid(), child.pid, flush=True)
            try:
                raise KeyError("inner")
            except KeyError as error:
                def last_words(*info):
                    sys.__excepthook__(*info)
                    sys.stderr.flush()
                    os._exit(13)

                sys.excepthook = last_words
                raise ValueError("boom") from error
        print("peer noise", file=sys.stderr, flush=True)
        time.sleep(600)
        """)
    process = launcher.start("--num_gpus", "2", script)
    pids = read_pids(process, 1)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 13
    # The failed rank is dead already, so nobody else would look for what it had started.
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    head, _, last_words = err.partition("what rank 1 last wrote to stderr:\n")
    assert "failed first, with exit code 13" in head
    # torch 2.9's agent does not tell how the processes ended that it ended itself, 2.13's does.
    assert "then ended with signal SIGTERM" in head or TORCH < (2, 10)
    assert last_words.startswith("Traceback (most recent call last):")
    assert "KeyError: 'inner'" in last_words
    assert last_words.endswith("ValueError: boom\n")


def test_death_by_signal_gives_its_shell_code(launcher: Commands) -> None:
    code, _, err = launcher.run("-q", launcher.script("import os; os.kill(os.getpid(), 9)"))
    assert code == 128 + signal.SIGKILL
    assert "rank 0 (process" in err and "signal SIGKILL (9)" in err
    assert "wrote nothing to stderr" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_process(launcher: Commands, number: signal.Signals) -> None:
    launcher.is_forked = number == signal.SIGINT
    process = launcher.start("-q", "--num_gpus", "2", launcher.script(SLEEP))
    pids = read_pids(process, 2)
    process.send_signal(number)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + number
    assert not [pid for pid in pids if psutil.pid_exists(pid)], "a process or its orphan is left"


def test_a_second_interrupt_does_not_wait(launcher: Commands) -> None:
    stubborn = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    process = launcher.start("-q", "--num_gpus", "2", launcher.script(stubborn + SLEEP))
    pids = read_pids(process, 2)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=15)
    assert process.returncode == 128 + signal.SIGINT
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_killing_the_launcher_ends_the_ranks(launcher: Commands) -> None:
    script = launcher.script("""
        import os, time
        print("pids", os.getpid(), flush=True)
        time.sleep(600)
        """)
    process = launcher.start("-q", "--num_gpus", "2", script)
    pids = read_pids(process, 2)
    ranks = [psutil.Process(pid) for pid in pids]
    process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert [rank for rank in alive if rank.status() != psutil.STATUS_ZOMBIE] == []


def read_pids(process: Process, num_lines: int) -> list[int]:
    """The numbers on the next lines that say `pids`."""
    assert process.stdout is not None
    pids: list[int] = []
    while num_lines:
        line = process.stdout.readline()
        assert line, f"the launcher ended early, with {process.wait()}"
        if " pids " in line:
            pids.extend(int(word) for word in line.split() if word.isdigit())
            num_lines -= 1
    return pids


def elastic(*flags: str) -> list[str]:
    return ["-q", "--elastic_training", "--master_addr", "127.0.0.1", *flags]


@pytest.mark.parametrize("failures", [2, 100])
def test_elastic_processes_that_fail_at_once(launcher: Commands, failures: int) -> None:
    launcher.variables["FAILURES"] = str(failures)
    flags = elastic("--num_gpus", "2", "--master_port", str(free_pair()))
    code, out, err = launcher.run(*flags, launcher.script(QUICK))
    # Kills: a program that can never run restarted a hundred times; a report that blames the rank
    # that was ended with it, or has lost the code.
    assert (launcher.folder / "starts1").read_text() == "xxx"
    if failures == 2:
        assert code == 0 and "not starting them again" not in out
        return
    assert code == 7
    assert "failed within 30 seconds of their start 3 times in a row: not starting" in out
    head, _, last_words = err.partition("what rank 1 last wrote to stderr:\n")
    assert "failed first, with exit code 7" in head
    assert last_words.startswith("Traceback (most recent call last):")
    assert last_words.endswith("ValueError: boom\n")


def test_a_node_that_gives_up_ends_those_that_wait_for_it(launcher: Commands) -> None:
    # Kills: a node whose rank waits in a collective, whose peer will not come again; and one that
    # is told that the rendezvous cannot be reached.
    flags = ("--num_gpus", "1", "--min_elastic_nodes", "2", "--master_port", str(free_pair()))
    script = launcher.script(QUICK)
    launcher.variables.update(FAILURES="100", DS_LAUNCH_TIMEOUT="6")  # beats are a fifth apart
    nodes = [launcher.start(*elastic(*flags), script) for _ in range(2)]
    said = {node.communicate(timeout=2 * TIMEOUT)[1]: node.returncode for node in nodes}
    assert sorted(said.values()) == [2, 7], said
    (failed,) = (text for text, code in said.items() if code == 7)
    (ended,) = (text for text, code in said.items() if code == 2)
    assert failed.endswith("ValueError: boom\n")
    assert "another node has ended the job" in ended and "cannot be reached" not in ended
    assert {len(path.read_text()) for path in launcher.folder.glob("starts*")} == {3}


def test_a_busy_default_port_is_replaced_and_a_named_one_refused(launcher: Commands) -> None:
    script = launcher.script(SHOW)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("", 29500))
        except OSError:
            pytest.skip("the default port is in use by another program")
        taken.listen()
        code, out, err = launcher.run("-q", script)
        assert code == 0, err
        assert shown(out)[0]["MASTER_PORT"] not in (None, "29500")
        code, _, err = launcher.run("-q", "--master_port", "29500", script)
    assert code == 2
    assert "--master_port=29500: the port is in use" in err


def test_logs_cores_and_pid_file(launcher: Commands) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("binding two ranks needs two cores")
    pid_file = 'os.path.join(os.environ["TMPDIR"], f"{os.getppid()}.ds")'
    script = launcher.script(f"{SHOW}print(open({pid_file}).read())\n")
    flags = ["--bind_cores_to_rank", "--bind_core_list", f"{cores[1]},{cores[0]}", "--save_pid"]
    flags += ["--num_gpus", "2", "--no_local_rank", "--enable_each_rank_log", "logs"]
    # Where the file lies is decided when the interpreter starts.
    process = launcher.start(*flags, script, is_forked=False)
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, err
    assert "[rank" not in out
    for rank in (0, 1):
        (log,) = (launcher.folder / "logs").glob(f"*_rank{rank}.log")
        first, second = log.read_text().split("\n")[:2]
        seen = json.loads(first)
        assert (seen["argv"], seen["cores"]) == ([], [cores[1 - rank]])
        assert seen["OMP_NUM_THREADS"] == "1"
        assert int(second) == process.pid
    assert not list(launcher.folder.glob("*.ds"))


def test_mistakes_of_users_are_told_without_a_traceback(launcher: Commands) -> None:
    code, _, err = launcher.run("--num_nodes", "2", "x.py")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("deepspeed: error: --num_nodes=2: only localhost is there")
    code, _, err = launcher.run("-q", "--no_python", "./no-such-command")
    assert code == 127
    assert "cannot run './no-such-command': No such file or directory" in err


def test_node_launcher_runs_a_module(launcher: Commands) -> None:
    launcher.script(SHOW, "shows.py")
    world = "eyJsb2NhbGhvc3QiOiBbMCwgMV19"
    flags = (f"--world_info={world}", "-q", "--module", "shows", "x")
    code, out, err = launcher.run(*flags, module="deepspeed.launcher.launch")
    assert code == 0, err
    assert {rank: seen["argv"] for rank, seen in shown(out).items()} == {
        rank: [f"--local_rank={rank}", "x"] for rank in (0, 1)
    }
