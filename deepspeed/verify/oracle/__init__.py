"""The numerics oracle: a user's model under a configuration, on several local ranks, against one
plain-torch process.

`workload`: model, batches, loss; `hugging_face` builds models by their names, `drawn` batches by
their shapes; `batches`: how they are cut; `parts`: what ranks divide. `plan`: which engines are
checked for what, and by which runs. `ranks`: processes. `worker`, `system`: one rank; `changes`:
what two runs change in their model meanwhile. `reference`, `judge`: what must be, and by how much
it may differ. `verdicts`: the rows of the `report`; `picture` draws them. `cli`: the command
`ds_verify`.
"""


class UsageError(ValueError):
    """The command was used wrongly; the text names argument, value and remedy."""
