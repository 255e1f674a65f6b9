"""What the wheel carries, and that building it needs neither torch nor a compiler."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deepspeed import git_version_info

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    for module in ("setuptools", "wheel"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"building a wheel without network needs {module}")
    folder = tmp_path_factory.mktemp("wheel")
    # A torch that cannot be imported: the build must not try. No compiler either.
    (folder / "torch.py").write_text("raise ImportError('setup.py imported torch')\n")
    environment = {**os.environ, "PYTHONPATH": str(folder), "CC": "false", "CXX": "false"}
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(folder / "build")]
    command += ["egg_info", "--egg-base", str(folder)]
    command += ["bdist_wheel", "--dist-dir", str(folder), "--bdist-dir", str(folder / "bdist")]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_is_pure_python_and_named_after_the_project(wheel: zipfile.ZipFile) -> None:
    version = (ROOT / "version.txt").read_text().strip()
    assert Path(str(wheel.filename)).name == f"deepspeed-{version}-py3-none-any.whl"


def test_the_wheel_has_every_module_of_the_package(wheel: zipfile.ZipFile) -> None:
    packages = {path.parent for path in (ROOT / "deepspeed").rglob("__init__.py")}
    assert ROOT / "deepspeed" in packages
    modules = (path.relative_to(ROOT) for package in packages for path in package.glob("*.py"))
    names = set(wheel.namelist())
    assert sorted({*map(str, modules)} - names) == []
    others = ["py.typed", "git_version_info_installed.py", "ops/op_builder/__init__.py"]
    others += ["ops/op_builder/builder.py", "ops/csrc/adam/cpu_adam.cpp"]
    assert {f"deepspeed/{name}" for name in [*others, "ops/csrc/host_update/vec.h"]} <= names
    assert not [name for name in names if not name.startswith(("deepspeed/", "deepspeed-"))]


def test_no_folder_of_modules_lacks_its_init() -> None:
    """A package without __init__.py imports in a checkout and is missing from the wheel."""
    folders = {path.parent for path in (ROOT / "deepspeed").rglob("*.py")}
    assert sorted(str(path) for path in folders if not (path / "__init__.py").exists()) == []


def test_the_wheel_installs_the_commands_and_names_its_requirements(wheel: zipfile.ZipFile) -> None:
    (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    commands = wheel.read(f"{info}/entry_points.txt").decode()
    ours = dict.fromkeys(("deepspeed", "ds"), "launcher.command:main")
    ours |= {"ds_checkpoint": "checkpoint.cli:main", "ds_report": "env_report:cli_main"}
    for name, place in {**ours, "ds_verify": "verify.oracle.cli:command"}.items():
        assert f"{name} = deepspeed.{place}" in commands
    metadata = wheel.read(f"{info}/METADATA").decode()
    for requirement in ("torch>=2.6", "pydantic>=2", "hjson", "safetensors", "ninja", "py-cpuinfo"):
        assert f"Requires-Dist: {requirement}\n" in metadata
    for extra in ("dev", "tensorboard", "wandb", "comet", "mpi", "transformers"):
        assert f"Provides-Extra: {extra}\n" in metadata


def test_the_packaged_version_module_says_what_version_txt_says(wheel: zipfile.ZipFile) -> None:
    namespace: dict[str, str] = {}
    exec(wheel.read("deepspeed/git_version_info_installed.py"), namespace)
    version = (ROOT / "version.txt").read_text().strip()
    assert namespace["version"] == git_version_info.version == version


def test_the_checkout_has_no_generated_version_module() -> None:
    """It would hide later changes of version.txt."""
    assert not (ROOT / "deepspeed" / "git_version_info_installed.py").exists()


def test_op_lists_are_computed_on_demand() -> None:
    names = {"async_io", "cpu_adagrad", "cpu_adam", "cpu_lion", "cpu_squares"}
    # Upstream's other operators have names, too; nothing of them is built.
    assert set(git_version_info.compatible_ops) > set(git_version_info.installed_ops) == names
    assert git_version_info.compatible_ops["inference_core_ops"] is False
    assert git_version_info.installed_ops["async_io"] is False
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = git_version_info.nothing


def test_every_pin_of_the_direct_requirements_exists() -> None:
    """A package without a pin could pull in another torch, and would change under CI's feet."""
    folder = ROOT / "requirements"
    lines = read(folder / "requirements-ci.txt")
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    wanted = [*read(folder / "requirements.txt"), *read(folder / "requirements-dev.txt")]
    assert [name for name in wanted if name.partition(">")[0].lower() not in pinned] == []


def read(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]
