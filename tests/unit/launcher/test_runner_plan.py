"""From flags and hostfiles to a launch plan: slots, refusals, commands; nothing is started."""

import os
import sys

import pytest

from deepspeed.launcher import launch, runner
from deepspeed.launcher import plan as plans
from deepspeed.launcher import resources as parsing


def plan(*flags: str) -> plans.LaunchPlan:
    """The plan of a launch on this machine; None of the flags may lead to other machines."""
    plans_made: list[plans.LaunchPlan] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run", lambda made: plans_made.append(made) or 0)
        runner.launch(runner.parse_args([*flags, "train.py", "--lr", "1"]))
    return plans_made[0]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "visible_slots", dict)
    monkeypatch.setattr(runner, "device_environment", lambda slots: {})


NUM_RANKS = {
    **{"": 1, "--num_gpus 3": 3, "--num_accelerators 2": 2, "--include localhost:0,3": 2},
    **{"--include localhost": 1, "--num_nodes 1 --num_gpus 2": 2, "--no_ssh --node_rank 0": 1},
}


@pytest.mark.parametrize("flags", NUM_RANKS)
def test_number_of_processes_on_cpu(flags: str) -> None:
    assert plan(*flags.split()).num_ranks == NUM_RANKS[flags]


def test_devices_are_the_default_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "visible_slots", lambda: {2: "2", 3: "3", 5: "5"})
    chosen: list[list[int]] = []
    monkeypatch.setattr(runner, "device_environment", lambda slots: chosen.append(slots) or {})
    plan()
    plan("--num_gpus", "2")
    plan("--exclude", "localhost:3")
    assert chosen == [[2, 3, 5], [2, 3], [2, 5]]
    with pytest.raises(ValueError, match="--num_gpus=4: only 3 slots"):
        plan("--num_gpus", "4")
    with pytest.raises(ValueError, match="No slot '0'"):
        plan("--include", "localhost:0")


class FakeAccelerator:
    """A device machine: what `devices` asks of an accelerator."""

    device_name = staticmethod(lambda: "cuda")
    device_count = staticmethod(lambda: 2)
    visible_devices_envs = staticmethod(lambda: ["CUDA_VISIBLE_DEVICES"])


