"""A pytest plugin that stands in for upstream's test harness, which source distributions lack:
``unit.common`` is this project's, with upstream's names.
"""

from __future__ import annotations

import importlib

from unit.common import (  # noqa: F401  # pytest looks for its hooks by name
    pytest_collection_finish,
    pytest_configure,
    pytest_pyfunc_call,
    pytest_sessionfinish,
)

# Upstream compiles an op for the ranks of one host when a process group is made on the CPU, and
# trains without it where it cannot be compiled. The module is asked for by name: an attribute of
# the same name is torch.
vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
