"""Which file of the package may import which: plain data, checked by the style tests.

Names are modules below `deepspeed`; a name covers what is below it as well unless a longer one says
otherwise, and `NAME.__init__` is the package's own file alone.
"""


def of(package: str, names: str) -> tuple[str, ...]:
    """Modules of one package."""
    return tuple(f"{package}.{name}" for name in names.split())


LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "What every file may use: the log, names that load on first use or say why they are absent",
        (
            *("_absent", "_absent_internals", "_lazy", "_modules", "module_inject"),
            "runtime.__init__",
            *of("utils", "__init__ comms_logging exceptions logging"),
        ),
    ),
    ("The device seam", ("accelerator",)),
    (
        "Beside one device and one process: native operators, helpers, the launcher",
        (
            *("elasticity", "env_report", "git_version_info", "io", "launcher", "nvme", "ops"),
            *of("utils", "bwc init_on_device memory_names numa nvtx reports"),
            *of("utils", "tensor_fragment timer torch z3_leaf_module"),
        ),
    ),
    ("Collectives and process groups", ("comm",)),
    ("Which ranks share what, as scripts ask for it", ("utils.groups",)),
    (
        "What needs ranks and no engine: experts, long sequences, files of checkpoints, watching",
        ("checkpoint", "moe", "monitor", "profiling", "sequence", "utils.zero_to_fp32"),
    ),
    (
        "The configuration",
        (
            *("nebula", "runtime.activation_checkpointing.config"),
            *of("runtime", "config config_models config_utils constants precision_config"),
            *of("runtime.zero", "__init__ config offload_config"),
        ),
    ),
    (
        "Who owns what, where gradients go, on which streams",
        of("runtime", "gradients module_hooks sharding streams"),
    ),
    (
        "The step sequence and its parts",
        of("runtime", "base_optimizer fp16.__init__ fp16.loss_scaler lr_schedules optimizers"),
    ),
    ("Parameters of stage 3, and who has them whole", of("runtime.zero", "gathering parameters")),
    ("The optimizers", ("runtime.bf16_optimizer", "runtime.fp16", "runtime.zero")),
    (
        "Around the optimizers: saving and loading, recomputation, data, clients' helpers",
        (
            *of("runtime", "activation_checkpointing checkpoint_engine checkpointing compiler"),
            *of("runtime", "data_pipeline dataloader script_helpers sequence_parallel utils"),
        ),
    ),
    (
        "Parts of the engine",
        of("runtime", "engine_parts optimizer_factory step_observers tensor_parallel"),
    ),
    ("The engine", ("runtime.engine",)),
    ("Pipelines", ("pipe", "runtime.pipe")),
    ("The front door", ("__init__",)),
    ("Tools that check training from outside", ("verify",)),
)
"""(What the layer is, its modules), lowest first. A file imports from its own layer and from those
below.
"""

GRAB_BAGS: tuple[str, ...] = ("utils",)
"""Packages of upstream's whose files share a folder and no subject: each file stands for itself."""

DOORS: dict[str, str] = {
    "_modules": "upstream's paths of names that live elsewhere, where no file is needed",
    "accelerator.abstract_accelerator": "upstream asks the device for the package of its operators",
    "comm.config": "upstream's path of the comms logger's block",
    "elasticity.constants": "upstream's path of the elasticity block's keys",
    "module_inject.__init__": "upstream's path of the layers that tensor parallelism cuts",
    "module_inject.layers": "upstream's path of the layers that tensor parallelism cuts",
    "monitor.config": "upstream's path of the monitors' blocks",
    "profiling.config": "upstream's path of the profiler's block",
    "profiling.constants": "upstream's path of that block's keys",
    "runtime.base_optimizer": "upstream's path of `ZeROOptimizer`",
    "runtime.precision_config": "upstream's path of the loss scaler's names",
    "runtime.zero.__init__": "upstream's short path of `Init`, `GatheredParameters` and their kin",
    "runtime.zero.utils": "upstream's path of a question about optimizers",
    "runtime.engine_parts.verification": "entry of the stream checker that training switches on",
    "utils.__init__": "upstream's short path of what scripts use",
    "utils.comms_logging": "upstream's path of the statistics of collectives",
    "utils.logging": "asks for the rank of a process group that somebody has made",
}
"""Modules that know modules of layers above their own, as text, and why: they load when somebody
asks. Nothing else of the package asks.
"""
