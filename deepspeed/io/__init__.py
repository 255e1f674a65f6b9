"""Writers of files: not in this release; importing it says what to use."""

from deepspeed._absent import reason

raise ImportError(reason("deepspeed", "io"))
