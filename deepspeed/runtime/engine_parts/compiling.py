"""Compiling the model of an engine in place."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.moe.auto_ep import named_spread_experts
from deepspeed.runtime.compiler import CompiledForward, compile_in_place, traces_subclasses
from deepspeed.runtime.engine_parts.engine_state import EngineState
from deepspeed.utils.logging import logger, warn_once


class EngineCompiling:
    """The compilation of one engine's model."""

    def __init__(self, engine: EngineState) -> None:
        self._engine = engine
        self.is_compiled = False
        self._compiled: list[CompiledForward] = []

    def compile(
        self,
        backend: object = None,
        compile_kwargs: dict[str, Any] | None = None,
        schedule: object = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the model in place with torch.compile.

        Where gradients are reduced, or moved to their place, while backward goes on, its repeated
        blocks (`runtime.compiler.blocks_of`) are compiled one by one, and what is around them is
        not: the backward of one graph gives all its gradients at its end, too late for either. A
        model without such blocks is compiled as a whole. At ZeRO stage 3 it is the forwards of
        blocks, so that gathering stays outside of graphs.

        `backend` is torch.compile's (None: the configuration's `compile.backend`, else the
        accelerator's), as `compile_kwargs`, which are put over `compile.kwargs`; with
        `compile.disable` nothing is compiled. DeepCompile schedules, compiled autograd (gradient
        hooks would be traced into the graph), and at stage 3 experts that `expert_parallel` spreads
        raise NotImplementedError.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise NotImplementedError(
                "compile(schedule=..., compiled_autograd_enabled=...): not supported; leave both "
                "out"
            )
        if self.is_compiled:
            return
        settings = self._engine._config.tree.compile
        if settings.disable:
            warn_once("engine.compile() leaves the model as it is: compile.disable is true")
            return
        offload = self._engine.parameter_offload
        if offload is not None and named_spread_experts(self._engine.module):
            raise NotImplementedError(
                "compile() at ZeRO stage 3 with expert_parallel.enabled: true is not supported: "
                "use zero_optimization.stage 2, or leave compile() out"
            )
        if offload is not None and not traces_subclasses():
            logger.warning(
                "compile() at ZeRO stage 3: torch %s breaks a graph wherever it reads a parameter, "
                "so that next to nothing is compiled; torch 2.9 does not",
                torch.__version__,
            )
        sequence = self._engine._sequence
        backend = backend or settings.backend or get_accelerator().get_compile_backend()
        self._compiled = compile_in_place(
            self._engine.module,
            by_block=sequence is not None and sequence.works_during_backward,
            has_hooks=None if offload is None else offload.gathers_for,
            **{"backend": backend, **settings.kwargs, **(compile_kwargs or {})},
        )
        self.is_compiled = True

    def remove(self) -> None:
        """Give modules their own forwards back."""
        for compiled in self._compiled:
            compiled.remove()
        self._compiled = []
