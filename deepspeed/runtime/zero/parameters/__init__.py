"""What a parameter of stage 3 is, and how it is cut. Nothing here makes one whole.

zero_parameter   the interface that clients use, and what is known of a parameter
shards           the shard: where it lies, as scripts get it, and what a state dict has of it
guarded_writes   writes to whole parameters that nobody would keep, refused where they are made
guarded_loads    `load_state_dict` that would find no elements, refused before it begins
agreement        whether all ranks describe the same parameters
own_draws        what a rank drew itself, which its experts are copies of
"""
