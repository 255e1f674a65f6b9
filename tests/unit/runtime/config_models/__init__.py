"""Tests of reading a configuration."""
