"""Training on long sequences, under upstream's names.

`ulysses_sp` has them all. `attention_hf` splits the attention of transformers' models over ranks,
with the masks of `sequence_masks`; `tiled_compute` holds activations of one piece of the sequence
at a time.

`loader_adapter` cuts batches, `parallel_state_sp` has upstream's getters of who shares sequences.
"""
