"""Collectives of the simulated device.

stream_collectives  NCCL's order on streams, carried out by a host backend
nccl_limits         tensors and operations that NCCL refuses
stuck_ranks         ranks that wait for each other for ever, found while they wait
"""
