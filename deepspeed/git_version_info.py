"""Which version of the package this is, and which native ops it carries.

The number stands in ``version.txt``, which ``setup.py`` copies into a built package as
``git_version_info_installed.py``.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

_GENERATED_MODULE = "deepspeed.git_version_info_installed"
_UNKNOWN = "unknown"


def _read_version() -> tuple[str, str, str]:
    """Return (version, git hash, git branch) of a built package, or of the checkout."""
    if importlib.util.find_spec(_GENERATED_MODULE) is not None:
        generated = importlib.import_module(_GENERATED_MODULE)
        return generated.version, generated.git_hash, generated.git_branch
    version_file = Path(__file__).resolve().parent.parent / "version.txt"
    if not version_file.is_file():
        raise RuntimeError(
            f"deepspeed: {version_file} is missing and this copy was not built by setup.py; "
            "reinstall with `pip install deepspeed` or use a full source checkout"
        )
    return version_file.read_text(encoding="ascii").strip(), _UNKNOWN, _UNKNOWN


version, git_hash, git_branch = _read_version()


def __getattr__(name: str) -> Any:
    """Compute what looks for a compiler or loads torch on first use."""
    if name == "torch_info":
        return _torch_info()
    if name == "accelerator_name":
        from deepspeed.accelerator import get_accelerator  # startup: loads torch

        return get_accelerator()._name
    if name not in ("installed_ops", "compatible_ops"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # startup: `import deepspeed` reads the version only and must not pay for op builders
    from deepspeed.ops.op_builder import ALL_OPS, compatible_ops

    if name == "installed_ops":
        return {op: builder.is_prebuilt() for op, builder in ALL_OPS.items()}
    return compatible_ops()


def _torch_info() -> dict[str, Any]:
    """Give the versions of torch and of what it was built with ("0.0": without)."""
    import torch  # startup: see above

    from deepspeed.accelerator import get_accelerator

    def short(version: object) -> str:
        return ".".join(str(version).split("+")[0].split(".")[:2]) if version else "0.0"

    return {
        "version": short(torch.__version__),
        "bf16_support": get_accelerator().is_bf16_supported(),
        "cuda_version": short(torch.version.cuda),
        # "0.0" also where there is one: only the collectives' library knows, and asking loads it.
        "nccl_version": "0.0",
        "hip_version": short(torch.version.hip),
    }
