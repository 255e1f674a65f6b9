"""A pipeline whose stages hold experts, and its comparison with one process that has all layers and
all experts. Collective.

The balancing losses travel with the hidden states, in a tuple, and are added up by each layer with
experts; bounds are `runner`'s.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm.watch import observation
from deepspeed.comm.watch.observation import CollectiveCall, group_size
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule
from unit.v1.moe.runner import (
    AUX_WEIGHT,
    CLIP,
    LEARNING_RATE,
    NUM_EXPERTS,
    WIDTH,
    Case,
    CaseRun,
    Expert,
    micro_batch,
    reference_step,
)
from unit.v1.moe.slow_gate import Tensors, moe_forward

Carried = tuple[torch.Tensor, torch.Tensor]  # hidden [rows, width] and the balancing losses so far
NUM_LAYERS, WITH_EXPERTS = 6, (1, 4)
STEPS = 2


class Dense(nn.Module):
    """A linear layer; the first one is given the hidden states alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, carried: torch.Tensor | Carried) -> Carried:
        """One step."""
        hidden, balance = (
            carried
            if isinstance(carried, tuple)
            else (carried, carried.new_zeros((), dtype=torch.float32))
        )
        return self.linear(hidden), balance


class Mixture(nn.Module):
    """Experts beside a shortcut."""

    def __init__(self, ep_size: int, k: int, drop: bool) -> None:
        super().__init__()
        self.moe = MoE(
            WIDTH,
            Expert(),
            NUM_EXPERTS,
            ep_size,
            k=k,
            min_capacity=1,
            drop_tokens=drop,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )

    def forward(self, carried: Carried) -> Carried:
        """One step."""
        hidden, balance = carried
        output, l_aux, _ = self.moe(hidden)
        return hidden + output, balance + l_aux


def loss_of(carried: Carried, target: torch.Tensor) -> torch.Tensor:
    """Mean square error in fp32, plus the balancing losses."""
    hidden, balance = carried
    return (hidden.float() - target).square().mean() + AUX_WEIGHT * balance


@dataclass(frozen=True)
class PipeCase(Case):
    """One configuration of a pipeline; `ep_size` is that of the first layer with experts.

    Attributes:
        parts: Boundaries of the parts' layers.
        other_size: `ep_size` of the second layer with experts.
        schedule: Of the pipeline; "interleaved" has two chunks per stage.
        interval: Layers per recomputed segment, 0 for none.
    """

    parts: tuple[int, ...] = (0, 3, NUM_LAYERS)
    other_size: int = 2
    schedule: str = "1f1b"
    interval: int = 0

    @property
    def chunks(self) -> int:
        """Model chunks per stage."""
        return 2 if self.schedule == "interleaved" else 1

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return (len(self.parts) - 1) // self.chunks


def make_pipeline(case: PipeCase) -> PipelineModule:
    """The pipeline of a case, over all ranks."""
    sizes = dict(zip(WITH_EXPERTS, (case.ep_size, case.other_size), strict=True))
    layers = [
        LayerSpec(Mixture, sizes[index], case.k, case.drop) if index in sizes else LayerSpec(Dense)
        for index in range(NUM_LAYERS)
    ]
    return PipelineModule(
        layers,
        num_stages=case.stages,
        loss_fn=loss_of,
        partition_method=list(case.parts),
        num_model_chunks=case.chunks,
    )


def initial_parameters() -> dict[str, torch.Tensor]:
    """All parameters of the whole model, exact in bf16, every expert different."""
    generator = torch.Generator().manual_seed(5)
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(NUM_LAYERS):
        names = (
            [f"{index}.experts.{number}" for number in range(NUM_EXPERTS)]
            if index in WITH_EXPERTS
            else [f"{index}.linear"]
        )
        shapes |= {f"{index}.wg": (NUM_EXPERTS, WIDTH)} if index in WITH_EXPERTS else {}
        for name in names:
            shapes |= {f"{name}.weight": (WIDTH, WIDTH), f"{name}.bias": (WIDTH,)}
    return {
        name: (torch.randn(shape, generator=generator) * 0.5).bfloat16().float()
        for name, shape in shapes.items()
    }


