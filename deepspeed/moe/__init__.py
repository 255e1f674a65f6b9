"""Mixture of experts: the `MoE` layer, its gates, its experts, and the optimizer groups its
parameters need.

From the bottom: `gating` decides which expert sees which token, `dispatch` moves tokens by those
decisions inside a rank, `mappings` across tensor-parallel ranks, `experts` holds this rank's
experts, `sharded_moe` joins them with the all-to-all over the expert group, `layer` is what a model
uses, `utils` sorts parameters. Process groups are the engine's `ParallelMap`'s; reduction of expert
gradients is the optimizers'.

`auto_ep` spreads a model's own experts over ranks: `expert_rows` are parameters with a row per
expert, and `owner_exchange` runs each token's experts where they are.
"""
