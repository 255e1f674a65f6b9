"""Monitors: where training metrics are written (`monitor.MonitorMaster`), and what the engine
writes (`training_events`).
"""
