"""The gradient ledger: a debug mode that counts what every rank and micro-batch contributes to
every gradient.

- `gradient_ledger`: `GradientLedger`, the observer. `settled` compares what autograd handed out
  with what the optimizer is about to use. `runtime.engine_parts.verification` makes and attaches
  it; engines and optimizers call it by the protocol of `gradients.observer`.
- `recorder`: `ContributionRecorder`, which the ledger derives from: hooks on the parameters record
  what autograd hands out.
- `fingerprint`: how a gradient is recognized without being kept. Pure; taken by both.
- `contributors`: which ranks' fingerprints are added up for which piece of a parameter. Called by
  the ledger; reads `gradients.scope`.
- `families`: after a deviation, from the reports of all ranks to findings. Pure; the ledger calls
  `explain_all` with what the ranks have exchanged.
- `findings`: which error of synchronization explains a deviation, and its words. Pure; called by
  `families`.

`deepspeed.verify.ledger()` is the door for users.
"""
