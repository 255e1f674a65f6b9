"""Name of the nebula block, for scripts that write ``ds_config[NEBULA]``."""

from __future__ import annotations

NEBULA = "nebula"
NEBULA_ENABLED = "enabled"
NEBULA_ENABLED_DEFAULT = False
