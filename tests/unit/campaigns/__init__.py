"""Tests of tests/campaigns."""
