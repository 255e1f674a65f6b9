"""What happens at a step.

`step_sequence` is the order of a step, the same for every stage and precision; `client_methods` is
what clients ask and set of any optimizer; `step_outcome` what a step has come to. `master_weights`
keeps fp32 masters of sharded groups, which `readable_masters` lets others read;
`replicated_optimizer` has every parameter whole on every rank, and `replicated_reduction` sends its
gradients during backward. `untrainable` says what is refused when training starts, `on_shards`
which torch optimizers may update shards, as `update_probe` tries; `owner_steps` steps those that
need whole parameters; `muon_groups` says which parameters Muon takes. `state_layout` is what each
says of its state to those who save, load and reshard it. `lr_scheduler_factory` and `lr_tuning`
make learning-rate schedules.
"""
