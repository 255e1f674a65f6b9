"""DeepSpeed for training, with gradient synchronization that is checked, not assumed.

`initialize` is the front door. Everything else loads on first use.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from deepspeed._lazy import lazy_attributes
from deepspeed.git_version_info import git_branch, git_hash, version

if TYPE_CHECKING:
    import torch

    from deepspeed.runtime.dataloader import DeepSpeedDataLoader
    from deepspeed.runtime.engine import DeepSpeedEngine

__version__, __git_hash__, __git_branch__ = version, git_hash, git_branch
__version_major__, __version_minor__, __version_patch__ = (
    int(part) for part in __version__.split("+")[0].split(".")[:3]
)

_SUBMODULES = tuple(
    "accelerator checkpoint comm elasticity launcher moe monitor ops pipe profiling runtime "
    "sequence utils verify".split()
)
_NAMES = {
    "DeepSpeedConfig": "deepspeed.runtime.config",
    "DeepSpeedConfigError": "deepspeed.runtime.config",
    "DeepSpeedDataLoader": "deepspeed.runtime.dataloader",
    "DeepSpeedEngine": "deepspeed.runtime.engine",
    "DeepSpeedOptimizer": "deepspeed.runtime.base_optimizer",
    "OnDevice": "deepspeed.utils.init_on_device",
    "PipelineEngine": "deepspeed.runtime.pipe.engine",
    "PipelineModule": "deepspeed.runtime.pipe.module",
    "add_tuning_arguments": "deepspeed.runtime.lr_schedules",
    "checkpointing": "deepspeed.runtime.activation_checkpointing",
    "get_accelerator": "deepspeed.accelerator",
    "init_distributed": "deepspeed.comm",
    "is_compile_supported": "deepspeed.runtime.compiler",
    "log_dist": "deepspeed.utils.logging",
    "logger": "deepspeed.utils.logging",
    "tp_model_init": "deepspeed.runtime.tensor_parallel.model_init",
    "zero": "deepspeed.runtime",
}
__getattr__ = lazy_attributes(__name__, _NAMES, _SUBMODULES)


def initialize(
    args: object = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: object = None,
    lr_scheduler: object = None,
    distributed_port: int = 29500,
    mpu: object = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: object = None,
    mesh_param: object = None,
    config_params: object = None,
) -> tuple[DeepSpeedEngine, Any, DeepSpeedDataLoader | None, Any]:
    """Make an engine that trains `model` on all ranks.

    Args:
        args: Namespace with `deepspeed_config` (path of the configuration) and `local_rank`, as
            `add_config_arguments` adds them.
        model: The module to train; a `PipelineModule` gets a `PipelineEngine`.
        optimizer: torch optimizer, or a callable that makes one from the parameters; None takes the
            configuration's.
        model_parameters: Parameters or groups to optimize; None: all that require a gradient.
        training_data: Dataset; the third result loads it.
        lr_scheduler: Scheduler, or a callable that makes one from the optimizer; None takes the
            configuration's.
        distributed_port: Port of rank 0 if torch.distributed is initialized here.
        mpu: Megatron-style object with model- and data-parallel groups.
        dist_init_required: Initialize torch.distributed; None: if nobody did.
        collate_fn: For the loader of `training_data`.
        config: Configuration: path of a JSON or hjson file, dict, or base64 of JSON.
        mesh_param: (data parallel, sequence parallel) ranks: who shares sequences; the product is
            the number of all ranks.
        config_params: Another name of `config`.

    Returns:
        Engine, optimizer, data loader (or None), learning-rate scheduler (or None).

    Raises:
        DeepSpeedConfigError: For a configuration that is wrong or not supported.
        ValueError: If the model or the configuration is missing.
    """
    # startup: the engine and all it needs
    from deepspeed.comm.initialization import ensure_distributed
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.tensor_parallel.cutting import mpu_of

    if model is None:
        raise ValueError("deepspeed.initialize: model is required")
    chosen = _chosen_config(args, config, config_params)
    ensure_distributed(dist_init_required, distributed_port)
    engine_class, mpu = _engine_of(model, mpu)
    mpu = mpu_of(model, None, mpu)
    mesh = _mesh_of(mesh_param, mpu)
    engine = engine_class(
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=mpu,
        collate_fn=collate_fn,
        config_class=DeepSpeedConfig(chosen, mpu, mesh),
        mesh_device=mesh,
    )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _engine_of(model: torch.nn.Module, mpu: object) -> tuple[type[DeepSpeedEngine], Any]:
    # Who has a PipelineModule has imported its module already.
    pipe_module = sys.modules.get("deepspeed.runtime.pipe.module")
    if pipe_module is None or not isinstance(model, pipe_module.PipelineModule):
        from deepspeed.runtime.engine import DeepSpeedEngine  # startup: torch and all it needs

        return DeepSpeedEngine, mpu
    if mpu is not None:
        raise ValueError(
            "deepspeed.initialize(mpu=...) with a PipelineModule: its topology is the mpu; leave "
            "mpu out"
        )
    from deepspeed.runtime.pipe.engine import PipelineEngine  # startup: only pipelines need it

    return PipelineEngine, model.mpu()


def _mesh_of(mesh_param: Any, mpu: Any) -> Any:
    """The device mesh of `mesh_param`; without one and without an mpu, the mesh already in use."""
    from deepspeed.comm.parallel_map import make_mesh  # startup: needs torch.distributed
    from deepspeed.utils import groups

    if mesh_param is None:
        here = groups.current()
        return here.mesh if mpu is None and here.mpu is None else None
    if mpu is not None:
        raise ValueError(
            f"mesh_param={mesh_param!r} beside an mpu: the mpu says which ranks share what; give "
            "one of them"
        )
    sizes = tuple(mesh_param)
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(
            "mesh_param: expected (data parallel ranks, sequence parallel ranks), got "
            f"{mesh_param!r}"
        )
    return make_mesh(*sizes)


def _chosen_config(args: object, config: object, config_params: object) -> Any:
    """The one configuration given; none or two are refused."""
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        raise ValueError(
            "deepspeed.initialize: no configuration; give config=, or args with --deepspeed_config"
        )
    if len(given) > 1:
        raise ValueError(
            f"deepspeed.initialize: the configuration is given {len(given)} times "
            f"({', '.join(given)}); give it once"
        )
    return next(iter(given.values()))


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` to a script's parser; returns the parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument(
        "--deepspeed",
        default=False,
        action="store_true",
        help="Enable DeepSpeed (for the script's own use)",
    )
    group.add_argument(
        "--deepspeed_config", default=None, type=str, help="DeepSpeed JSON configuration file"
    )
    return parser
