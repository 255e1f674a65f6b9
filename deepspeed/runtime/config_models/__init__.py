"""The typed configuration tree: one pydantic model per JSON block, one line per key.

``training.TrainingConfig`` is the root. ``reader`` turns a user's dict into it and words the
errors, ``refusals`` says which values this release does not honour. Nothing here is imported by
``import deepspeed`` (startup: pydantic is slow to import); the upstream module paths load these
classes on first use.
"""
