"""The engines that start a job's launchers on several nodes: one class each, with upstream's names.

They build command lines and start nothing. On the nodes run `launch`, one per node, under pdsh and
ssh; `launch_rank`, one per process, under MPI and Slurm, whose processes must be theirs.
"""

import abc
import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from deepspeed.launcher import constants

PDSH_MAX_FAN_OUT = 1024
# ssh and Open MPI's daemons ask an idle peer this often, three times, before they count it as gone.
KEEPALIVE_SECONDS = 10
SSH_OPTIONS = (
    # A question for a password would wait for ever: the command has no terminal.
    *("-o", "BatchMode=yes"),
    *("-o", f"ServerAliveInterval={KEEPALIVE_SECONDS}"),
    *("-o", "ServerAliveCountMax=3"),
)
Pool = Mapping[str, int | Sequence[int]]
"""Slots by host, or how many of them, which are the first ones."""


class MultiNodeRunner(abc.ABC):
    """Builds the command that starts a job's launchers over one engine."""

    name: str  # the engine's name, as --launcher takes it
    programs: tuple[str, ...]
    version_word = ""
    # Variables in which the engine tells a process its rank and local rank; None where it starts
    # one launcher per node.
    rank_variables: tuple[str, str] | None = None
    # Name of the engine's process on a node that a launcher has to end when its job is lost; None
    # ends by itself.
    daemon: str | None = None

    def __init__(
        self, args: argparse.Namespace, world_info_base64: str, resource_pool: Pool | None = None
    ) -> None:
        self.args = args
        self.world_info_base64 = world_info_base64
        self.resource_pool = resource_pool
        self.user_arguments = self.parse_user_args()
        self.user_script = args.user_script
        self.exports: dict[str, str] = {}

    def backend_exists(self) -> bool:
        """Say whether the engine's program is there."""
        return self.find_program() is not None

    def find_program(self) -> str | None:
        """Return the first of the programs whose version names the word: several are mpirun."""
        return find_program(self.programs, self.version_word)

    @abc.abstractmethod
    def get_cmd(self, environment: dict[str, str], active_resources: Pool) -> list[str]:
        """Return the command that starts the job."""

    def get_cmds(self, environment: dict[str, str], active_resources: Pool) -> list[list[str]]:
        """Return the commands that start the job: one, or one per host in their order."""
        return [self.get_cmd(environment, active_resources)]

    def add_export(self, key: str, var: str) -> None:
        """Set a variable for all processes of the job."""
        self.exports[key.strip()] = var.strip()

    def parse_user_args(self) -> list[str]:
        """Return the arguments of the user's script."""
        return list(self.args.user_args)

    def validate_args(self) -> None:
        """Refuse flags that this engine cannot honour."""
        try:
            self.launcher_args()
        except ValueError as error:
            text = f"--launcher_args={self.args.launcher_args}: {error}; quote it as for a shell"
            raise ValueError(text) from error

    def launcher_command(self, node_rank: str | None) -> list[str]:
        """Return the command of the launcher of node `node_rank`, or of one process for None."""
        args = self.args
        module = "deepspeed.launcher.launch" + ("_rank" if self.rank_variables else "")
        command = [*self._python(), "-u", "-m", module, f"--world_info={self.world_info_base64}"]
        # A program that only asks for the command has none.
        coordinator = getattr(args, "coordinator", None)
        if coordinator is not None:
            command.append(f"--coordinator={coordinator}")
        if self.rank_variables:
            rank, local_rank = self.rank_variables
            command += [f"--rank_variable={rank}", f"--local_rank_variable={local_rank}"]
        else:
            command.append(f"--node_rank={node_rank}")
        if self.daemon:
            command.append(f"--daemon={self.daemon}")
        if args.master_port_given:
            command.append(f"--master_port={args.master_port}")
        flags = ("module", "no_python", "no_local_rank", "bind_cores_to_rank")
        command += [f"--{flag}" for flag in flags if getattr(args, flag)]
        for flag in ("bind_core_list", "enable_each_rank_log"):
            if getattr(args, flag):
                command.append(f"--{flag}={getattr(args, flag)}")
        command.append(f"--log_level={'error' if args.quiet else args.log_level}")
        return [*command, self.user_script, *self.user_arguments]

    def _python(self) -> list[str]:
        """Return the interpreter; with --venv_script the one that the script puts into PATH."""
        if not self.args.venv_script:
            return [sys.executable]
        return ["bash", "-c", 'source "$0" && exec python "$@"', self.args.venv_script]

    def launcher_args(self) -> list[str]:
        """Return the words of --launcher_args."""
        return shlex.split(self.args.launcher_args)


