"""Names and numbers that the launcher's files share, and programs that call the launcher."""

import os
import tempfile

# The file of KEY=VALUE lines that a launch over several nodes exports to all of them, and where it
# is looked for.
DEEPSPEED_ENVIRONMENT_NAME: str = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
DEEPSPEED_ENVIRONMENT_PATHS: list[str] = [os.path.expanduser("~"), "."]

DLTS_HOSTFILE: str = "/job/hostfile"  # where the hostfile stands when --hostfile is not given

TORCH_DISTRIBUTED_DEFAULT_PORT: int = 29500
LOCAL_MASTER_ADDR: str = "127.0.0.1"
PID_FILE_BASEPATH: str = tempfile.gettempdir()

# Seconds of silence after which a node counts as lost, or its job to the node.
NODE_TIMEOUT_VARIABLE: str = "DS_LAUNCH_TIMEOUT"
# Seconds in which all nodes of a job must have reported.
START_TIMEOUT_VARIABLE: str = "DS_LAUNCH_START_TIMEOUT"
# Address, or several with commas between, at which the nodes reach the command's machine.
ADDRESS_VARIABLE: str = "DS_LAUNCH_ADDRESS"

SSH_LAUNCHER: str = "ssh"
PDSH_LAUNCHER: str = "pdsh"
OPENMPI_LAUNCHER: str = "openmpi"
MPICH_LAUNCHER: str = "mpich"
IMPI_LAUNCHER: str = "impi"
SLURM_LAUNCHER: str = "slurm"
MVAPICH_LAUNCHER: str = "mvapich"

EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "GLOO", "TORCH", "OMP", "DS_"]
"""Variables whose names begin so go to all nodes, and those that the accelerator adds. Programs
that start the launcher add their own to `runner.EXPORT_ENVS`, which is this list.
"""


def node_timeout() -> float:
    """Return the seconds that NODE_TIMEOUT_VARIABLE says."""
    return _seconds(NODE_TIMEOUT_VARIABLE, 30.0)


def start_timeout() -> float:
    """Return the seconds that START_TIMEOUT_VARIABLE says."""
    return _seconds(START_TIMEOUT_VARIABLE, 120.0)


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ValueError(f"{variable}={text}: give a positive number of seconds")
    return seconds
