"""`python host.py PROGRAM [ARGUMENT ...]` runs a client library's program without a GPU.

The libraries ask for NCCL, or for no backend at all, and trust bf16 to a GPU alone; only these
gates are opened, as the pages of docs/clients do.
"""

import runpy
import sys
from typing import Any

import torch
import transformers.training_args
from accelerate.state import PartialState

prepare_backend = PartialState._prepare_backend
init_process_group = torch.distributed.init_process_group


def prepare_gloo(
    self: PartialState, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
) -> Any:
    """Choose gloo where nothing else was asked for."""
    return prepare_backend(self, cpu, sagemaker_dp, backend or "gloo")


def init_gloo(backend: str | None = None, **words: Any) -> None:
    """Start gloo in NCCL's place."""
    init_process_group("gloo" if backend == "nccl" else backend, **words)


def main() -> None:
    """Run the program that the command line names, with the rest of it."""
    PartialState._prepare_backend = prepare_gloo
    torch.distributed.init_process_group = init_gloo
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
