"""Asynchronous file I/O: only its builder's name, for clients that ask whether it is there."""

from deepspeed.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
