"""`ds_tensor` as scripts get it: a shard that hears when it is given other memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class OwnShard(torch.Tensor):
    """An alias of a shard, of which gathers and masters would not know that a script has let it be
    somewhere else; `shard.data = values` writes the values instead. What is computed with it is an
    ordinary tensor, and so is what is copied or saved.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way, as of nn.Parameter
    _replace: Callable[[torch.Tensor], None]

    @classmethod
    def of(cls, shard: torch.Tensor, replace: Callable[[torch.Tensor], None]) -> OwnShard:
        """The alias.

        Args:
            shard: 1-D.
            replace: Called with what it is to hold.
        """
        alias: OwnShard = shard.detach().as_subclass(cls)
        alias._replace = replace
        return alias

    @property
    def data(self) -> torch.Tensor:
        """The elements, as of any tensor."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self._replace(values)

    def set_(self, values: Any, *place: Any) -> OwnShard:
        """As `shard.data = values`."""
        self._replace(values)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)
