"""Tests of deepspeed.accelerator."""

COVERS = ("accelerator.sim",)
