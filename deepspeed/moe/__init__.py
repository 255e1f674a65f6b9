"""Mixture of experts: `gating` decides which expert sees which token, `dispatch` moves tokens
inside a rank and `mappings` across tensor-parallel ones, `experts` are this rank's, `sharded_moe`
exchanges, `layer` is what a model uses, `utils` sorts parameters. `auto_ep` spreads a model's own
experts, with `expert_rows` and `owner_exchange`.
"""