class PDSHRunner(MultiNodeRunner):
    """pdsh over ssh: one command for all hosts."""

    name = constants.PDSH_LAUNCHER
    programs = ("pdsh",)

    def get_cmd(self, environment: dict[str, str], active_resources: Pool) -> list[str]:
        environment["PDSH_RCMD_TYPE"] = "ssh"
        ssh = ssh_command(self.args.ssh_port)[1:]
        given = environment.get("PDSH_SSH_ARGS_APPEND", "")
        environment["PDSH_SSH_ARGS_APPEND"] = " ".join([given, *ssh]).strip()
        # pdsh replaces %h, %u and %n in the command: the last is the host's position in the list,
        # the others are the user's.
        node, mark = "%n", "\0"
        remote = shell_line(self.launcher_command(mark), self.exports)
        remote = remote.replace("%", "%%").replace(mark, node)
        # -N: no host before each line, which names its rank; -S: the highest exit code of all.
        hosts = ",".join(active_resources)
        pdsh = f"pdsh -S -N -f {PDSH_MAX_FAN_OUT}".split()
        return [*pdsh, *self.launcher_args(), "-w", hosts, remote]


class SSHRunner(MultiNodeRunner):
    """Plain ssh: one command per host."""

    name = constants.SSH_LAUNCHER
    programs = ("ssh",)

    def get_cmd(self, environment: dict[str, str], active_resources: Pool) -> list[str]:
        if len(active_resources) != 1:
            text = f"one command starts one host, not {len(active_resources)}; use get_cmds"
            raise ValueError(f"--launcher={self.name}: {text}")
        return self.get_cmds(environment, active_resources)[0]

    def get_cmds(self, environment: dict[str, str], active_resources: Pool) -> list[list[str]]:
        hosts = enumerate(active_resources)
        return [self._host_command(host, node_rank) for node_rank, host in hosts]

    def _host_command(self, host: str, node_rank: int) -> list[str]:
        remote = shell_line(self.launcher_command(str(node_rank)), self.exports)
        return [*ssh_command(self.args.ssh_port), *self.launcher_args(), host, remote]


class OpenMPIRunner(MultiNodeRunner):
    """Open MPI's mpirun."""

    rank_variables = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    daemon = "orted"

    name = constants.OPENMPI_LAUNCHER
    programs = ("mpirun.openmpi", "mpirun", "mpiexec")
    version_word = "Open MPI"

    def get_cmd(self, environment: dict[str, str], active_resources: Pool) -> list[str]:
        program = self.find_program() or "mpirun"
        agent = shlex.join(["ssh", *ssh_command(self.args.ssh_port)[1:]])
        settings = {
            "plm_rsh_agent": agent,
            # By default its daemons take more than five minutes to miss an idle peer.
            "oob_tcp_keepalive_time": str(KEEPALIVE_SECONDS),
            "oob_tcp_keepalive_intvl": str(KEEPALIVE_SECONDS),
            "oob_tcp_keepalive_probes": "2",
            # Its words about the first failure would stand behind this project's.
            "orte_abort_print_stack": "0",
        }
        hosts = spread(active_resources)
        command = [program, "-n", str(total(active_resources)), "--host", hosts]
        command += "--map-by slot --bind-to none --quiet".split()
        for key, value in settings.items():
            command += ["--mca", key, value]
        environment.update(self.exports)
        for key in self.exports:
            command += ["-x", key]
        return [*command, *self.launcher_args(), *self.launcher_command(None)]


class MPICHRunner(MultiNodeRunner):
    """MPICH's hydra."""

    name = constants.MPICH_LAUNCHER
    rank_variables = ("PMI_RANK", "MPI_LOCALRANKID")
    programs: tuple[str, ...] = ("mpirun.mpich", "mpiexec.hydra", "mpirun", "mpiexec")
    version_word = "HYDRA"

    def get_cmd(self, environment: dict[str, str], active_resources: Pool) -> list[str]:
        program = self.find_program() or "mpirun"
        # hydra hands on the environment of its own process, whatever the values hold.
        environment.update(self.exports)
        given = environment.get("HYDRA_LAUNCHER_EXTRA_ARGS", "")
        extra = [given, *ssh_command(self.args.ssh_port)[1:]]
        environment["HYDRA_LAUNCHER_EXTRA_ARGS"] = " ".join(extra).strip()
        hosts = spread(active_resources)
        command = [program, "-n", str(total(active_resources)), "-hosts", hosts]
        return [*command, *self.launcher_args(), *self.launcher_command(None)]


