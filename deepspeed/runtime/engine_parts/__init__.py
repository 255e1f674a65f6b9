"""What an engine does beside forward, backward and step.

Each file but the last two is a mixin of `DeepSpeedEngine`, with upstream's methods of one subject:

    sequence        the step sequence, or the error that says why there is none to use
    settings        getters of the configuration: a table of names and keys
    ranks           which process of the run an engine is: device, number, groups
    data            loaders of training data, and how difficult the data of a step may be
    optimizers      from the client's optimizer, or the configuration's, to the step sequence
    losses          by what a loss is divided and scaled, and who is shown it
    plain_backward  `loss.backward()`, which the engine notices and does not run
    accumulation    which micro-batches make up a step, as scripts ask and set it
    reports         what a step has come to, and the lines that the engine logs
    checkpoints     saving and loading, which `checkpointing` does
    device_memory   state that moves to the host and back
    compiling       torch.compile, in place
    timing          the engine's phases, timed and told to observers: an object of the engine's
    patches         what clients put in the place of upstream's methods: called, or told
"""
