"""Each engine's command line, what it carries, what of the environment goes along."""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed.launcher import constants, launch_rank, multinode_runner, nodes, plan, runner
from deepspeed.launcher.multinode_runner import OpenMPIRunner, PDSHRunner, SlurmRunner, SSHRunner

HOSTS = {"alpha": [0, 1], "beta": [0, 1]}
AWKWARD = ["two words", "$HOME `id` ;'\"&|*", "%n %h 100%", ""]
RANK_RUNNERS: list[Any] = [OpenMPIRunner, multinode_runner.MPICHRunner, SlurmRunner]
RANK_RUNNERS += [multinode_runner.IMPIRunner, multinode_runner.MVAPICHRunner]


def made(kind: Any, *flags: str) -> Any:
    args = runner.parse_args([*flags, "train.py", *AWKWARD])
    args.coordinator = "COORDINATOR"
    return kind(args, "WORLD", HOSTS) if kind in RANK_RUNNERS else kind(args, "WORLD")


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multinode_runner, "find_program", lambda names, word: names[0])


def test_ssh_starts_one_command_per_host() -> None:
    flags = ["--ssh_port", "2222", "--launcher_args", "-F 'my config'"]
    built = made(SSHRunner, *flags, "--module", "--no_local_rank")
    built.add_export("NCCL_X", "a b;c")
    first, second = built.get_cmds({}, HOSTS)
    assert first[0] == "ssh" and "BatchMode=yes" in first and first[first.index("-p") + 1] == "2222"
    assert first[-4:-2] == ["-F", "my config"] and (first[-2], second[-2]) == ("alpha", "beta")
    # The remote shell gets one line and must make the same words of it.
    words = shlex.split(second[-1])
    assert words[:5] == ["export", "NCCL_X=a b;c;", "cd", os.getcwd(), "&&"]
    assert words[5:7] == ["exec", sys.executable] and words[-5:] == ["train.py", *AWKWARD]
    assert {"--node_rank=1", "--module", "--no_local_rank", "--coordinator=COORDINATOR"} <= {*words}
    # 29500 may be replaced unless it was asked for.
    assert not [word for word in words if word.startswith("--master_port")]
    with pytest.raises(ValueError, match="one command starts one host"):
        built.get_cmd({}, HOSTS)


def test_pdsh_starts_all_hosts_and_numbers_them() -> None:
    variables = {"PDSH_SSH_ARGS_APPEND": "-v"}
    built = made(PDSHRunner, "--ssh_port", "2222", "--master_port", "29500")
    command = built.get_cmd(variables, HOSTS)
    assert command[0] == "pdsh" and command[command.index("-w") + 1] == "alpha,beta"
    assert variables["PDSH_RCMD_TYPE"] == "ssh"
    assert variables["PDSH_SSH_ARGS_APPEND"].startswith("-v -o")
    assert variables["PDSH_SSH_ARGS_APPEND"].endswith("-p 2222")
    assert "--node_rank=%n" in command[-1] and "--master_port=29500" in command[-1]
    # Kills: a percent sign of the user that pdsh takes for its own.
    assert "%%n %%h 100%%" in command[-1]


@pytest.mark.parametrize("kind", RANK_RUNNERS)
def test_engines_that_start_each_rank(kind: Any) -> None:
    built = made(kind, "--launcher_args", "--extra 'x y'")
    built.add_export("NCCL_X", "a,b;c")
    variables: dict[str, str] = {}
    command = built.get_cmd(variables, HOSTS)
    assert built.rank_variables is not None
    assert command[command.index("-n") + 1] == "4"
    assert command[command.index("--extra") + 1] == "x y"
    assert f"--rank_variable={built.rank_variables[0]}" in command
    assert command[-5:] == ["train.py", *AWKWARD] and "deepspeed.launcher.launch_rank" in command
    # Values go by the environment: engines' lists hold no commas or semicolons.
    assert variables["NCCL_X"] == "a,b;c"


def test_engines_name_hosts_and_slots() -> None:
    assert "alpha:2,beta:2" in made(OpenMPIRunner).get_cmd({}, HOSTS)
    assert "alpha:2,beta:2" in made(multinode_runner.MPICHRunner).get_cmd({}, HOSTS)
    command = made(SlurmRunner).get_cmd({}, HOSTS)
    assert {"--nodelist=alpha,beta", "--ntasks-per-node=2", "--export=ALL"} <= set(command)
    variables: dict[str, str] = {}
    made(multinode_runner.MPICHRunner, "--ssh_port", "2222").get_cmd(variables, HOSTS)
    assert variables["HYDRA_LAUNCHER_EXTRA_ARGS"].endswith("-p 2222")
    command = made(OpenMPIRunner, "--ssh_port", "2222").get_cmd({}, HOSTS)
    assert any(word.endswith("-p 2222") for word in command)


@pytest.mark.parametrize("kind", [PDSHRunner, SSHRunner, *RANK_RUNNERS])
def test_a_program_may_ask_for_a_command_by_counts(kind: Any) -> None:
    # Kills: counts that have no length, an attribute that the `deepspeed` command alone sets.
    built = made(kind)
    listed = built.get_cmds({}, HOSTS)
    del built.args.coordinator
    told = [word for command in listed for word in command]
    assert any("--coordinator=COORDINATOR" in word for word in told)
    counted = [word for command in built.get_cmds({}, {"alpha": 2, "beta": 2}) for word in command]
    left_out = [word.replace("--coordinator=COORDINATOR ", "") for word in told]
    assert counted == [word for word in left_out if not word.startswith("--coordinator")]