def reference_loss(
    params: Tensors, case: PipeCase, batch: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Loss of one micro-batch of one data-parallel rank."""
    hidden, target = batch
    balance = torch.zeros(())
    for index in range(NUM_LAYERS):
        own = {
            name.removeprefix(f"{index}."): value
            for name, value in params.items()
            if name.startswith(f"{index}.")
        }
        if index in WITH_EXPERTS:
            output, l_aux = moe_forward(hidden, own, case.gate, NUM_EXPERTS)
            hidden, balance = hidden + output, balance + l_aux
        else:
            hidden = nn.functional.linear(hidden, own["linear.weight"], own["linear.bias"])
    return loss_of((hidden, balance), target)


class WorldReductions:
    """Observes the shapes of reductions over all ranks."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def run(self, call: CollectiveCall, proceed: Callable[[], Any]) -> Any:
        """See `CollectiveObserver`."""
        if (
            call.name in ("all_reduce", "reduce")
            and group_size(call.group) == dist.get_world_size()
        ):
            self.shapes.append(tuple(call.argument("tensor").shape))
        return proceed()


class PipeRun(CaseRun):
    """One case, through `train_batch`; norms are counted without the ledger's reduction."""

    def __init__(self, case: PipeCase, verify: dict[str, Any] | None = None) -> None:
        self.case: PipeCase = case
        self.failures: list[str] = []
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.ledger = bool(verify and verify.get("ledger"))
        self.module = make_pipeline(case)
        self.replica, self.replicas = (
            self.module.grid.data_parallel_id,
            self.module.grid.data_parallel_size,
        )
        self.initial = initial_parameters()
        self.params = {
            self._whole_name(name): param for name, param in self.module.named_parameters()
        }
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(self.initial[name])
        config = {
            **self._config(),
            "pipeline": {
                "schedule": case.schedule,
                "activation_checkpoint_interval": case.interval,
            },
        }
        self.engine = deepspeed.initialize(
            model=self.module, config={**config, "verify": verify or {}}
        )[0]
        self.found: dict[str, torch.Tensor] = {}
        self.reductions = WorldReductions()
        self._observe_gradients()

    def _whole_name(self, name: str) -> str:
        layer, _, rest = name.partition(".")
        ep_size = {WITH_EXPERTS[0]: self.case.ep_size, WITH_EXPERTS[1]: self.case.other_size}.get(
            int(layer), 1
        )
        return f"{layer}.{self._global_name(rest, self.replica % ep_size * NUM_EXPERTS // ep_size)}"

    def _observe_gradients(self) -> None:
        """Read gradients right before each step, and count its norm's collectives."""
        original: Callable[..., None] = self.engine._take_model_step

        def observed(*args: Any) -> None:
            self.found = self._grads()
            self.reductions.shapes.clear()
            observation.add_observer(self.reductions)
            try:
                original(*args)
            finally:
                observation.remove_observer(self.reductions)

        self.engine._take_model_step = observed

    def run(self) -> list[str]:
        """All steps; returns the failures."""
        try:
            masters = self._masters()
            self._compare(0, "first weight", masters, self.initial, 0.0)
            for step in range(STEPS):
                masters = self._train(step, masters)
        finally:
            self.engine.destroy()
        return [f"{self.case}: {failure}" for failure in self.failures]

    def _train(self, step: int, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        case = self.case
        expected = reference_step(before, case, step, self.replicas, reference_loss)
        losses = [loss for of_replica in expected.losses for loss in of_replica]
        wanted = sum(losses) / len(losses)
        own = (
            micro_batch(step, self.replica, micro, case.dtype) for micro in range(case.accumulation)
        )
        loss = float(self.engine.train_batch(own))
        masters = self._masters()
        self._compare(step, "gradient", self.found, expected.grads, case.tolerance)
        self._compare(
            step, "parameter", masters, expected.params, 3 * case.tolerance * LEARNING_RATE * CLIP
        )
        norm = float(self.engine.get_global_grad_norm())
        for what, number, right in (("loss", loss, wanted), ("norm", norm, expected.norm)):
            if not math.isclose(number, right, rel_tol=case.tolerance):
                self.failures.append(f"step {step}: {what} {number} instead of {right}")
        if not self.ledger and len(self.reductions.shapes) != 1:
            self.failures.append(
                f"step {step}: the norm took reductions of {self.reductions.shapes} elements, not "
                "one"
            )
        return masters
