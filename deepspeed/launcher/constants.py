"""Names and numbers that the launcher's files share with each other and with programs that call the launcher."""

import os
import tempfile

DEEPSPEED_ENVIRONMENT_NAME: str = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
"""File of KEY=VALUE lines that a launch over several nodes exports to all of them."""

DEEPSPEED_ENVIRONMENT_PATHS: list[str] = [os.path.expanduser("~"), "."]
"""Folders in which that file is looked for."""

DLTS_HOSTFILE: str = "/job/hostfile"
"""Where the hostfile stands when --hostfile is not given."""

TORCH_DISTRIBUTED_DEFAULT_PORT: int = 29500
LOCAL_MASTER_ADDR: str = "127.0.0.1"
PID_FILE_BASEPATH: str = tempfile.gettempdir()

PDSH_LAUNCHER: str = "pdsh"
OPENMPI_LAUNCHER: str = "openmpi"
MPICH_LAUNCHER: str = "mpich"
IMPI_LAUNCHER: str = "impi"
SLURM_LAUNCHER: str = "slurm"
MVAPICH_LAUNCHER: str = "mvapich"
