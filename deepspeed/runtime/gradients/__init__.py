"""Everything that happens to a gradient between backward and the optimizer, in its order:

- `accumulation`: which micro-batch is the boundary; `local_accumulator`: the sum of micro-batches
  on this rank, in a dtype of its own.
- `reduction`: what every way of reducing has in common; `replicated_reduction` is that of
  gradients which every rank keeps whole (`replicated`), the others are the stages'.
- `buckets`, `readiness`: which parameters share a collective, and when it leaves. Pure;
  `bucket_hooks` reports gradients to the second, late, absent and static ones too, and
  `bucket_buffers` is the memory.
- `reduce_rule`: by what a gradient is scaled, the only place that knows.
- `sink`: the owner's gradient, on the device or the host; `canonical`: summed in an order that no
  number of ranks changes. `norm`: global norm and clipping factor.
- `idle`: the parameters that no gradient reaches, which a step leaves as they are; `asked` warns
  scripts that look for a gradient in `param.grad` when it lies in shards.
- `sequence_parts`: gradients that are summed over tensor-parallel ranks first. `overlay`: a narrow
  flat buffer in the memory of a wide one.

Beside them stand those who watch: `observer` (see [Note: a gradient's life] there), `scope`, what
they can tell when asked, and `ledger/`, the observer that checks every contribution.
"""
