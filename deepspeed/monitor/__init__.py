"""Monitors: where training metrics are written. This release holds their configuration only."""
