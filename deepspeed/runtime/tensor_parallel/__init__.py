"""Automatic tensor parallelism (AutoTP): the layers of a model are cut over ranks that see the same
batch (`same_inputs`). `layers` has the parallel ones; `structure` finds which are which, with
`families`, or as the configuration or the model itself says (`partition_config`); `cutting` cuts
them, also those of zero.Init, `model_init` before there is an engine. `whole_layers` is for scripts
that read. Slices are marked, so that reduction, norm and checkpoints know them.
"""
