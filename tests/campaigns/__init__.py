"""What runs long on purpose: `make campaign` lists it, `make campaign NAME=...` runs one of it.

All write what they found to ``--output``; how many random trials a campaign makes is ``--rounds``,
what draws them is ``--seed``. The tests that some of them select stay in `unit`, where the suite
runs a share of them.
"""
