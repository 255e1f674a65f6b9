"""Tests of deepspeed.utils."""
