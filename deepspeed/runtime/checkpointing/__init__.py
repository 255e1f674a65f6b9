"""Saving and loading an engine, for training to go on.

In the order of a reader: `training_state` names what is read and set of the engine;
`engine_checkpoint` is what the engine owns, and hands on to `saving` and `loading`. `folders` knows
which ranks share a folder, how they agree, and which one is loaded.

What the files hold: `model_files` the weights, `optimizer_files` the optimizer's state,
`process_files` what each process alone knows, `description` what stands beside the weights in the
model file, and what the manifest says.

Saving: `save_job` writes a folder and gives it its name, `background_save` does so while training
goes on. Loading: `optimizer_resharding` and `weight_resharding` make what other ranks have saved
into this rank's state. Whole weights: `whole_weights` exports them, `safetensors_loading` reads
them into shards.
"""
