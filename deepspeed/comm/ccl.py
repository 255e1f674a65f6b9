"""oneCCL through its torch bindings: the same process group with backend ``ccl``."""

import importlib
from datetime import timedelta

from deepspeed.comm.torch import TorchBackend

ONECCL_MODULE = "oneccl_bindings_for_pytorch"


class CCLBackend(TorchBackend):
    """`TorchBackend` that loads the oneCCL bindings first, which registers the backend.

    Raises:
        ImportError: the bindings are not installed.
    """

    def __init__(
        self,
        timeout: timedelta,
        init_method: str | None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "ccl",
        store: object = None,
    ) -> None:
        try:
            # optional: vendor package.
            importlib.import_module(ONECCL_MODULE)
        except ImportError as error:
            raise ImportError(
                f"dist_backend 'ccl' needs the package {ONECCL_MODULE}, which cannot be imported "
                f"({error}); install it or use dist_backend='gloo'"
            ) from error
        super().__init__("ccl", timeout, init_method, rank, world_size, name, store)
