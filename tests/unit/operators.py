"""Which operators are run."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Names of what is run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Launches:
    """A tracer that writes down the names of what is launched on streams."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def launched(self, operator: str, stream: Any, accesses: Any) -> None:
        self.names.append(operator)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None
