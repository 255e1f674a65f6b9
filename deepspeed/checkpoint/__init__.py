"""Checkpoint format: names, files, and the tools that work on saved folders."""
