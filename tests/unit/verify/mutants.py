"""Runs a scenario on ranks whose imported package gets the code of a changed file: a fault."""

import importlib
import json
import linecache
import os
import tempfile
import traceback
from collections.abc import Iterator
from inspect import CO_OPTIMIZED, unwrap
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import deepspeed
from unit.common import RANK_ENV, server
from unit.mutation.table import REPOSITORY
from unit.mutation.table.fault import Fault
from unit.rank_server import Job

LIMIT_S = 60.0


def findings(scenario: str, world: int, fault: Fault | None = None) -> list[str]:
    """What the guards of `scenario` found, over all ranks; nothing if all were silent."""
    changed = {} if fault is None else fault.apply(REPOSITORY)
    with tempfile.TemporaryDirectory() as folder:
        env = {**RANK_ENV, "WORLD_SIZE": str(world)}
        call = (folder, scenario, changed)
        results = server.run(Job((__name__, "run_on_rank"), call, world, LIMIT_S, env))
        said = []
        for result in results:
            answer = Path(folder, str(result.rank))
            found = [f"HANG or crash\n{result.text}\n{result.output[-3000:]}{result.stacks}"]
            if answer.exists():
                found = json.loads(answer.read_text())
            said += [f"rank {result.rank}: {finding}" for finding in found]
        return said


def run_on_rank(rank: int, payload: tuple[str, str, dict[str, tuple[str, str]]]) -> None:
    """One rank's part; leaves what it found in the folder."""
    folder, scenario, changed = payload
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        from unit.verify.scenarios import run

        for file, texts in changed.items():
            _put_in(file, *texts)
        # By a file: a rank that asks for rank 0's port before it is open waits for half a second.
        deepspeed.init_distributed("gloo", init_method=f"file://{folder}/store", verbose=False)
        found = run(scenario)
    except BaseException as error:
        traceback.print_exc()
        found = [f"{type(error).__name__}: {error}"]
    Path(folder, str(rank)).write_text(json.dumps(found))


def _put_in(file: str, before: str, after: str) -> None:
    module: Any = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    path = module.__file__
    codes = [_codes(compile(text, path, "exec", dont_inherit=True)) for text in (before, after)]
    pairs = zip(*codes, strict=True)
    changed = {(old.co_name, old.co_firstlineno): new for old, new in pairs}
    for function in set(_functions(module, module.__name__, path)):
        function.__code__ = changed[function.__code__.co_name, function.__code__.co_firstlineno]
    lines = after.splitlines(keepends=True)
    linecache.cache[path] = (len(after), None, lines, path)  # what tracebacks show


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Of the functions of a module and its classes, not of functions within functions."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from [inner] if inner.co_flags & CO_OPTIMIZED else _codes(inner)


def _functions(holder: Any, module: str, path: str) -> Iterator[FunctionType]:
    """Of a module or one of its classes, those that are written in its file."""
    for value in vars(holder).values():
        if isinstance(value, type) and value.__module__ == module:
            yield from _functions(value, module, path)
        for part in (value, *(getattr(value, name, None) for name in ("fget", "fset", "func"))):
            function = unwrap(part)
            if isinstance(function, FunctionType) and function.__code__.co_filename == path:
                yield function
