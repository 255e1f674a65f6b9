"""Everything that happens to a gradient between backward and the optimizer.

In the order in which a gradient meets them:

- `accumulation`: which micro-batch is the boundary. One tracker per engine; engines and optimizers
  ask it.
- `local_accumulator`: the sum of micro-batches on this rank, in a dtype of its own. The fp16 and
  bf16 optimizers and stage 1 fill it in `backward_epilogue`.
- `reduction`: what every way of reducing has in common; `replicated_reduction` is that of
  gradients which every rank keeps whole, the others are the stages'.
- `buckets`, `readiness`: which parameters share a collective, and when it leaves. Pure;
  `bucket_hooks` reports gradients to the second, late ones too, `bucket_buffers` is the memory.
- `reduce_rule`: by what a gradient is scaled, the only place that knows. Made by
  `optimizer_factory`, asked by whoever reduces.
- `replicated`: the all-reduce of gradients that every rank keeps whole. Called by the optimizers
  without ZeRO in `reduce_gradients`.
- `static_sums`: refuses sums in `param.grad` that a replayed graph overwrites. Stage 1 on devices.
- `sink`: the owner's gradient, on the device or the host, that stages 1 and 2 add reduced slices
  to.
- `norm`: the global norm and the clipping factor. `StepSequence.step` asks for both.

Beside them stand those who watch:

- `observer`: the calls by which engines and optimizers tell what happens to gradients. The no-op
  default is nobody; see [Note: a gradient's life] there.
- `scope`: what they can tell when asked: where reduced gradients lie, and whose contributions they
  are made of.
- `ledger/`: the observer that checks every contribution. `runtime.engine_parts.verification`
  attaches it; nothing else here knows of it.

Called from `optimizers/`, `zero/`, `fp16/` and the engines above; imports `sharding/`, `streams`
and `comm` only.

For gradients that are complete otherwise than by one hook: `sequence_parts` are summed over
tensor-parallel ranks first, `unused` refuses that there are none. `overlay` keeps a narrow flat
buffer in the memory of a wide one.
"""
