"""Builder of the asynchronous file I/O op (`deepspeed.ops.aio`), which this release does not carry
yet.

Owns: the op's name and the reason why it is not compatible, so that programs which probe for it get
an answer.
"""

from .builder import OpBuilder


class AsyncIOBuilder(OpBuilder):
    """Asynchronous NVMe reads and writes; reports that it is not available in this release."""

    BUILD_VAR = "DS_BUILD_AIO"
    NAME = "async_io"

    def absolute_name(self) -> str:
        """Return the name of the extension module."""
        return "deepspeed.ops.aio.async_io_op"

    def sources(self) -> list[str]:
        """Return no sources: there is nothing to compile yet."""
        return []

    def _incompatibility(self) -> str | None:
        return (
            "NVMe offload and its async_io op come in a later release; use offload device 'cpu' or "
            "'none'"
        )
