"""Exceptions that belong to no subsystem."""


class MisuseError(ValueError, AssertionError):
    """A call that cannot mean anything; the text says what would. Upstream asserts there, and
    scripts written for it catch that.
    """


class DeprecatedException(Exception):
    """Something upstream once had is gone; the text names what to use instead."""
