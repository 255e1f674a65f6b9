"""The first moments of a launched process: it prepares itself, then becomes the user's command.

Run as a plain file (`python worker_exec.py PLAN LOCAL_RANK`), so that it imports neither deepspeed
nor torch; the command comes from the plan file, as torch's agent would expand `$` in arguments.
"""

import ctypes
import json
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Read the plan, prepare this process, and become the rank's command; 127 if that fails."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # As `signals.die_at_once`: a Ctrl-C kills this process without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    plan_path, local_rank = sys.argv[1], int(sys.argv[2])
    with open(plan_path, encoding="utf-8") as stream:
        plan = json.load(stream)
    die_with_launcher(plan["launcher_pid"])
    if plan["cores"]:
        os.sched_setaffinity(0, plan["cores"][local_rank])
    environment = {**os.environ, **plan["environments"][local_rank]}
    # In an elastic job the agent alone knows which of how many nodes this is.
    environment.setdefault("CROSS_RANK", environment["GROUP_RANK"])
    environment.setdefault("CROSS_SIZE", environment["GROUP_WORLD_SIZE"])
    # Short writes to a pipe are atomic, so ranks need no lock between them.
    with open(plan["control"], "wb", buffering=0) as control:
        control.write(f"{local_rank} {os.getpid()} {environment['RANK']}\n".encode())
    command = plan["commands"][local_rank]
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        sys.stderr.write(f"deepspeed: cannot run {command[0]!r}: {error.strerror}\n")
        sys.exit(127)


def die_with_launcher(launcher_pid: int) -> None:
    """Have the kernel end this process when the launcher dies, even by SIGKILL (Linux only).

    The setting survives exec. A launcher that died before it was made shows as another parent.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
