"""Pipeline parallelism: topology, modules cut into stages, schedules, messages between stages, and
the engine that runs them.

    module, layer_spec       a model as a list of layers, and which stage has which
    expert_layers            experts in such a list
    topology                 where every rank stands
    schedule                 which instructions each stage runs
    schedule_text, simulator schedules for people, and run on paper
    engine, settings         runs a schedule; what it honours of a configuration
    buffers                  what a stage keeps of a micro-batch, and what a batch yields
    canonical_leaves         gradients by micro-batch, for equal bits on any number of stages
    split_backward           gradients of inputs now, of weights later
    messages, p2p            what travels between stages; upstream's functions of it
    layer_files              checkpoint files by layer
"""

from deepspeed._lazy import lazy_attributes

_NAMES = {
    "LayerSpec": "deepspeed.runtime.pipe.module",
    "PipelineModule": "deepspeed.runtime.pipe.module",
    "TiedLayerSpec": "deepspeed.runtime.pipe.module",
    "ProcessTopology": "deepspeed.runtime.pipe.topology",
}

__getattr__ = lazy_attributes(__name__, _NAMES, ("engine", "module", "p2p", "schedule", "topology"))
