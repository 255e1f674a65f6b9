"""What happens at a step.

`step_sequence` is the order of a step, the same for every stage and precision, over parts:
`step_outcome` is the loss scale and what steps have come to; `master_weights` are fp32 masters of
sharded groups, which `group_layout` lays out; `state_layout` is what is in files, and what each
optimizer says of it to those who save, load and reshard. `settings` are what the parts are made
from. `partial_steps` leaves parameters out of a step. `replicated_optimizer` has every parameter
whole on every rank. `untrainable` says what is refused when training starts, `on_shards` which
torch optimizers may update shards, as `update_probe` tries; `owner_steps` steps those that need
whole parameters; `muon_groups` says which parameters Muon takes. `lr_scheduler_factory` and
`lr_tuning` make learning-rate schedules.
"""
