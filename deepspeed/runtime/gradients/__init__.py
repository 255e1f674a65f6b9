"""Everything that happens to a gradient between backward and the optimizer.

`accumulation` says what is the boundary, `reduce_rule` by what a gradient is scaled, `buckets` and
`readiness` which collective carries it and when, `local_accumulator` where micro-batches are
summed, `norm` what its global norm is.
"""
