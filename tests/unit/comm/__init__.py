"""Tests of deepspeed.comm."""

COVERS = ("comm.sim", "comm.watch")
