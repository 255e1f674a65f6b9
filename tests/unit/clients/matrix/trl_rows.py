"""What users of trl do: its trainers, with and without adapters; `zero3_trl` resumes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import deepspeed
from unit.clients.matrix.reference import assert_close, params_of, whole
from unit.clients.matrix.row import Row, main
from unit.clients.matrix.transformers_rows import forget, said
from unit.clients.train_with_trl import KINDS, MORE_KINDS, STEPS, config, make_trainer

# Those that draw no random numbers end where the same trainer without DeepSpeed ends.
DETERMINED = ("sft", "sft-stream", "sft-ulysses", "dpo", "dpo-precomputed", "reward")


def train(kind: str, folder: Path, plan: dict[str, Any] | None) -> Any:
    """One run."""
    forget(plan is not None)
    made = make_trainer(kind, folder, plan)
    made.train()
    return made


def row(kind: str) -> Callable[[Path, int], None]:
    """The scenario of one trainer."""

    def run(folder: Path, stage: int) -> None:
        made = train(kind, folder, config(stage))
        assert type(made.model_wrapped) is deepspeed.DeepSpeedEngine
        assert made.model_wrapped.zero_optimization_stage() == stage
        losses = said(made, "loss")
        assert len(losses) == STEPS and all(map(math.isfinite, losses)), losses
        assert all(norm > 0 for norm in said(made, "grad_norm"))
        values = whole(made.model)
        if kind in DETERMINED:
            plain = train(kind, folder, None)
            assert_close(values, params_of(plain.model), 2e-5)

    return run


# Older releases give no position_ids, without which a piece of a sequence has no place.
SPLITS = "return_position_ids" in DataCollatorForLanguageModeling.__dataclass_fields__
CHOSEN = [kind for kind in (*KINDS, *MORE_KINDS) if SPLITS or kind != "sft-ulysses"]
ROWS = {kind: Row(row(kind), (0, 1, 2, 3)) for kind in CHOSEN}

if __name__ == "__main__":
    main(ROWS, forget, forget)
