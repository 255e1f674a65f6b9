"""Mixture of experts.

gating          which expert sees which token
dispatch        tokens moved by these decisions inside a rank
mappings        and across tensor-parallel ranks
experts         this rank's experts
sharded_moe     gate, exchange over the expert group, experts
layer           what a model uses
utils           parameters sorted into optimizer groups
auto_ep         a model's own experts, spread over ranks
expert_rows     parameters with a row per expert
owner_exchange  each token's experts run where they are
"""
