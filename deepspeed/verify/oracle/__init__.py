"""The numerics oracle: a user's model under a configuration, on several local ranks, against one
plain-torch process.

`workload`: model, batches, loss. `plan`: which runs. `ranks`: processes. `worker`, `system`: one
rank. `reference`, `judge`: what must be, and by how much it may differ. `verdicts`: the table,
whose rows are `report`'s.
`text`, `picture`: how it is shown. `cli`: the command `ds_verify`, `usage` its error.
`hugging_face` builds models by their names, `randomness` makes runs repeatable.
"""
