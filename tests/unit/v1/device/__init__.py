"""Training on real devices; skipped where there are none."""
