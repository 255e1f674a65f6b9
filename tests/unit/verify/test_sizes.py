"""Sizes that a small model never reaches are lowered, each of them."""

import ast
from pathlib import Path

import deepspeed
from deepspeed.verify.sizes import SIZES

# How constants are called that say how many elements are taken at a time.
ENDINGS = ("NUMEL", "CHUNK", "AT_ONCE")
REASONS = {
    ("deepspeed.runtime.gradients.buckets", "ALIGNED_NUMEL"): "a border of memory, no piece",
    ("deepspeed.runtime.gradients.ledger.fingerprint", "ROWS_AT_ONCE"): "of a check, not of a step",
    ("deepspeed.runtime.zero.estimates.stages_1_and_2", "BUCKET_NUMEL"): "an estimate, no training",
    ("deepspeed.runtime.zero.parameters.own_draws", "KEPT_NUMEL"): "a limit with an error",
}


def constants() -> set[tuple[str, str]]:
    """Module and name of every such constant of the package."""
    package = Path(deepspeed.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        module = ".".join(("deepspeed", *path.relative_to(package).with_suffix("").parts))
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = (one for target in targets for one in ast.walk(target))
            found |= {
                (module, one.id)
                for one in names
                if isinstance(one, ast.Name) and one.id.endswith(ENDINGS)
            }
    return found


def test_every_size_of_a_piece_is_lowered_or_has_a_reason() -> None:
    # Kills: a new constant that simulated runs of small models never reach.
    assert constants() == {*SIZES, *REASONS}
