"""Constants of the ``elasticity`` block, as upstream has them; its keys' are its model's."""

from deepspeed._lazy import lazy_attributes

ELASTICITY = "elasticity"
# Environment variable in which a resource scheduler says, as JSON, with which block it planned.
DEEPSPEED_ELASTICITY_CONFIG = "DEEPSPEED_ELASTICITY_CONFIG"
LATEST_ELASTICITY_VERSION = 0.2
MINIMUM_DEEPSPEED_VERSION = "0.3.8"

__getattr__ = lazy_attributes(
    __name__, tables=("deepspeed.runtime.config_models.getters:ELASTICITY",)
)
