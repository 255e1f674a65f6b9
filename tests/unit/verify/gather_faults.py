"""Faults of gathers that run beside the next forward, and the guard that must find each; see
`faults`, which lists them with its own.
"""

from __future__ import annotations

from unit.verify.mutation_form import Mutation

ARRIVALS = "deepspeed/runtime/module_hooks/parameter_arrivals.py"
READS = "deepspeed/runtime/module_hooks/parameter_reads.py"
RACE = r"never waits for <nccl stream"

GATHERS = (
    Mutation(
        "a module does not wait for its parameters",
        READS,
        (('getattr(type(param), "ds_was_read", None)', "None"),),
        "streams: gathered beside forward",
        RACE + r"(.|\n)*gather_scenarios",
    ),
    Mutation(
        "a second stream does not wait",
        ARRIVALS,
        (("if stream not in self._waited:", "if not self._waited:"),),
        "streams: gathered beside forward, two streams",
        RACE + r"(.|\n)*on_two_streams",
    ),
    Mutation(
        "a read outside of modules does not wait",
        ARRIVALS,
        (("        if func not in _NO_READ:\n", "        if False:\n"),),
        "streams: gathered beside forward, read elsewhere",
        RACE + r"(.|\n)*in kept",
    ),
    Mutation(
        "a gather does not wait for the update",
        ARRIVALS,
        (("        self._context.wait_for([self._context.current_stream()])\n", ""),),
        "streams: gathered beside forward, bf16",
        r"never waits for <default stream>",
    ),
    Mutation(
        "readers wait for what came before the gather",
        ARRIVALS,
        (
            (
                "            gather().wait()  # this stream waits, not the host\n",
                "            gather()\n",
            ),
        ),
        "streams: gathered beside forward",
        r"never waits for <nccl stream",
    ),
)
