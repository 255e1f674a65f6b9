"""Samples chosen by how difficult they are: `data_sampler` says which sample comes when,
`indexed_dataset` reads and writes the files that say how difficult each one is.
"""
