"""How checkpoint files are written and read.

checkpoint_engine            the interface
torch_checkpoint_engine      files of `torch.save`
fast_checkpoint_engine       the same without torch's own sums
dcp_checkpoint_engine        files in the format of torch.distributed.checkpoint
decoupled_checkpoint_engine  another engine's, written in the background
utils                        which of them the configuration asks for
"""
