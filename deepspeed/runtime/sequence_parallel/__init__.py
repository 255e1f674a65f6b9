"""Training on long sequences, under upstream's names.

`ulysses_sp` has them all. `tiled_compute` holds activations of one piece of the sequence at a time.
"""
