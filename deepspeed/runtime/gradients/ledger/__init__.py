"""The gradient ledger: a debug mode that counts what every rank and micro-batch contributes to
every gradient. `deepspeed.verify.ledger()` is the door for users.

`gradient_ledger` compares what autograd handed out, which `recorder` keeps as a `fingerprint`, with
what the optimizer is about to use; `contributors` says whose are added up. After a deviation,
`families` and `findings` turn the reports of all ranks into what happened.
"""
