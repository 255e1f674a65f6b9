"""Packaging of deepspeed: what goes into the wheel and which commands it installs.

Owns: metadata, requirements, the generated version module and the packaged copy of `op_builder/`
and `csrc/`. Needs neither torch nor a compiler, unless native ops are asked for ahead of time with
DS_BUILD_OPS=1.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
VERSION = (ROOT / "version.txt").read_text(encoding="ascii").strip()
EXTRAS = ("tensorboard", "wandb", "comet", "mpi", "transformers")


def read_requirements(name: str) -> list[str]:
    """Return the requirement lines of requirements/`name`, without comments and options."""
    lines = (ROOT / "requirements" / name).read_text(encoding="ascii").splitlines()
    return [
        line.strip() for line in lines if line.strip() and not line.lstrip().startswith(("#", "-"))
    ]


def git_output(*args: str) -> str:
    """Return what git says about this checkout, or "unknown" outside of one (an unpacked sdist)."""
    if not (ROOT / ".git").exists():
        return "unknown"
    try:
        result = subprocess.run(
            ["git", *args], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip() or "unknown"


class BuildPyWithVersion(build_py):
    """build_py that also writes the version module into the build folder, never into the
    checkout.
    """

    def run(self) -> None:
        """Copy the packages, then write `deepspeed/git_version_info_installed.py` beside them."""
        super().run()
        # An editable install imports the checkout, whose version.txt must stay the only source.
        if getattr(self, "editable_mode", False):
            return
        target = Path(self.build_lib) / "deepspeed" / "git_version_info_installed.py"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(
            '"""Written by setup.py: the version this package was built as."""\n\n'
            f"version: str = {VERSION!r}\n"
            f"git_hash: str = {git_output('rev-parse', '--short', 'HEAD')!r}\n"
            f"git_branch: str = {git_output('rev-parse', '--abbrev-ref', 'HEAD')!r}\n",
            encoding="ascii",
        )


def native_extensions() -> list[Extension]:
    """Return the native ops to build ahead of time: none, unless DS_BUILD_OPS=1 asks for them."""
    if os.environ.get("DS_BUILD_OPS", "0") != "1":
        return []
    # A build backend runs this file without the project root on the import path.
    sys.path.insert(0, str(ROOT))
    try:
        from op_builder import ALL_OPS
    finally:
        sys.path.remove(str(ROOT))
    return [
        builder.builder() for builder in ALL_OPS.values() if builder.is_compatible(verbose=True)
    ]


def extras() -> dict[str, list[str]]:
    """Return the optional requirement sets; each is a file requirements/requirements-<name>.txt."""
    table = {name: read_requirements(f"requirements-{name}.txt") for name in EXTRAS}
    table["all"] = sorted({requirement for group in table.values() for requirement in group})
    table["dev"] = read_requirements("requirements-dev.txt")
    return table


setup(
    name="deepspeed",
    version=VERSION,
    description="Drop-in DeepSpeed for training whose gradient synchronization is checked",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["deepspeed", "deepspeed.*"]),
    package_data={
        "deepspeed": ["py.typed"],
        "deepspeed.monitor.watch": ["page.*"],
        "deepspeed.ops": ["csrc/**/*"],
    },
    install_requires=read_requirements("requirements.txt"),
    extras_require=extras(),
    ext_modules=native_extensions(),
    cmdclass={"build_py": BuildPyWithVersion},
    entry_points={
        "console_scripts": [
            "deepspeed = deepspeed.launcher.command:main",
            "ds = deepspeed.launcher.command:main",
            "ds_checkpoint = deepspeed.checkpoint.cli:main",
            "ds_elastic = deepspeed.elasticity.cli:main",
            "ds_io = deepspeed.nvme.measure:ds_io_main",
            "ds_nvme_tune = deepspeed.nvme.tune:main",
            "ds_report = deepspeed.env_report:cli_main",
            "ds_to_universal = deepspeed.checkpoint.ds_to_universal:command",
            "ds_diff = deepspeed.verify.diff:command",
            "ds_verify = deepspeed.verify.oracle.cli:command",
            "ds_watch = deepspeed.monitor.watch.cli:command",
        ]
    },
    classifiers=[
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Typing :: Typed",
    ],
)
