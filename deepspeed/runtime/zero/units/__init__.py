"""The parts of stage 3's optimizer that are not its reduction (`zero.stage3.Units`).

`masters` are those of parameters that are cut one by one, in groups that `shard_writer` updates the
shards of; `partial_offload` keeps a part of them on the device; `files` is their state in
checkpoints. `buckets` says what of a gather unit is reduced together.
"""
