"""What the configuration says of when the parameters of stage 3 are whole."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed import comm as dist


@dataclass(frozen=True)
class GatherSettings:
    """The keys of stage 3 that say what is whole when; in elements.

    Attributes:
        param_persistence: Parameters up to this size stay whole between steps,
        model_persistence: until they are so many together.
        prefetch: Gathered ahead.
        max_live: Whole at a time, but for what is in use.
        max_reuse: Kept whole if used again within this distance.
        by_broadcast: Gather by one broadcast per rank.
        overlap: Gather beside the model's work.
        loads: Shards are on the host (`offload_param`).
        fusion: Small units are gathered together up to so many.
        secondary_group: Ranks that keep copies of gathered shards among them (hpZ); None: nobody.
    """

    param_persistence: int = 100_000
    model_persistence: int = 1 << 62
    prefetch: int = 50_000_000
    max_live: int = 1_000_000_000
    max_reuse: int = 1_000_000_000
    by_broadcast: bool = False
    overlap: bool = True
    loads: bool = False
    fusion: int = 800_000
    secondary_group: dist.Group = None
