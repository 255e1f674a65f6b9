"""Runs the programs of the pages of docs/clients, as they stand there, one after the other. Run by
test_pages.py.

Each has a process of its own, forked from one that has imported what they all import.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import runpy
import sys
import time
import traceback
from pathlib import Path

from deepspeed.launcher.plan import free_port

DOCS = Path(__file__).resolve().parents[3] / "docs" / "clients"
SHARED = ("accelerate", "transformers.trainer", "transformers.models.llama", "deepspeed")


def program(page: str) -> str:
    """The first block of Python of a page."""
    found = re.search(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    assert found is not None, page
    return found[1]


def port_of(folder: Path) -> str:
    """A port for the program in ``folder``, the same on all ranks. Rank 0 looks for one just before
    it is used: until then others may take it.
    """
    told, made = folder / "port", folder / "port.new"
    if os.environ["RANK"] == "0":
        made.write_text(str(free_port()))
        made.rename(told)
    while not told.exists():
        time.sleep(0.01)
    return told.read_text()


def run(folder: Path) -> int:
    """Run ``train.py`` of ``folder``, where ``log0`` will hold what rank 0 printed, with a
    rendezvous of its own: at the launcher's, ranks would meet those of the program before. Returns
    its exit status.
    """
    port = port_of(folder)
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        os.chdir(folder)
        os.environ.update(MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="False")
        log = os.open(f"log{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        sys.argv = ["train.py"]
        runpy.run_path("train.py", run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Run the pages asked for; rank 0 writes the losses that each program printed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("pages", nargs="+")
    parser.add_argument("--local_rank", type=int, help="the launcher gives it")
    arguments = parser.parse_args()
    for module in SHARED:
        importlib.import_module(module)
    losses = {}
    for page in arguments.pages:
        if run(arguments.out / page):
            sys.exit(f"the program of {page} failed")
        log = (arguments.out / page / f"log{os.environ['RANK']}").read_text()
        losses[page] = [float(loss) for loss in re.findall(r"\bloss'?:? '?([\d.]+)", log)]
    if os.environ["RANK"] == "0":
        (arguments.out / "result.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
