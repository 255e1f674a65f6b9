"""Who owns which elements, and the flat buffers that follow from it.

`fragments` is pure integers; `group` holds the tensors laid out by it, which `flattening` fills;
`publisher` gives every rank the updated shards. `model_ranks` says which ranks hold which
parameters, `state` what a shard's state is in checkpoints.
"""
