"""Who owns which elements, and the flat buffers that follow from it.

fragments                   the table of who owns what, and that of stage 3: pure integers
group                       the tensors of a parameter group, laid out by either
flattening, cut_rows        copies into the flat buffer, and between whole and cut
low_precision               steps of masters in bf16 or fp16
parameter_histories         which parameters of a group have missed steps
model_writes                what scripts do to parameters behind the optimizer
value_samples               a few elements of parameters, by which writes are noticed
publisher                   how updated shards reach everybody
dealt_parameters            whole parameters, for optimizers that need them
model_ranks, model_slices   which ranks hold which parameters, and which slices
exchange, loading_in_place  shards in memory and in checkpoints
"""
