"""Training on real devices; skipped where there are none."""

COVERS = ("accelerator.sim", "runtime.streams", "runtime.zero.estimates")
