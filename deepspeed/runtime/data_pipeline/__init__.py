"""What decides which data a step sees: `curriculum_scheduler` says how difficult it may be,
`sequence_curriculum` tells the model of it, `data_sampling` chooses samples by it.
"""