class IMPIRunner(MPICHRunner):
    """Intel MPI, whose starter is a hydra too."""

    name = constants.IMPI_LAUNCHER
    programs = ("mpiexec.hydra", "mpirun", "mpiexec")
    version_word = "Intel(R) MPI"


class MVAPICHRunner(MPICHRunner):
    """MVAPICH's hydra, told from MPICH's by the program `mpiname` beside it."""

    name = constants.MVAPICH_LAUNCHER
    programs = ("mpiexec.hydra", "mpirun", "mpiexec")

    def backend_exists(self) -> bool:
        return find_program(("mpiname",), "MVAPICH") is not None and super().backend_exists()


class SlurmRunner(MultiNodeRunner):
    """Slurm's srun, inside an allocation or making one."""

    name = constants.SLURM_LAUNCHER
    rank_variables = ("SLURM_PROCID", "SLURM_LOCALID")
    programs = ("srun",)

    def validate_args(self) -> None:
        super().validate_args()
        if self.args.ssh_port is not None:
            text = "Slurm starts processes without ssh; leave the flag out"
            raise ValueError(f"--ssh_port={self.args.ssh_port}: {text}")

    def get_cmd(self, environment: dict[str, str], active_resources: Pool) -> list[str]:
        slots = {tuple(numbers(of_host)) for of_host in active_resources.values()}
        if len(slots) != 1:
            raise ValueError(
                "--launcher=slurm needs the same slots on each host, not "
                f"{dict(active_resources)}: Slurm orders the hosts itself; change --include, "
                "--exclude or the hostfile"
            )
        # srun hands on the environment of its own process; a list on the command line could hold no
        # commas in values.
        environment.update(self.exports)
        tasks = ["-n", str(total(active_resources)), "-N", str(len(active_resources))]
        tasks.append(f"--ntasks-per-node={len(slots.pop())}")
        # Blocks: ranks fill a node before the next one. No kill by srun: the launchers stop
        # together, by themselves.
        layout = "--distribution=block:block --kill-on-bad-exit=0 --export=ALL".split()
        layout.append(f"--nodelist={','.join(active_resources)}")
        return ["srun", *tasks, *layout, *self.launcher_args(), *self.launcher_command(None)]


_KINDS = (PDSHRunner, SSHRunner, OpenMPIRunner, MPICHRunner, IMPIRunner, MVAPICHRunner, SlurmRunner)
RUNNERS: dict[str, type[MultiNodeRunner]] = {kind.name: kind for kind in _KINDS}


def make_runner(
    args: argparse.Namespace, world_info_base64: str, resource_pool: Pool
) -> MultiNodeRunner:
    """Return the runner of --launcher."""
    kind = RUNNERS.get(args.launcher.lower())
    if kind is None:
        names = ", ".join(RUNNERS)
        raise ValueError(f"--launcher={args.launcher}: there is no such engine; use one of {names}")
    runner = kind(args, world_info_base64, resource_pool)
    runner.validate_args()
    if not runner.backend_exists():
        text = "its program is not installed here; install it or use another --launcher"
        raise ValueError(f"--launcher={args.launcher}: {text}")
    return runner


def numbers(slots: int | Sequence[int]) -> Sequence[int]:
    """Return the numbers of a host's slots, of which there may be a count alone."""
    return range(slots) if isinstance(slots, int) else slots


def total(active_resources: Pool) -> int:
    """Return the number of processes of the job."""
    return sum(len(numbers(slots)) for slots in active_resources.values())


def spread(active_resources: Pool) -> str:
    """Return the hosts with their numbers of processes, as MPI's starters read them."""
    return ",".join(f"{host}:{len(numbers(slots))}" for host, slots in active_resources.items())


def ssh_command(port: int | None) -> list[str]:
    """Return ssh with this project's options, without host and command."""
    return ["ssh", *SSH_OPTIONS, *(["-p", str(port)] if port is not None else [])]


def shell_line(command: Sequence[str], exports: Mapping[str, str]) -> str:
    """Return a shell's line that sets variables, goes to this folder and becomes the command."""
    variables = "".join(f"export {key}={shlex.quote(value)}; " for key, value in exports.items())
    return f"{variables}cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"


def find_program(names: Sequence[str], version_word: str) -> str | None:
    """Return the first of the programs that is there and says `version_word` of itself."""
    for name in names:
        path = shutil.which(name)
        if path is None:
            continue
        if not version_word:
            return path
        command = [path, "--version"]
        said = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if version_word in said.stdout + said.stderr:
            return path
    return None
