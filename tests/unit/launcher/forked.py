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
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from deepspeed.launcher import agent  # noqa: F401 to have it, and torch, imported
from deepspeed.launcher.job import rendezvous  # noqa: F401 likewise
from deepspeed.launcher.signals import die_at_once


def start(command: Sequence[str], env: dict[str, str], **how: Any) -> subprocess.Popen[Any]:
    """As `subprocess.Popen`, of Python with a script, or with `-m` and a module's `main`."""

    def run() -> None:
        if "-m" not in command and cannot_train():
            return  # and let Popen start the program
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
            tempfile.tempdir = None
            torch.set_num_threads(1)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)
            logging.root.handlers.clear()
            for logger in logging.root.manager.loggerDict.values():
                for handler in getattr(logger, "handlers", ()):
                    if type(handler) is logging.StreamHandler:
                        handler.setStream(sys.stderr)
            atexit._clear()
            run_python(command)
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


def cannot_train() -> bool:
    """Whether autograd has started threads in the parent, after which no fork can use it: where
    torch knows a device, real or registered by a test.
    """
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError:
        return True
    return False


def run_python(command: Sequence[str]) -> None:
    """Do what an interpreter of this command line would; options but `-m` are the interpreter's."""
    words = [*command[1:]]
    while words[0].startswith("-") and words[0] != "-m":
        words.pop(0)
    is_module = words[0] == "-m"
    sys.argv[:] = words[is_module:]
    if is_module:
        die_at_once()
        sys.exit(importlib.import_module(sys.argv[0]).main())
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


def fork_ranks() -> None:
    """From here on, ranks that torch's agent starts in this process are forked from it, whether
    they are a script or become it by `exec`, as those of our launcher do.
    """
    execute = os.execvpe

    def become(file: str, command: Sequence[str], env: dict[str, str]) -> None:
        if file != sys.executable:
            execute(file, command, env)
        os.environ.clear()
        os.environ.update(env)
        run_python(command)
        sys.exit()

    os.execvpe = become
    subprocess_handler.Popen = lambda args, env, **how: start(args, env, **how)


def run(
    command: Sequence[str], capture_output: bool, check: bool, **how: Any
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`, for callers that read both outputs and look at the exit code."""
    assert capture_output and not check
    with start(command, **how, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        said = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, *said)


replacement = SimpleNamespace(**{**vars(subprocess), "Popen": start, "run": run})
"""For modules that say `subprocess.Popen` or `subprocess.run`."""
