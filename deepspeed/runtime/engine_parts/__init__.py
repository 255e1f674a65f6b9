"""What an engine does beside forward, backward and step.

Objects that it has, one subject a file:

    engine_state    what these objects know of their engine
    face            upstream's methods, each one line that names the part which has it
    settings        getters of the configuration: one table of names and keys
    ranks           which process of the run an engine is: its device, its number, its groups
    data            loaders of training data, and how difficult the data of a step may be
    optimizers      from the client's optimizer, or the configuration's, to the step sequence
    losses          by what a loss is divided and scaled, and who is shown it
    plain_backward  `loss.backward()`, which the engine notices and does not run
    digest          one hash over masters and optimizer state, however they are cut
    reports         what a step has come to, and the lines that the engine logs
    checkpoints     saving and loading, which `checkpointing` does
    device_memory   state that moves to the host and back
    train_batch     a whole step by one call
    vertical        micro-batches that go through each unit of stage 3 together
    compiling       torch.compile, in place
    timing          the engine's phases, timed and told to observers
    model_setup     what is done to a model before it trains: cast, made the same on all ranks
    verification    which checks an engine trains under, and how they are switched on
    patches         what clients put in the place of upstream's methods: called, or told
"""
