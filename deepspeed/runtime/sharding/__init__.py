"""Who owns which elements, and the flat buffers that follow from it.

`fragments` is pure integers; `group` holds the tensors laid out by it; `gather` fills every rank's
copy from the owners.
"""
