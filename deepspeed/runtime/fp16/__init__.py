"""Mixed precision in fp16.

loss_scaler        by what a loss is multiplied, and when that changes
fused_optimizer    fp32 masters in flat groups that every rank holds whole
unfused_optimizer  the same with one master per parameter
"""
