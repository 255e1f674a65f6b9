"""How checkpoint files are written and read.

checkpoint_engine            the interface
torch_checkpoint_engine      files of `torch.save`
fast_checkpoint_engine       the same without torch's own sums
dcp_checkpoint_engine        files in the format of torch.distributed.checkpoint
decoupled_checkpoint_engine  another engine's, written in the background
utils                        which of them the configuration asks for
"""

from deepspeed._lazy import lazy_attributes

__getattr__ = lazy_attributes(
    __name__,
    {
        "DecoupledCheckpointEngine": f"{__name__}.decoupled_checkpoint_engine",
        "FastCheckpointEngine": f"{__name__}.fast_checkpoint_engine",
        "TorchCheckpointEngine": f"{__name__}.torch_checkpoint_engine",
        "create_checkpoint_engine": f"{__name__}.utils",
    },
)
