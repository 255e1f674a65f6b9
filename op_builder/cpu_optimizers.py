"""Builders of the optimizers' work on the host: Adam, Adagrad, Lion, and exact sums of squares.

Owns: names, sources and flags of those ops. Does not own: their callers
(`deepspeed/ops/host_optimizer.py`, `squares.py`), nor how ops are built.
"""

from .builder import OpBuilder


class CPUOptimizerBuilder(OpBuilder):
    """What the ops have in common: one source each, in plain C++ against Python's own
    headers, with OpenMP.
    """

    def include_paths(self) -> list[str]:
        """Return the folder from which sources name each other."""
        return ["csrc"]

    def cxx_args(self) -> list[str]:
        """Return flags that leave every operation rounded by itself: results do not depend on the
        instruction set.

        None of them chooses an instruction set; the op holds all of them and chooses when it runs.
        """
        return [*super().cxx_args(), "-ffp-contract=off", "-fno-math-errno", "-fopenmp"]

    def extra_ldflags(self) -> list[str]:
        """Return OpenMP's flag; the library is torch's own, which is in the process already."""
        return ["-fopenmp"]


class CPUAdamBuilder(CPUOptimizerBuilder):
    """Adam and AdamW, with AMSGrad or without."""

    BUILD_VAR = "DS_BUILD_CPU_ADAM"
    NAME = "cpu_adam"

    def absolute_name(self) -> str:
        """Return the name of the extension module."""
        return "deepspeed.ops.adam.cpu_adam_op"

    def sources(self) -> list[str]:
        """Return the op's source."""
        return ["csrc/adam/cpu_adam.cpp"]


class CPUAdagradBuilder(CPUOptimizerBuilder):
    """Adagrad."""

    BUILD_VAR = "DS_BUILD_CPU_ADAGRAD"
    NAME = "cpu_adagrad"

    def absolute_name(self) -> str:
        """Return the name of the extension module."""
        return "deepspeed.ops.adagrad.cpu_adagrad_op"

    def sources(self) -> list[str]:
        """Return the op's source."""
        return ["csrc/adagrad/cpu_adagrad.cpp"]


class CPULionBuilder(CPUOptimizerBuilder):
    """Lion."""

    BUILD_VAR = "DS_BUILD_CPU_LION"
    NAME = "cpu_lion"

    def absolute_name(self) -> str:
        """Return the name of the extension module."""
        return "deepspeed.ops.lion.cpu_lion_op"

    def sources(self) -> list[str]:
        """Return the op's source."""
        return ["csrc/lion/cpu_lion.cpp"]


class CPUSquaresBuilder(CPUOptimizerBuilder):
    """Exact sums of squares."""

    BUILD_VAR = "DS_BUILD_CPU_SQUARES"
    NAME = "cpu_squares"

    def absolute_name(self) -> str:
        """Return the name of the extension module."""
        return "deepspeed.ops.cpu_squares_op"

    def sources(self) -> list[str]:
        """Return the op's source."""
        return ["csrc/squares/cpu_squares.cpp"]