def test_a_process_that_knows_no_meeting_place_says_so() -> None:
    # Kills: an AttributeError for a command that was made without a coordinator.
    with pytest.raises(ValueError, match="--coordinator is missing"):
        launch_rank.make_rank_plan(argparse.Namespace(coordinator=None))


def test_exports_are_quoted_for_the_shell() -> None:
    # Kills: a value of which the remote shell makes something else. Run for real.
    for kind in (PDSHRunner, SSHRunner):
        built = made(kind)
        values = {f"V{number}": value for number, value in enumerate(AWKWARD)}
        for key, value in values.items():
            built.add_export(key, value)
        line = built.get_cmds({}, {"alpha": 1})[0][-1]
        line = line if kind is SSHRunner else line.replace("%%", "%")
        exports = line[: line.index("cd ")]
        told = f"{exports}printenv {' '.join(values)}"
        assert subprocess.check_output(["sh", "-c", told], text=True).splitlines() == AWKWARD


def test_slurm_refuses_what_it_cannot_honour() -> None:
    with pytest.raises(ValueError, match="the same slots on each host"):
        made(SlurmRunner).get_cmd({}, {"alpha": [0, 1], "beta": [1]})
    with pytest.raises(ValueError, match="the same slots on each host"):
        made(SlurmRunner).get_cmd({}, {"alpha": 2, "beta": 1})
    with pytest.raises(ValueError, match="--ssh_port=22: Slurm starts processes without ssh"):
        made(SlurmRunner, "--ssh_port", "22").validate_args()


def test_a_missing_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PDSHRunner, "backend_exists", lambda self: False)
    args = runner.parse_args(["--launcher", "PDSH", "x.py"])
    args.coordinator = ""
    with pytest.raises(ValueError, match="--launcher=PDSH: its program is not installed"):
        multinode_runner.make_runner(args, "WORLD", HOSTS)


def test_a_venv_script_is_sourced_and_its_python_used(tmp_path: Path) -> None:
    # Run for real: quoting through two shells is not to be judged by eye.
    (tmp_path / "python").write_text('#!/bin/bash\nprintf "%s|" "$MARK" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    script = tmp_path / "my venv.sh"
    script.write_text(f'export MARK=sourced PATH="{tmp_path}:$PATH"\n')
    command = made(SSHRunner, "--venv_script", str(script)).get_cmds({}, HOSTS)[0]
    said = subprocess.check_output(["sh", "-c", command[-1]], text=True)
    assert said.startswith("sourced|-u|-m|deepspeed.launcher.launch|")
    assert said.endswith("|" + "|".join(AWKWARD) + "|")


def test_forwarded_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setattr(nodes.constants, "DEEPSPEED_ENVIRONMENT_PATHS", [str(home), "."])
    name = constants.DEEPSPEED_ENVIRONMENT_NAME
    (home / name).write_text("# a comment\nNCCL_A = from home\nMINE=x=y z\n\n")
    (tmp_path / name).write_text("MINE=the current folder wins\n")
    given = {"NCCL_A": "1", "NCCL_B": "2", "PYTHONPATH": "/lib", "UCX_X": "3", "DS_X": "4"}
    given.update(HOME="/root", OPAL_X="5")
    found = nodes.forwarded_environment(given, [*constants.EXPORT_ENVS, "OPAL"])
    assert found == {
        **{"NCCL_A": "from home", "NCCL_B": "2", "UCX_X": "3", "DS_X": "4", "OPAL_X": "5"},
        **{"MINE": "the current folder wins", "PYTHONPATH": f"{tmp_path}{os.pathsep}/lib"},
    }
    (tmp_path / name).write_text("export MINE=1\n")
    with pytest.raises(ValueError, match="bad line 'export MINE=1'; write KEY=VALUE"):
        nodes.forwarded_environment(given, [])


def test_places_of_nodes_and_ranks() -> None:
    world = {"a": [0, 1, 2], "b": [5]}
    second = plan.place_of_node(world, 1, "COORDINATOR")
    assert (second.first_rank, second.world_size, second.member) == (3, 4, 1)
    assert (second.local_size, second.local_rank) == (1, 0)
    third = plan.place_of_rank(world, 2, "COORDINATOR")
    assert (third.node_rank, third.first_rank, third.member) == (0, 2, 2)
    assert (third.local_rank, third.local_size) == (2, 3)
    last = plan.place_of_rank(world, 3, "COORDINATOR")
    assert (last.node_rank, last.local_rank, last.local_size) == (1, 0, 1)
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match=f"rank {wrong} is not in"):
            plan.place_of_rank(world, wrong, "COORDINATOR")
    with pytest.raises(ValueError, match="--node_rank=2: the job has 2 nodes"):
        plan.place_of_node(world, 2, "COORDINATOR")


def test_variables_of_a_rank_in_a_larger_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    place = plan.place_of_node({"a": [0, 1, 2], "b": [5]}, 1, "COORDINATOR")
    where = {"master_addr": "10.0.0.1", "master_port": 29501, "place": place}
    variables = plan.LaunchPlan(["x"], 1, **where).rank_environment(0)
    assert variables["OMP_NUM_THREADS"] == str(plan.num_available_cores())
    expected = {
        **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        **{"CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_SIZE": "1", "GROUP_RANK": "1"},
        **{"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"},
    }
    assert {name: variables[name] for name in expected} == expected
    # Kills: a rank that looks for the job's store at its own node's agent.
    assert variables["TORCHELASTIC_USE_AGENT_STORE"] == "False"
