"""Checkpoints: saving, loading, layout of the files, crashes."""

COVERS = ("checkpoint", "runtime.checkpoint_engine", "runtime.checkpointing", "utils.zero_to_fp32")
