"""`python -m unit.clients.matrix [CLIENT ...]` runs clients' scenarios and prints how they end."""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from unit.clients.launching import LAUNCHERS, environment
from unit.clients.matrix.row import DONE, STARTED
from unit.common import get_master_port

# Client: the packages that its scenarios import.
OF_TRAINER = ("accelerate", "transformers")
CLIENTS = {
    **dict.fromkeys(OF_TRAINER, OF_TRAINER),
    **dict.fromkeys(("lightning", "fabric"), ("lightning",)),
    "peft": (*OF_TRAINER, "peft"),
    "trl": (*OF_TRAINER, "trl", "peft"),
    "shipped": (*OF_TRAINER, "trl", "peft", "evaluate"),
}
START_S, ROW_S = 60.0, 90.0


def module(client: str) -> list[str]:
    """The program that runs scenarios of ``client`` on a rank."""
    return ["--module", f"unit.clients.matrix.{client}_rows"]


def names_of(client: str) -> list[str]:
    """Its scenarios, as NAME@STAGE."""
    command = [sys.executable, "-m", module(client)[1]]
    listed = subprocess.check_output(command, env=environment(), text=True)
    return [line for line in listed.splitlines() if "@" in line]


def attempt(client: str, rows: Sequence[str], out: Path) -> tuple[list[str], str]:
    """Run ``rows`` on new ranks until one fails; returns those that passed, and what it said."""
    out.mkdir(parents=True)
    port = get_master_port()
    before = [word.format(processes=2, port=port) for word in LAUNCHERS["deepspeed"]]
    words = [sys.executable, *before, *module(client), "--out", str(out), *rows]
    log = out / "log"
    with log.open("wb") as file:
        pipes = {"stdout": file, "stderr": subprocess.STDOUT}
        began = subprocess.Popen(words, cwd=out, env=environment(), **pipes)
        try:
            code = began.wait(timeout=START_S + ROW_S * len(rows))
        except subprocess.TimeoutExpired:
            began.terminate()
            began.wait()
            code = -1
    done = (out / DONE).read_text().split() if (out / DONE).exists() else []
    return done, "" if code == 0 else log.read_text(errors="replace")[-6000:] + f"\nexit {code}"


def run(client: str, rows: Sequence[str], out: Path) -> list[str]:
    """Run and print ``rows``; returns those that failed."""
    left, failed, attempts = list(rows), [], 0
    while left:
        attempts += 1
        folder = out / f"{client}-{attempts}"
        began = time.monotonic()
        done, said = attempt(client, left, folder)
        for word in done:
            print(f"{client:13} {word:40} PASS", flush=True)
        left = [word for word in left if word not in done]
        if said:
            started = (folder / STARTED).read_text().split() if (folder / STARTED).exists() else []
            bad = next((word for word in started if word not in done), left[0] if left else "end")
            print(f"{client:13} {bad:40} FAIL\n{said}", flush=True)
            failed.append(bad)
            left = [word for word in left if word != bad]
        print(f"{client:13} {time.monotonic() - began:.0f} s", flush=True)
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """Every scenario that was asked for; returns 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", help=", ".join(CLIENTS))
    parser.add_argument("--row", help="only scenarios whose NAME@STAGE contains this")
    parser.add_argument("--list", action="store_true", help="only print the names")
    arguments = parser.parse_args(argv)
    unknown = sorted(set(arguments.clients) - CLIENTS.keys())
    if unknown:
        parser.error(f"no such client: {', '.join(unknown)}; there are {', '.join(CLIENTS)}")
    count, failed = 0, []
    with tempfile.TemporaryDirectory(prefix="clients-") as folder:
        for client in arguments.clients or CLIENTS:
            missing = [name for name in CLIENTS[client] if importlib.util.find_spec(name) is None]
            if missing:
                print(f"{client:13} not run: not installed: {', '.join(missing)}")
                continue
            rows = [row for row in names_of(client) if (arguments.row or "") in row]
            if arguments.list:
                print(*(f"{client:13} {row}" for row in rows), sep="\n")
                continue
            count += len(rows)
            failed += [f"{client} {row}" for row in run(client, rows, Path(folder))]
    print(f"{count - len(failed)} of {count} passed", *failed, sep="\n    ")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
