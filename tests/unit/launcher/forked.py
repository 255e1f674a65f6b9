"""Starts Python programs forked from this process, which has torch: a tenth of a start's time."""

import atexit
import importlib
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from deepspeed.launcher import agent  # noqa: F401 to have it, and torch, imported
from deepspeed.launcher.job import rendezvous  # noqa: F401 likewise
from deepspeed.launcher.signals import die_at_once


def start(command: Sequence[str], env: dict[str, str], **how: Any) -> subprocess.Popen[Any]:
    """As `subprocess.Popen`, of Python with a script, or with `-m` and a module's `main`."""

    def run() -> None:
        code: Any = 1
        try:
            # Popen takes it for the start of the program that its own end of a pipe is closed. The
            # numbers stay taken: objects of the parent's close theirs when they are collected here.
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in map(int, os.listdir("/dev/fd")):
                if number > 2 and number != nothing:
                    os.dup2(nothing, number, inheritable=False)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(env)
            sys.argv[:] = command[2 if command[1] == "-m" else 1 :]
            tempfile.tempdir = None
            torch.set_num_threads(1)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)
            logging.root.handlers.clear()
            for logger in logging.root.manager.loggerDict.values():
                for handler in getattr(logger, "handlers", ()):
                    if type(handler) is logging.StreamHandler:
                        handler.setStream(sys.stderr)
            atexit._clear()
            if command[1] == "-m":
                die_at_once()
                importlib.import_module(sys.argv[0]).main()
            else:
                sys.path.insert(0, str(Path(sys.argv[0]).parent))
                runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code or 0
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
        except BaseException:
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    return subprocess.Popen(command, env=env, preexec_fn=run, **how)


replacement = SimpleNamespace(**{**vars(subprocess), "Popen": start})
"""For modules that say `subprocess.Popen`."""
