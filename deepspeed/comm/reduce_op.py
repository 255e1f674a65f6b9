"""The reduction operators: torch's own, so that they can be handed to either library."""

from torch.distributed import ReduceOp

__all__ = ["ReduceOp"]
