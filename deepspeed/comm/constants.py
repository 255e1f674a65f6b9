"""Names and defaults of the communication layer: backends, configuration keys, timeouts, ports."""

import os
from datetime import timedelta

NCCL_BACKEND = "nccl"
CCL_BACKEND = "ccl"
MPI_BACKEND = "mpi"
GLOO_BACKEND = "gloo"
SCCL_BACKEND = "sccl"
HCCL_BACKEND = "hccl"

DEFAULT_AML_MASTER_PORT = "54965"
DEFAULT_AML_NCCL_SOCKET_IFNAME = "^docker0,lo"
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500

COMMS_LOGGER_FORMAT = """
The Comms Logger can be specified as:
"comms_logger": {
  "enabled": true,
  "verbose": false,
  "prof_all": true,
  "debug": false,
  "prof_ops": ["all_reduce", "custom_all_reduce_name"]
}
"""
COMMS_LOGGER = "comms_logger"
COMMS_LOGGER_ENABLED = "enabled"
COMMS_LOGGER_ENABLED_DEFAULT = False
COMMS_LOGGER_VERBOSE = "verbose"
COMMS_LOGGER_VERBOSE_DEFAULT = False
COMMS_LOGGER_PROF_ALL = "prof_all"
COMMS_LOGGER_PROF_ALL_DEFAULT = True
COMMS_LOGGER_DEBUG = "debug"
COMMS_LOGGER_DEBUG_DEFAULT = False
COMMS_LOGGER_PROF_OPS = "prof_ops"
COMMS_LOGGER_PROF_OPS_DEFAULT: list[str] = []

TIMEOUT_ENV = "DEEPSPEED_TIMEOUT"
DEFAULT_TIMEOUT_MINUTES = 10


def _default_timeout() -> timedelta:
    text = os.environ.get(TIMEOUT_ENV, str(DEFAULT_TIMEOUT_MINUTES))
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if minutes <= 0:
        raise ValueError(
            f"{TIMEOUT_ENV}={text!r} is not a positive number of minutes; correct it or unset it"
        )
    return timedelta(minutes=minutes)


# How long a collective may take before it fails, unless `init_distributed` is told otherwise.
default_pg_timeout = _default_timeout()
