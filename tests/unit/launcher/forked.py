"""The `deepspeed` command in a process forked from this one, which has torch imported: a tenth of a
start's time. What a signal does until then is for tests that really start it.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from typing import Any

from deepspeed.launcher import agent, restarts  # noqa: F401 to have them, and torch, imported
from deepspeed.launcher.signals import die_at_once


def start(
    *args: str, env: dict[str, str], module: str = "deepspeed.launcher.runner", **how: Any
) -> subprocess.Popen[Any]:
    """As `subprocess.Popen([sys.executable, "-m", module, *args], env=env, **how)`."""
    command = [sys.executable, "-m", module, *args]

    def run() -> None:
        code: Any = 1
        try:
            # Popen takes it for the start of the program that its own end of a pipe is closed.
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(env)
            sys.argv[:] = command[2:]
            sys.path.insert(0, "")
            tempfile.tempdir = None
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)
            logging.root.handlers.clear()
            for logger in logging.root.manager.loggerDict.values():
                for handler in getattr(logger, "handlers", ()):
                    if type(handler) is logging.StreamHandler:
                        handler.setStream(sys.stderr)
            atexit._clear()
            die_at_once()
            importlib.import_module(module).main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    return subprocess.Popen(command, env=env, preexec_fn=run, **how)
