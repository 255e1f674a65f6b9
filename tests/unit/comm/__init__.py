"""Tests of deepspeed.comm."""

COVERS = ("comm.intent",)
