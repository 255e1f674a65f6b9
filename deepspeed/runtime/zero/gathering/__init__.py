"""Who has the parameters of stage 3 whole, from when until when.

units                which parameters are gathered together, by which keys of the configuration
gather_unit          parameters that one collective gathers; shards a second time within a node
shard_files          shards in files, read ahead and written behind
memory_pool          memory, streams and events of what is gathered
coordinator          who needs which unit, and which is gathered ahead
backward_order       when backward needs them, and when it is done with them
saved_tensors        what autograd has saved of, and asks of, parameters that have gone
gathered_parameters  `GatheredParameters`, for scripts
undone_edits         by which it knows that a change is none
"""
