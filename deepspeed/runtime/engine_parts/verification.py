"""Which checks of gradient synchronization an engine trains under, and how they are switched on.

They are named in the configuration's `verify` block and the environment variable DS_VERIFY (a
comma-separated list of "ledger", "collectives", "streams", "masters" and "poison"), and imported
only when they are wanted.
"""

from __future__ import annotations

import importlib
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepspeed.comm.watch import lone_waits
from deepspeed.comm.watch.lookout import stop_all
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.engine_parts.patches import tell_of_patches
from deepspeed.runtime.gradients.observer import UNOBSERVED
from deepspeed.runtime.zero.init_context import Init

if TYPE_CHECKING:
    from deepspeed.runtime.config_models.features import VerifyConfig
    from deepspeed.runtime.engine_parts.engine_state import WatchedEngine
    from deepspeed.runtime.gradients.ledger.gradient_ledger import GradientLedger

VARIABLE = "DS_VERIFY"
CHECKS = ("ledger", "collectives", "streams", "masters", "poison")
# The stream checker belongs to the tools above the engine, which knows this entry point of it only.
STREAM_CHECK = "deepspeed.verify.streams.check"

# Engines that have not been destroyed, and what is to be called with each new one.
engines: weakref.WeakSet[Any] = weakref.WeakSet()
watchers: list[Callable[[WatchedEngine], None]] = []


def wanted_checks(block: VerifyConfig) -> set[str]:
    """Read the checks that the configuration or the environment asks for."""
    words = {word.strip() for word in os.environ.get(VARIABLE, "").split(",")} - {""}
    unknown = sorted(words - set(CHECKS))
    if unknown:
        raise DeepSpeedConfigError(
            f"{VARIABLE}: {', '.join(unknown)!r} is unknown; use a comma-separated list of "
            f"{', '.join(CHECKS)}"
        )
    return words | {check for check in CHECKS if getattr(block, check)}


def configure(engine: WatchedEngine, block: VerifyConfig) -> Callable[[], None]:
    """Switch on what is wanted for a new engine; returns what its next step has to call."""
    wanted = wanted_checks(block)
    check_patches(engine)
    at_step = None
    lone_waits.watch.report_s = block.lone_gather_report
    if "ledger" in wanted:
        attach_ledger(engine)
    if "collectives" in wanted:
        from deepspeed.comm.watch import intent  # optional: only a run that asks for it pays for it

        intent.enable(timeout_s=block.collectives_timeout)
    if "streams" in wanted:
        check: Any = importlib.import_module(STREAM_CHECK)
        check.enable_stream_checking()
        at_step = check.raise_findings
    if "masters" in wanted and engine._sequence is not None:
        engine._sequence.masters.writes.compares_all = True
    if "poison" in wanted:
        if engine.parameter_offload is None:
            raise DeepSpeedConfigError(
                f"verify.poison ({VARIABLE}=poison): parameters are let go at ZeRO stage 3 only; "
                "leave it out"
            )
        engine.parameter_offload.resources.poison_what_goes()
    engines.add(engine)
    weakref.finalize(engine, lone_waits.watch.forget)
    for watcher in watchers:
        watcher(engine)

    def at_first_step() -> None:
        check_patches(engine)  # what was put on the engine since it is there
        engine._check_at_step = at_step
        if at_step is not None:
            at_step()

    return at_first_step


def check_patches(engine: Any) -> None:
    """Tell of what the program has put on the engine, its parts and `zero.Init` that nothing calls;
    an error if any check is wanted.
    """
    raises = bool(wanted_checks(engine._config.tree.verify))
    parts = (engine.module, engine.optimizer, engine.parameter_offload, Init)
    tell_of_patches(engine, *parts, raises=raises)


def attach_ledger(engine: WatchedEngine, raises: bool = True) -> GradientLedger | None:
    """Give the engine a ledger from now on; None if it has no optimizer. An accumulation that has
    begun is not checked. Unless it `raises`, deviations are only kept in `findings`.
    """
    # optional: only a run that asks for it pays for it
    from deepspeed.runtime.gradients.ledger.gradient_ledger import GradientLedger

    sequence = engine._sequence
    if sequence is None:
        return None
    if isinstance(sequence.observer, GradientLedger):
        return sequence.observer
    ledger = GradientLedger(
        sequence.gradient_pieces(),
        {param: name for name, param in engine.module.named_parameters()},
        engine._gradient_scope(),
        engine.tracker,
        sum_op=engine._config.tree.gradient_allreduce_op == "sum",
        raises=raises,
    )
    if engine.tracker.window.is_plain is not None:
        ledger.skip_window()
    sequence.observe(ledger)
    return ledger


def engine_ended(engine: WatchedEngine) -> None:
    """End the threads that nobody wants any more, since the engine was destroyed."""
    engines.discard(engine)
    lone_waits.watch.forget()
    stop_all(if_idle=True)


def detach_ledger(engine: WatchedEngine) -> None:
    """Take the ledger off again."""
    if engine._sequence is not None:
        engine._sequence.observe(UNOBSERVED)
