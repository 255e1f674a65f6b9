"""Unit tests, laid out like the package."""
