"""Recomputed activations. This release holds their configuration only."""
