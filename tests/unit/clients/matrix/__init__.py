"""The matrix of client libraries: scenarios of their users, each at several ZeRO stages on two
ranks. `make campaign NAME=clients` runs all of it.

- `row.py`: what a scenario is, and the program on every rank that runs some of them;
- `reference.py`: what plain torch makes of the same samples in one process;
- `accelerate_rows.py`, `transformers_rows.py`, `lightning_rows.py`, ...: the scenarios;
- `shipped_rows.py`: programs that come with the libraries; `stand_ins.py`: what they take from the
  hub; `host.py`: runs one on a machine without a GPU;
- `__main__.py`: starts them and prints how each ended.
"""
