"""`UsageError`, which every part of the command raises."""


class UsageError(ValueError):
    """The command was used wrongly; the text names argument, value and remedy."""
