"""Exceptions that belong to no subsystem."""

import os
import shutil


class MisuseError(ValueError, AssertionError):
    """A call that cannot mean anything; the text says what would. Upstream asserts there, and
    scripts written for it catch that.
    """


class DeprecatedException(Exception):
    """Something upstream once had is gone; the text names what to use instead."""


def disk_error(error: OSError, path: str, wanted: int) -> OSError:
    """The error of a write, which knows no name, with the file and how much does not fit."""
    free = shutil.disk_usage(os.path.dirname(path) or os.curdir).free
    reason = f"{error.strerror or error}: {wanted:,} bytes are to be written, {free:,} are free"
    return OSError(error.errno, reason, path)
