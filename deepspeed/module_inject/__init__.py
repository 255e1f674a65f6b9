"""Upstream's path of the layers that tensor parallelism cuts; no kernels are injected."""

from deepspeed._lazy import lazy_attributes

__getattr__ = lazy_attributes(
    __name__,
    {
        "GatherReplacedLayerParams": "deepspeed.runtime.tensor_parallel.whole_layers",
        "LinearAllreduce": "deepspeed.runtime.tensor_parallel.layers",
        "LinearLayer": "deepspeed.runtime.tensor_parallel.layers",
    },
    ("layers",),
)
