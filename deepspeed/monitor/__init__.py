"""Monitors: where training metrics are written. `monitor.MonitorMaster` writes to all of them.

monitor                                 the interface, and all of them
csv_monitor, tensorboard, wandb, comet  where to
watch                                   a record of the run, and a page of it
config                                  upstream's path of the blocks
"""
