"""What happens at a step.

`step_sequence` is the order of a step, the same for every stage and precision. `master_weights`
keeps fp32 masters of sharded groups, `replicated_optimizer` has every parameter whole on every
rank. `lr_scheduler_factory` and `lr_tuning` make learning-rate schedules.
"""
