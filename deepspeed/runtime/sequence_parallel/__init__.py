"""Training on long sequences, under upstream's names, all of which `ulysses_sp` has. `attention_hf`
splits the attention of transformers' models over ranks, with `sequence_masks`; `tiled_compute`
holds activations of one piece at a time; `loader_adapter` cuts batches; `parallel_state_sp` has
getters.
"""
