"""Pipeline parallelism: topology, modules cut into stages, schedules, messages between stages, and
the engine that runs them.
"""

from deepspeed._lazy import lazy_attributes

_NAMES = {
    "LayerSpec": "deepspeed.runtime.pipe.module",
    "PipelineModule": "deepspeed.runtime.pipe.module",
    "TiedLayerSpec": "deepspeed.runtime.pipe.module",
    "ProcessTopology": "deepspeed.runtime.pipe.topology",
}

__getattr__ = lazy_attributes(__name__, _NAMES, ("engine", "module", "p2p", "schedule", "topology"))
