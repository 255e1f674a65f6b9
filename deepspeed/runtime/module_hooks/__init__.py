"""What the runtime has put on the modules of a user's model, to hear what happens there.

parameter_reads     modules whose parameters hear of being read, and hooks that copies do not have
parameter_arrivals  parameters that are gathered while the next forward runs
late_parameters     modules and parameters that a model was given later
"""
