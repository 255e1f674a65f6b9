"""The gradient ledger: a debug mode that counts what every rank and micro-batch contributes to
every gradient.

`scope` says what contributes, `gradient_ledger` counts and compares, `families` and `findings` word
what is wrong, `fingerprint` is how a gradient is recognized without being kept.
"""
