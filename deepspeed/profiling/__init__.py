"""Profiling. This release holds its configuration only."""
