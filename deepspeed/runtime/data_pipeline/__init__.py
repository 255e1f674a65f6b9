"""What decides which data a step sees: `curriculum_scheduler` says how difficult it may be,
and `data_sampling` chooses samples by it.
"""
