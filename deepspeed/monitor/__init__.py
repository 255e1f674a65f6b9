"""Monitors: where training metrics are written. `monitor.MonitorMaster` writes to all of them."""
