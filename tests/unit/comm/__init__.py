"""Tests of deepspeed.comm."""
