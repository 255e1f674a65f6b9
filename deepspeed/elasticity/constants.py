"""Constants of the ``elasticity`` block, as upstream has them. Owns no logic.

Those of its keys (``MIN_GPUS``, ``MIN_GPUS_DEFAULT``, ...) are derived from its model.
"""

from deepspeed._lazy import lazy_attributes

ELASTICITY = "elasticity"
DEEPSPEED_ELASTICITY_CONFIG = "DEEPSPEED_ELASTICITY_CONFIG"
"""Environment variable in which a resource scheduler says, as JSON, which elasticity block it
planned with.
"""
LATEST_ELASTICITY_VERSION = 0.2
MINIMUM_DEEPSPEED_VERSION = "0.3.8"

__getattr__ = lazy_attributes(
    __name__, tables=("deepspeed.runtime.config_models.getters:ELASTICITY",)
)
