"""The `ds_report` command: what is installed, and which native ops this machine can use.

Everything is looked up when the report is made; importing this module costs nothing.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

WIDTH = 72
SHM_PATH = "/dev/shm"
SHM_WARNING_BYTES = 512 * 2**20
# What optional features need: clients, monitors, and ways to start processes on other hosts.
PACKAGES = (
    *("numpy", "pydantic", "psutil", "safetensors", "accelerate", "transformers"),
    *("tensorboard", "wandb", "comet-ml"),
)
LAUNCHERS = ("ssh", "pdsh", "mpirun", "srun")


def op_report(verbose: bool = True) -> None:
    """Print a table of the native ops: installed, and usable here."""
    # startup: op builders are imported for the report only
    from deepspeed.ops.op_builder import ALL_OPS

    print(_heading("Native ops"))
    print("Ops that are not installed are compiled on first use, if their requirements are met.")
    print(f"ninja {_dots('ninja')} {_yes_no(shutil.which('ninja') is not None)}")
    print(f"{'op name':<24} {'installed':<12} compatible")
    for name, builder in ALL_OPS.items():
        compatible = builder.is_compatible()
        print(f"{name:<24} {_yes_no(builder.is_prebuilt()):<12} {_yes_no(compatible)}")
        if verbose and not compatible:
            print(f"  {builder.error_log}")


def debug_report() -> None:
    """Print versions and places of python, torch and deepspeed, the accelerator, shared memory."""
    print(_heading("Environment"))
    for label, value in environment_facts():
        print(f"{label} {_dots(label)} {value}")
    size, warnings = get_shm_size()
    label = f"shared memory ({SHM_PATH}) size"
    print(f"{label} {_dots(label)} {size}")
    for warning in warnings:
        print(f"  [WARNING] {warning}")


def environment_facts() -> list[tuple[str, str]]:
    """Return (label, value) of what `debug_report` prints, in order."""
    # startup: torch takes seconds, which `ds_report --help` need not wait for
    import torch

    from deepspeed import git_version_info
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    here = os.path.dirname(os.path.abspath(git_version_info.__file__))
    facts = [
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("platform", platform.platform()),
        ("torch version", torch.__version__),
        ("torch install path", os.path.dirname(torch.__file__)),
        ("deepspeed version", git_version_info.version),
        ("deepspeed revision", f"{git_version_info.git_hash}, {git_version_info.git_branch}"),
        ("deepspeed install path", here),
        ("accelerator", f"{accelerator.device_name()} x {accelerator.device_count()}"),
        ("communication backend", accelerator.communication_backend_name() or "none"),
        ("torch cuda version", torch.version.cuda or "none"),
        ("torch hip version", torch.version.hip or "none"),
    ]
    if torch.version.cuda:
        facts.append(("nvcc version", nvcc_version()))
    vectors = torch.backends.cpu.get_cpu_capability()
    facts.append(("cpu", f"{os.cpu_count()} cores, vector instructions {vectors}"))
    facts.append(("host memory", _host_memory()))
    facts += ((f"{name} version", _distribution_version(name)) for name in PACKAGES)
    found = ", ".join(name for name in LAUNCHERS if shutil.which(name))
    return [*facts, ("launchers found", found or "none")]


def _host_memory() -> str:
    import psutil  # startup: only the report needs it

    memory = psutil.virtual_memory()
    return f"{human_readable_size(memory.total)}, {human_readable_size(memory.available)} available"


def nvcc_version() -> str:
    """Return the CUDA compiler's release, e.g. "12.8", or why there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=os.path.join(home, "bin") if home else None)
    if nvcc is None:
        return "nvcc not found; set CUDA_HOME or PATH to build CUDA ops"
    output = subprocess.run([nvcc, "-V"], capture_output=True, text=True).stdout
    _, found, rest = output.partition("release ")
    return rest.split(",")[0] if found else "unknown"


def installed_cann_path() -> str | None:
    """Return the folder of the Ascend toolkit (CANN), or None."""
    candidates = (os.environ.get("ASCEND_HOME_PATH"), "/usr/local/Ascend/ascend-toolkit/latest")
    return next((path for path in candidates if path and os.path.isdir(path)), None)


def installed_cann_version() -> str | None:
    """Return the version of the Ascend toolkit (CANN), or None when it does not say."""
    home = installed_cann_path() or ""
    info = os.path.join(home, f"{platform.machine()}-linux", "ascend_toolkit_install.info")
    if not os.path.isfile(info):
        return None
    with open(info, encoding="utf-8") as stream:
        lines = [line.strip().partition("=") for line in stream]
    return next((value for key, _, value in lines if key == "version"), None)


def human_readable_size(size: float) -> str:
    """Return a number of bytes with a unit, e.g. "117.74 MB" (units of 1024)."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1024:
            return f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TB"


def get_shm_size() -> tuple[str, list[str]]:
    """Return the size of the shared memory, readable, and warnings about it."""
    try:
        stats = os.statvfs(SHM_PATH)
    except OSError as error:
        return "UNKNOWN", [f"{SHM_PATH} cannot be read: {error.strerror}"]
    total = stats.f_frsize * stats.f_blocks
    size = human_readable_size(total)
    if total >= SHM_WARNING_BYTES:
        return size, []
    remedy = "data loaders and NCCL may fail; in a container start it with --shm-size='1gb' or more"
    return size, [f"{SHM_PATH} is small: {remedy}"]


def _distribution_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _heading(text: str) -> str:
    return f"{'-' * WIDTH}\n{text}\n{'-' * WIDTH}"


def _dots(label: str) -> str:
    return "." * max(3, 34 - len(label))


def _yes_no(value: bool) -> str:
    return "[YES]" if value else "[NO]"


def parse_arguments() -> argparse.Namespace:
    """Parse the command line of `ds_report`."""
    description = "Describe this deepspeed installation."
    parser = argparse.ArgumentParser(prog="ds_report", description=description)
    for flag, what in (
        ("--hide_operator_status", "the table of native ops"),
        ("--hide_errors_and_warnings", "why an op cannot be used"),
    ):
        parser.add_argument(flag, action="store_true", help=f"leave out {what}")
    return parser.parse_args()


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print the report."""
    if not hide_operator_status:
        op_report(verbose=not hide_errors_and_warnings)
    debug_report()


def cli_main() -> None:
    """Run the `ds_report` command."""
    main(**vars(parse_arguments()))


if __name__ == "__main__":
    cli_main()
