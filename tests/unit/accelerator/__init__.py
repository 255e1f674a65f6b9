"""Tests of deepspeed.accelerator."""
