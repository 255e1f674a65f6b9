"""Messages between the stages of a pipeline.

wire            what a message consists of: shapes and dtypes ahead of the data
channel         one direction between two stages, and what has been sent and must stay alive
stage_channels  all channels of a stage
posting         when a stage may post its receives
failure         one rank's failure is every rank's
"""
