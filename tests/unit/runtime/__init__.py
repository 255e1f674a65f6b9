"""Tests of the runtime's parts."""
