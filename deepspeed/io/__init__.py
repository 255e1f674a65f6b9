"""File-like objects to save with, by upstream's names: `fast_file_writer` writes past the page
cache; `base_file_writer` has what writers share, the plain one, and the one that only counts.
Checkpoints have a writer of their own, which sums files too: `deepspeed.checkpoint.file_writer`.
"""

from deepspeed._lazy import lazy_attributes

_BASE = dict.fromkeys(("MockFileWriter", "PyFileWriter"), "deepspeed.io.base_file_writer")
_FAST = ("FastFileWriter", "FastFileWriterConfig")

__getattr__ = lazy_attributes(
    __name__,
    {**_BASE, **dict.fromkeys(_FAST, "deepspeed.io.fast_file_writer")},
    ("base_file_writer", "fast_file_writer"),
)