@pytest.mark.parametrize(
    ("visible", "usable"),
    [
        (None, {0: "0", 1: "1"}),
        ("4,6", {4: "4", 6: "6"}),
        ("6,4", {6: "6", 4: "4"}),
        ("GPU-aa,GPU-bb", {0: "GPU-aa", 1: "GPU-bb"}),
    ],
)
def test_slots_follow_the_visibility_variable(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, usable: dict[int, str]
) -> None:
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", FakeAccelerator)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert parsing.visible_slots() == usable
    last = list(usable)[-1]
    assert parsing.device_environment([last]) == {"CUDA_VISIBLE_DEVICES": usable[last]}
    with pytest.raises(ValueError, match=r"\[9\] are not usable"):
        parsing.device_environment([9])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num_nodes 2", "--num_nodes=2: only localhost is there"),
        ("--num_nodes 0", "--num_nodes=0: give a positive number"),
        ("--elastic_training --max_elastic_nodes 2", "--max_elastic_nodes=2 needs --master_addr"),
        ("--elastic_training --min_elastic_nodes 0", "--min_elastic_nodes=0: give a positive"),
        ("--elastic_training --num_nodes 3:2", "3 is above .*2"),
        ("--min_elastic_nodes 1", "--min_elastic_nodes=1"),
        ("--max_elastic_nodes 1", "--max_elastic_nodes=1"),
        ("--autotuning run", "--autotuning=run: .*not part of this project"),
        ("--launcher slurm", "--launcher=slurm: .*--force_multi"),
        ("--launcher_args x", "--launcher_args=x: .*--force_multi"),
        ("--ssh_port 22", "--ssh_port=22: .*--force_multi"),
        ("--venv_script v", "--venv_script=v: .*--force_multi"),
        ("--node_rank 1", "--node_rank=1: this machine is the only node"),
        (
            "--launcher rsh --force_multi",
            "--launcher=rsh: there is no such engine; use one of pdsh, ssh",
        ),
        ("--no_ssh --num_nodes 2", "--node_rank=-1: --no_ssh needs"),
        ("--no_ssh --num_nodes 2 --node_rank 2", "--node_rank=2: --no_ssh needs"),
        ("--no_ssh --num_nodes 2 --node_rank 1", "--master_addr is missing"),
        (
            "--no_ssh --num_nodes 2 --node_rank 1 --ssh_port 22",
            "--ssh_port=22: --no_ssh uses no engine",
        ),
        ("--force_multi --node_rank 1", "--node_rank=1: the engine numbers the nodes"),
        ("--force_multi --launcher ssh --launcher_args 'x", "--launcher_args='x: .*quote it"),
        ("--hostfile /nonexistent/hosts", "--hostfile=/nonexistent/hosts: there is no such file"),
        ("--num_gpus 0", "--num_gpus=0"),
        ("--num_gpus 2 --include localhost:0", "include/exclude"),
        ("--include other:0", "Hostname 'other'"),
        ("--exclude localhost", "no slot is left"),
        ("--module --no_python", "--no_python.*--module"),
        ("--bind_core_list 0", "--bind_cores_to_rank"),
        ("--bind_cores_to_rank --bind_core_list 99999", r"cores \[99999\]"),
    ],
)
def test_refusals_name_the_flag(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(*flags.split())


@pytest.mark.parametrize("path", ["", os.devnull])
def test_a_hostfile_is_switched_off(path: str) -> None:
    # Kills: a file that is looked for by no name, and missed.
    assert resources(f"--hostfile={path}", "--num_gpus=2") == {"localhost": [0, 1]}


@pytest.mark.parametrize(
    "flags",
    [
        "--num_nodes 1 -i localhost",
        "--num_gpus 1 -e localhost",
        "-i localhost -e localhost",
        "--module --no_python",
    ],
)
def test_a_program_gets_an_error_for_options_that_exclude_each_other(flags: str) -> None:
    # Kills: a program that ends because of the arguments that it has made; a traceback for who has
    # typed them.
    with pytest.raises(ValueError, match=r"Cannot specify|mutually exclusive|Don't use both"):
        runner.main([*flags.split(), "train.py"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["deepspeed", *flags.split(), "train.py"])
        with pytest.raises(SystemExit) as ended:
            runner.main()
    assert ended.value.code == 2


def resources(*flags: str) -> dict[str, list[int]]:
    return runner.choose_resources(runner.parse_args([*flags, "train.py"]))


def test_hosts_and_slots_of_a_hostfile(tmp_path) -> None:
    path = tmp_path / "hosts"
    path.write_text("localhost slots=3\nother slots=2\n")
    hosts = ("--hostfile", str(path))
    assert plan(*hosts, "--include", "localhost").num_ranks == 3
    assert plan(*hosts, "--num_nodes", "1").num_ranks == 3
    assert resources(*hosts) == {"localhost": [0, 1, 2], "other": [0, 1]}
    one_each = resources(*hosts, "--num_nodes", "2", "--num_gpus", "1")
    assert one_each == {"localhost": [0], "other": [0]}
    some = resources(*hosts, "--include", "other@localhost:0,2")
    assert some == {"localhost": [0, 2], "other": [0, 1]}
    assert resources(*hosts, "--exclude", "localhost") == {"other": [0, 1]}
    with pytest.raises(ValueError, match="--num_gpus=3: only 2 slots are there on other"):
        resources(*hosts, "--num_gpus", "3")
    with pytest.raises(ValueError, match="--num_nodes=3: only localhost, other is there"):
        resources(*hosts, "--num_nodes", "3")


def test_nodes_like_this_one_need_no_hostfile_without_ssh() -> None:
    found = resources("--no_ssh", "--num_nodes", "2", "--num_gpus", "2")
    assert found == {"node-0": [0, 1], "node-1": [0, 1]}


def test_commands_and_the_port() -> None:
    python = [sys.executable, "-u", "train.py"]
    assert plan().rank_command(1) == [*python, "--local_rank=1", "--lr", "1"]
    assert plan("--no_local_rank").rank_command(1) == [*python, "--lr", "1"]
    assert plan("--module").rank_command(0)[:4] == [sys.executable, "-u", "-m", "train.py"]
    assert plan("--no_python").rank_command(0) == ["train.py", "--local_rank=0", "--lr", "1"]
    # The port is the user's only when it is given.
    assert plan().master_port is None
    assert plan("--master_port", "29500").master_port == 29500
    assert runner.parse_args(["train.py"]).master_port == 29500


def test_threads_are_shared_out_unless_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(plans, "num_available_cores", lambda: 8)
    assert plan("--num_gpus", "2").rank_environment(0)["OMP_NUM_THREADS"] == "4"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert plan("--num_gpus", "2").rank_environment(0)["OMP_NUM_THREADS"] == "3"


def test_world_info_round_trip() -> None:
    encoded = runner.encode_world_info({"localhost": [0, 1]})
    assert encoded == "eyJsb2NhbGhvc3QiOiBbMCwgMV19"
    assert launch.decode_world_info(encoded) == {"localhost": [0, 1]}
    with pytest.raises(ValueError, match="--world_info=zzz"):
        launch.decode_world_info("zzz")


def test_flags_are_frozen() -> None:
    """Scripts and other launchers pass these; removing one breaks them."""
    names = {name for name in vars(runner.parse_args(["x"])) if not name.endswith("_given")}
    assert names == set(
        "hostfile include exclude num_nodes min_elastic_nodes max_elastic_nodes num_gpus "
        "master_port master_addr node_rank launcher launcher_args module no_python no_local_rank "
        "no_ssh no_ssh_check force_multi save_pid enable_each_rank_log autotuning elastic_training "
        "bind_cores_to_rank bind_core_list ssh_port venv_script log_level quiet user_script "
        "user_args".split()
    )
    assert os.environ.get("DS_ENV_FILE", ".deepspeed_env") == runner.DEEPSPEED_ENVIRONMENT_NAME


HOSTS = {"a": [0, 1, 2], "b": [0, 1]}


KEPT = {
    ("", ""): HOSTS,
    ("a@b:1", ""): {"a": [0, 1, 2], "b": [1]},
    ("b:1@a:2,0", ""): {"a": [0, 2], "b": [1]},
    ("a:0,0", ""): {"a": [0]},
    ("", "a:0@b"): {"a": [1, 2]},
    ("", "a"): {"b": [0, 1]},
    ("", "a:0,1,2"): {"b": [0, 1]},
    ("a:1@a:0,1", ""): {"a": [0, 1]},
    ("a:1@a", ""): {"a": [0, 1, 2]},
    ("", "a:1@a:0"): {"a": [2], "b": [0, 1]},
}
REFUSED = {
    ("a", "b"): "mutually exclusive",
    ("c:1", ""): "Hostname 'c' not found",
    ("", "a:7"): "No slot '7' specified on host 'a'",
    ("a:0-1", ""): "bad node specification 'a:0-1'",
    ("a:", ""): "bad node specification 'a:'",
}


def test_filters_keep_what_upstream_keeps_and_name_mistakes() -> None:
    assert {filters: parsing.parse_resource_filter(HOSTS, *filters) for filters in KEPT} == KEPT
    for filters, message in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            parsing.parse_resource_filter(HOSTS, *filters)


def test_node_config() -> None:
    assert parsing.parse_node_config("a") == ("a", [])
    assert parsing.parse_node_config("a:0,2") == ("a", [0, 2])
    assert parsing.parse_node_config_list("a:0@b") == {"a": [0], "b": []}
    # Slot counts become lists.
    kept = parsing.parse_inclusion_exclusion({"a": 2, "b": 3}, "", "a:1")
    assert kept == {"a": [0], "b": [0, 1, 2]}


def test_num_nodes() -> None:
    assert parsing.parse_num_nodes("2", False) == (2, -1)
    assert parsing.parse_num_nodes("2:4", True) == (2, 4)
    with pytest.raises(RuntimeError, match="only supported in elastic training"):
        parsing.parse_num_nodes("2:4", False)
    with pytest.raises(RuntimeError, match="not in MIN:MAX format"):
        parsing.parse_num_nodes("1:2:3", True)


BAD_HOSTS = {
    "w0 slots=4\nw0 slots=2\n": "multiple entries for w0",
    "w0 4\n": "bad entry: 'w0 4'",
    "w0 slots=x\n": "bad entry",
    "w0 slots=4 max_slots=x\n": "bad entry",
    "w0 slots=4 max_slots=3\n": "more slots than max_slots: 'w0 slots=4 max_slots=3'",
    "# nothing\n": "empty or not formatted",
}


def test_hostfile(tmp_path) -> None:
    path = tmp_path / "hosts"
    path.write_text("w0 slots=4 # first\n\n# comment\nw1 slots=2\n")
    assert parsing.fetch_hostfile(str(path)) == {"w0": 4, "w1": 2}
    assert parsing.fetch_hostfile(str(tmp_path / "absent")) is None
    # Kills: a mark of the encoding in a host's name, Open MPI's form as a bad entry.
    path.write_text("\ufeffw0 slots=4 max_slots=4\nw1  slots=2 max-slots=8 # twice\n", "utf-8")
    assert parsing.fetch_hostfile(str(path)) == {"w0": 4, "w1": 2}
    for text, message in BAD_HOSTS.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            parsing.fetch_hostfile(str(path))


def test_core_lists() -> None:
    assert parsing.parse_core_list("1,3-5,7") == [1, 3, 4, 5, 7]
    assert parsing.split_cores([1, 3, 4, 5, 7], 2) == [[1, 3], [4, 5]]
    for bad in ("5-3", "a", "1,,2", "1,1-2"):
        with pytest.raises(ValueError, match="--bind_core_list"):
            parsing.parse_core_list(bad)
    with pytest.raises(ValueError, match="3 ranks cannot be bound to 2 cores"):
        parsing.split_cores([0, 1], 3)
