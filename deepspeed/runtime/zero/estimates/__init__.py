"""Memory that training will need, before any of it is allocated.

stages_1_and_2  states and buckets of both, and upstream's printed estimates
stage3          sharded parameters, and how many are whole at once
kept_state      in how many bytes state is kept, and what of it is in host memory and in files
replicated      whole parameters and gradients on every rank
"""
