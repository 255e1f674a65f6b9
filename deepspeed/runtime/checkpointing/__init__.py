"""Saving and loading an engine."""
