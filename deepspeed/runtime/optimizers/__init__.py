"""What happens at a step.

`step_sequence` is the order of a step, the same for every stage and precision. `master_weights`
keeps fp32 masters of sharded groups, `replicated_optimizer` has every parameter whole on every
rank. `state_layout` is what each says of its state to those who save, load and reshard it.
`lr_scheduler_factory` and `lr_tuning` make learning-rate schedules.
"""
