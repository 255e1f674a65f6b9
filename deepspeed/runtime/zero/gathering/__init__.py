"""Who has the parameters of stage 3 whole, from when until when.

What is gathered, and into which memory:

    gather_settings     which of the configuration's keys decide it
    units               which parameters are gathered together, found in the model
    gather_unit         parameters that one collective gathers
    memory_pool         the memory of what is gathered
    secondary_shards    shards a second time within a node

When, for training:

    coordinator         who needs which unit
    use_order           in which order units were used, which is what is gathered ahead
    backward_order      when backward needs them, and when it is done with them
    saved_tensors       what autograd has saved of memory that was given back
    gradient_shapes     what autograd asks of parameters that have gone

And for scripts: `gathered_parameters`, which is `GatheredParameters`, and `undone_edits`, by which
it knows that a change is none.
"""
