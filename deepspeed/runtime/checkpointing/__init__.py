"""Saving and loading an engine, for training to go on.

In the order of a reader: `training_state` names what is read and set of the engine;
`engine_checkpoint` is what the engine owns, and hands on to `saving` and `loading`.

What the files hold: `model_files` the weights, `model_state` what stands beside them in the model
file, `optimizer_files` the optimizer's state, `host_state` what each process alone knows,
`window_files` the gradients of an accumulation window that is open.

Saving: `save_job` writes a folder and gives it its name, `background_save` does so while training
goes on, `storage_nodes` knows which ranks share the folder, `description` tells the manifest what
is in it.

Loading: `folder_choice` finds the folder and checks it, `optimizer_resharding` makes what other
ranks have saved into this rank's optimizer state, `weight_resharding` takes this rank's slices of
consolidated parameters.

Stage 3: `sharded_weights` writes the weights and exports them whole, with every rank's experts by
`whole_experts`; `sharded_loading` and `safetensors_loading` read them into shards.
"""
