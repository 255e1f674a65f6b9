"""Runs one configuration of the pipeline's contract on this rank and compares it. Collective."""

import math
from collections.abc import Callable
from typing import Any

import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from unit.v1.contract import reference as contract
from unit.v1.contract.reference import Expected, Tensors
from unit.v1.contract.runner import Checks, config_of, on_host
from unit.v1.gathering import from_all_ranks
from unit.v1.pipe.contract import reference
from unit.v1.pipe.contract.cases import PipeCase
from unit.v1.pipe.contract.model import Embed, loss_of, make_layers, parameter_groups, project

EVALUATED = 50  # the step whose data is evaluated


def pipe_config(case: PipeCase) -> dict[str, Any]:
    """The case as a configuration."""
    config = config_of(case)
    plan = {"schedule": case.schedule, "activation_checkpoint_interval": case.checkpoint}
    config["pipeline"] = plan
    if case.adaptive:
        power = int(math.log2(contract.LOSS_SCALE))
        config["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": power}
    return config


def make_pipeline(case: PipeCase) -> PipelineModule:
    """The model of the reference as a pipeline."""
    layers: list[Any] = make_layers(case.tied)
    if case.tied:
        weights = layers[0].state_dict()
        layers[0] = TiedLayerSpec("embed", Embed)
        layers[-1] = TiedLayerSpec("embed", Embed, forward_fn=project)
    how = {"dynamic_shape": case.dynamic, "num_model_chunks": case.chunks}
    method = list(case.parts) or "uniform"
    module = PipelineModule(
        layers, num_stages=case.pipe, loss_fn=loss_of, partition_method=method, **how
    )
    if case.tied and "embed" in module.tied_modules:
        module.tied_modules["embed"].load_state_dict(weights)
    return module


class PipeRun(Checks):
    """One case, through `train_batch` and `eval_batch`."""

    steps = 2

    def __init__(self, case: PipeCase) -> None:
        module = make_pipeline(case)
        super().__init__(case, module)
        self.pipe_case = case
        self.replica = module.grid.data_parallel_id
        optimizer = torch.optim.SGD(self.parameter_groups(), lr=contract.LEARNING_RATE)
        config = pipe_config(case)
        self.engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
        self.found: Tensors = {}
        self._observe_gradients()

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What this stage optimizes."""
        return parameter_groups(self.params)

    def train(self, step: int) -> torch.Tensor:
        """One step; returns the loss."""
        batch = reference.batch(self.pipe_case, step, self.replica)
        loss: torch.Tensor = self.engine.train_batch(iter(batch))
        return loss

    def _observe_gradients(self) -> None:
        """Read the reduced gradients right before each step, which `train_batch` takes itself."""
        original: Callable[..., None] = self.engine._take_model_step

        def observed(*args: Any) -> None:
            self.found = self.gradients()
            original(*args)

        self.engine._take_model_step = observed

    def everywhere(self, tensors: Tensors) -> Tensors:
        """Of all stages; a difference between ranks that hold the same is a failure."""
        whole: Tensors = {}
        for rank, copy in enumerate(from_all_ranks(tensors)):
            for name, value in copy.items():
                if not torch.equal(whole.setdefault(name, value), value):
                    self.fail(self.engine.global_steps, f"rank {rank} has another {name}")
        return whole

    def run(self) -> list[str]:
        """All steps and an evaluation; returns the failures."""
        try:
            masters = self.everywhere(self.masters())
            for step in range(self.steps):
                with on_host():
                    expected, loss = self._expected(step, masters)
                found = self.train(step)
                masters = self.everywhere(self.masters())
                with on_host():
                    self._compare_loss(step, float(found), loss)
                    self.compare_gradients(step, self.found, self._own(expected))
                    bounds = expected.param_bounds
                    self.compare_tensors(step, "parameter", masters, expected.params, bounds)
                self._check_model(step, masters)
            self._evaluate(masters)
        finally:
            self.engine.destroy()
        return self.failures

    def _expected(self, step: int, masters: Tensors) -> tuple[Expected, float]:
        if self.case.precision == "fp32":
            return reference.fp32_run(self.pipe_case, self.steps)[step]
        decay = {name: 0.1 if value.dim() >= 2 else 0.0 for name, value in masters.items()}
        return reference.half_step(self.pipe_case, masters, decay, step)

    def _own(self, expected: Expected) -> Expected:
        """The same without gradients of parameters that other stages have."""
        grads = {name: value for name, value in expected.grads.items() if name in self.params}
        return Expected(**{**vars(expected), "grads": grads})

    def _compare_loss(self, step: int, found: float, wanted: float) -> None:
        if not abs(found - wanted) <= contract.FP32_TOLERANCE * abs(wanted):
            self.fail(step, f"loss {found!r} is not {wanted!r}")

    def _check_model(self, step: int, masters: Tensors) -> None:
        """Parameters are the rounded masters, frozen ones untouched, no step was skipped."""
        for name, param in self.params.items():
            if not torch.equal(param.detach(), masters[name].to(self.dtype)):
                self.fail(step, f"{name} is not its master rounded to {self.dtype}")
        for name, before in self.frozen.items():
            if not torch.equal(self.model.get_parameter(name), before):
                self.fail(step, f"frozen {name} changed")
        if self.engine.skipped_steps or self.engine.global_steps != step + 1:
            counts = f"{self.engine.skipped_steps} of {self.engine.global_steps}"
            self.fail(step, f"{counts} steps were skipped")

    def check_unchanged(self, step: int, before: Tensors) -> None:
        """No parameter is another one than `before`."""
        after, bounds = self.everywhere(self.masters()), dict.fromkeys(before, 0.0)
        self.compare_tensors(step, "parameter", after, before, bounds)

    def _evaluate(self, masters: Tensors) -> None:
        """`eval_batch` says the mean loss on all ranks and changes nothing."""
        case = self.pipe_case
        with on_host():
            wanted = reference.mean_loss(reference.half_chain(case, masters), case, EVALUATED)
        found = self.engine.eval_batch(iter(reference.batch(case, EVALUATED, self.replica)))
        self._compare_loss(EVALUATED, float(found), wanted)
        self.check_unchanged(EVALUATED, masters)


def leave_together() -> None:
    """End a test in which a batch failed: closed connections leave the harness's barrier nothing.

    A rank that has noticed stays until the others have, which would notice that it left instead.
    """
    store = dist.get_store()
    store.set(f"noticed/{dist.get_rank()}", "1")
    store.wait([f"noticed/{rank}" for rank in range(dist.get_world_size())])
    dist.destroy_process_group()
