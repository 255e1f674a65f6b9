"""Name of the profiler's block, for scripts that write ``ds_config[FLOPS_PROFILER]``."""

from __future__ import annotations

FLOPS_PROFILER = "flops_profiler"
FLOPS_PROFILER_ENABLED = "enabled"
FLOPS_PROFILER_ENABLED_DEFAULT = False
