"""Exceptions that belong to no subsystem."""


class DeprecatedException(Exception):
    """Something upstream once had is gone; the text names what to use instead."""
