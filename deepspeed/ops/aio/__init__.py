"""Asynchronous file I/O past the page cache, by upstream's names, which is what
`AsyncIOBuilder().load()` returns: `handle` has what scripts call, `engines` what moves bytes,
`locked` memory for them.
"""

from deepspeed._lazy import lazy_attributes
from deepspeed.ops.op_builder import AsyncIOBuilder

_HANDLE = "AsyncIOHandle aio_handle aio_read aio_write deepspeed_memcpy".split()
_LOCKED = ("free_cpu_locked_tensor", "new_cpu_locked_tensor")

__all__ = ["AsyncIOBuilder"]

__getattr__ = lazy_attributes(
    __name__,
    {
        **dict.fromkeys(_HANDLE, "deepspeed.ops.aio.handle"),
        **dict.fromkeys(_LOCKED, "deepspeed.ops.aio.locked"),
    },
    ("engines", "handle", "locked"),
)
