"""Saving and loading an engine, for training to go on.

`training_state` names what is read and set of the engine, which calls `saving.save` and
`loading.load`. `folders`: which ranks share a folder, and agree.
Content: `model_files`, `optimizer_files`, `process_files` and `description` (of the manifest).
`save_job` writes and publishes, `background_save` while training goes on. Loading what others
saved: `optimizer_resharding`, `weight_resharding`; `whole_weights`, `safetensors_loading`.
"""
