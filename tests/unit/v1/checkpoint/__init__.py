"""Checkpoints: saving, loading, layout of the files, crashes."""
