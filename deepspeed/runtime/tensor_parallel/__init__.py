"""Automatic tensor parallelism (AutoTP): the layers of a model are cut over ranks that see the same
batch.

    ranks               who shares layers, as an mpu
    layers              a column- and a row-parallel layer, and how a layer becomes one
    structure           which layers of a model are which, found from names and shapes
    families            what names and shapes do not tell about known models
    partition_config    the same as a configuration says it
    model_plan          the same as a model of transformers says it
    model_init          `deepspeed.tp_model_init`: cut before there is an engine
    cutting             broadcast, cut, and what is to be known of it afterwards
    sharded_models      the cut of models that zero.Init has sharded
    whole_layers        what scripts read of layers that are cut
    same_inputs         tensor-parallel ranks see the same batch and draw the same random numbers

What follows from a cut model is the machinery of any tensor parallelism: slices are marked, so that
reduction, norm and checkpoints know them (`sharding.model_ranks`, `sharding.model_slices`).
"""
