"""Elastic training: batch sizes that fit many world sizes (`elasticity`), its block (`config`), the
agent that restarts processes when nodes come or go (`elastic_agent`), the `ds_elastic` command
(`cli`). `constants` and `utils` are upstream's small files; names load on first use.
"""

from __future__ import annotations

from deepspeed._lazy import lazy_attributes

_NAMES = {
    "DSElasticAgent": "deepspeed.elasticity.elastic_agent",
    "ELASTICITY": "deepspeed.elasticity.constants",
    "ENABLED": "deepspeed.elasticity.constants",
    "ENABLED_DEFAULT": "deepspeed.elasticity.constants",
    "compute_elastic_config": "deepspeed.elasticity.elasticity",
    "elasticity_enabled": "deepspeed.elasticity.elasticity",
    "ensure_immutable_elastic_config": "deepspeed.elasticity.elasticity",
    "is_torch_elastic_compatible": "deepspeed.elasticity.utils",
}
__getattr__ = lazy_attributes(
    __name__, _NAMES, ("cli", "config", "constants", "elastic_agent", "elasticity", "utils")
)
