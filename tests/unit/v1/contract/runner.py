"""Runs one configuration of the contract suite on this rank and compares it. Collective."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import Sim_Accelerator, simulate
from deepspeed.verify import Budget, check_budgets, check_streams
from unit import models
from unit.v1.contract import reference
from unit.v1.contract.matrix import Case
from unit.v1.contract.model import BUCKETS, ROWS, make_model, micro_batch, parameter_groups
from unit.v1.contract.reference import Expected, Tensors, trainable
from unit.v1.gathering import gradients_of, masters_of


def steps_of(case: Case) -> int:
    """Enough steps that every turn of `takes_branch` comes."""
    return 3 if case.accumulation == 1 else 2


def config_of(case: Case) -> dict[str, Any]:
    """The case as a configuration."""
    dtype, _, accumulation_dtype = case.precision.partition("+")
    more: dict[str, Any] = {"gradient_clipping": reference.CLIP if case.clip else 0.0}
    if dtype == "fp16":
        more["fp16"] = {"enabled": True, "loss_scale": reference.LOSS_SCALE}
    if accumulation_dtype:
        more["data_types"] = {"grad_accum_dtype": accumulation_dtype}
    more["zero_optimization"] = {
        "num_optimizer_instances": case.instances,
        "overlap_comm": case.overlap,
        "reduce_scatter": case.reduce_scatter,
        "reduce_bucket_size": BUCKETS[case.bucket],
        "allgather_bucket_size": BUCKETS[case.bucket],
        "offload_optimizer": {"device": "cpu" if case.offload else "none"},
    }
    return models.config_of(case.stage, ROWS, case.accumulation, dtype, **more)


def sums_dtype(case: Case) -> torch.dtype:
    """The narrowest dtype that a sum over micro-batches or ranks passes through.

    With fp32 accumulation stages 0 and 1 send a bf16 model's fp32 accumulator, others halves.
    """
    if case.precision == "fp32":
        return torch.float32
    if case.precision == "bf16+fp32" and case.stage < 2:
        return torch.float32
    return reference.DTYPES[case.precision.partition("+")[0]]


def on_host() -> AbstractContextManager[None]:
    """Leaves a simulated device: comparisons only use copies of their own."""
    accelerator = get_accelerator()
    return accelerator.on_host() if isinstance(accelerator, Sim_Accelerator) else nullcontext()


class Checks:
    """What is compared of one case on this rank; `failures` says what was not as it must be."""

    engine: Any

    def __init__(self, case: Case, model: torch.nn.Module) -> None:
        self.case = case
        self.failures: list[str] = []
        self.rank = dist.get_rank()
        self.dtype = reference.DTYPES[case.precision.partition("+")[0]]
        self.model = model
        frozen = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad}
        self.frozen = {name: value.to(self.dtype).clone() for name, value in frozen.items()}
        self.params = trainable(model)

    def run(self) -> list[str]:
        """All steps; returns the failures."""
        raise NotImplementedError(f"{type(self).__name__} must define run()")

    def fail(self, step: int, message: str) -> None:
        """Remember what went wrong; the run goes on so that all ranks stay together."""
        self.failures.append(f"{self.case.name}: step {step}, rank {self.rank}: {message}")

    @property
    def is_plain(self) -> bool:
        """Whether the parameters are their own masters and `param.grad` is the gradient."""
        return self.case.stage == 0 and self.case.precision == "fp32"

    def masters(self) -> Tensors:
        """The fp32 parameters, whole, on every rank."""
        return masters_of(self.params, self.is_plain)

    def gradients(self) -> Tensors:
        """What the coming step will use; nothing if the system says that there is none."""
        return gradients_of(self.params, self.is_plain)

    def compare_gradients(self, step: int, grads: Tensors, expected: Expected) -> None:
        """Gradients and their norm."""
        self.compare_tensors(step, "gradient", grads, expected.grads, expected.grad_bounds)
        norm, bound = float(self.engine.get_global_grad_norm()), expected.norm_bound
        if not abs(norm - expected.norm) <= bound:
            self.fail(step, f"norm {norm!r} is not {expected.norm!r} within {bound:.2e}")

    def compare_tensors(
        self, step: int, what: str, found: Tensors, wanted: Tensors, bounds: dict[str, float]
    ) -> None:
        """Every wanted tensor is found, and as close as it must be."""
        for name, value in wanted.items():
            if name not in found:
                self.fail(step, f"{what} of {name} is missing")
                continue
            error = (found[name].double() - value.double()).norm().item()
            if found[name].shape != value.shape or not error <= bounds[name]:
                allowed = f"allowed {bounds[name]:.3e}, its norm {value.norm().item():.3e}"
                self.fail(step, f"{what} of {name} is off by {error:.3e} ({allowed})")


class CaseRun(Checks):
    """One case, through the engine's forward, backward and step."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, self._model(case))
        groups = parameter_groups(self.model)  # type: ignore[arg-type]  # the contract's model
        decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}  # type: ignore[attr-defined]
        self.weight_decay = {name: float(decay[id(p)]) for name, p in self.params.items()}
        optimizer, config = self._optimizer(groups), self._config()
        self.engine = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)[0]

    def _model(self, case: Case) -> torch.nn.Module:
        return make_model()

    def _config(self) -> dict[str, Any]:
        return config_of(self.case)

    def _optimizer(self, groups: list[Any]) -> torch.optim.Optimizer:
        if self.case.optimizer == "adamw":
            return torch.optim.AdamW(groups, lr=0.01)
        return torch.optim.SGD(groups, lr=reference.LEARNING_RATE)

    def run(self) -> list[str]:
        """All steps; returns the failures."""
        try:
            masters = self.masters()
            adam = ReferenceAdam(self, masters) if self.case.optimizer == "adamw" else None
            for step in range(steps_of(self.case)):
                start = masters
                self._backwards(step)
                grads = self.gradients()
                self.engine.step()
                masters = self.masters()
                with on_host():
                    expected = self._expected(step, start)
                    self.compare_gradients(step, grads, expected)
                    if adam is None:
                        wanted = expected.params, expected.param_bounds
                        self.compare_tensors(step, "parameter", masters, *wanted)
                    else:
                        adam.compare(step, grads, masters)
                self._check_replicas(step, masters)
                self._check_rest(step)
        finally:
            self.engine.destroy()
        return self.failures

    def _backwards(self, step: int) -> None:
        for micro in range(self.case.accumulation):
            if micro:
                self.engine.step()
            loss = self.engine(*micro_batch(step, self.rank, micro, self.case.world))
            self.engine.backward(loss)

    def _expected(self, step: int, start: Tensors) -> Expected:
        case = self.case
        if case.precision == "fp32" and case.optimizer == "sgd":
            run = reference.fp32_run(steps_of(case), case.accumulation, case.clip, case.world)
            return run[step]
        precision, sums_in = case.precision.partition("+")[0], sums_dtype(case)
        given = (start, self.weight_decay, precision, sums_in, step)
        return reference.half_step(*given, case.accumulation, case.clip, case.world)

    def _check_replicas(self, step: int, masters: Tensors) -> None:
        """All ranks' parameters are equal bit for bit, and are the rounded masters."""
        flat = torch.cat([param.detach().reshape(-1) for param in self.params.values()]).float()
        rounded = torch.cat([masters[name].reshape(-1) for name in self.params]).to(self.dtype)
        copies = [torch.empty_like(flat) for _ in range(self.case.world)]
        dist.all_gather(copies, flat)
        # One read of all: a simulated device takes long for each.
        if not torch.equal(flat, rounded.float()):
            for name, param in self.params.items():
                if not torch.equal(param.detach(), masters[name].to(self.dtype)):
                    self.fail(step, f"{name} is not its master rounded to {self.dtype}")
        if not torch.equal(torch.stack(copies), flat.expand(len(copies), -1)):
            self.fail(step, "ranks have different parameters")

    def _check_rest(self, step: int) -> None:
        """Frozen parameters are untouched, and padding is zero wherever there is some."""
        for name, before in self.frozen.items():
            if not torch.equal(self.model.get_parameter(name), before):
                self.fail(step, f"frozen {name} changed")
        for index, group in enumerate(getattr(self.engine.optimizer, "groups", ())):
            table = group.table
            own = [fragment.in_shard for fragment in table.of_shard(group.shard_rank)]
            places = zip(table.offsets, table.numels, strict=True)
            whole = [slice(start, start + numel) for start, numel in places]
            tails = {"parameters": rest(group.flat, whole)}
            tails |= {"masters": rest(group.master, own), "gradients": rest(group.grad, own)}
            for what, tail in tails.items():
                if tail.numel() and tail.count_nonzero():
                    found = f"padding of group {index}'s {what}"
                    self.fail(step, f"{found} is not zero: {tail.tolist()}")


def rest(flat: torch.Tensor, parts: Sequence[slice]) -> torch.Tensor:
    """What of a flat tensor is in none of the parts."""
    cuts = sorted((part.start, part.stop) for part in parts)
    starts, stops = [*(start for start, _ in cuts), flat.numel()], [0, *(stop for _, stop in cuts)]
    return torch.cat([flat[stop:start] for stop, start in zip(stops, starts, strict=True)])


class ReferenceAdam:
    """torch's AdamW on whole masters, fed with the gradients that the system reports."""

    def __init__(self, run: CaseRun, masters: Tensors) -> None:
        self.run = run
        with on_host():
            copies = {name: value.clone() for name, value in masters.items()}
            self.params = {name: torch.nn.Parameter(value) for name, value in copies.items()}
        groups = [
            {"params": [param], "weight_decay": run.weight_decay[name]}
            for name, param in self.params.items()
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01)

    def compare(self, step: int, grads: Tensors, masters: Tensors) -> None:
        """Step the reference and compare: the arithmetic is the same, only its grouping differs."""
        norm = float(self.run.engine.get_global_grad_norm())
        factor = reference.clip_factor(norm, self.run.case.clip)
        for name, param in self.params.items():
            param.grad = grads[name] * factor
        self.optimizer.step()
        wanted = {name: param.detach() for name, param in self.params.items()}
        sizes = {name: max(1.0, value.norm().item()) for name, value in wanted.items()}
        bounds = {name: reference.FP32_TOLERANCE * size for name, size in sizes.items()}
        self.run.compare_tensors(step, "parameter", masters, wanted, bounds)


class Named(Protocol):
    @property
    def name(self) -> str: ...


class Runs(Protocol):
    def run(self) -> list[str]: ...  # the failures, each with the case's name and ":" in front


def run_cases(cases: Sequence[Named], run: Callable[[Any], Runs] = CaseRun) -> None:
    """Run all cases on this world as `run(case)`; an AssertionError lists all ranks' deviations."""
    failures: list[str] = []
    for case in cases:
        try:
            failures += run(case).run()
        except Exception as error:
            what = f"{case.name}: {type(error).__name__}: {error}"
            raise AssertionError(f"{what}; before: {failures[:5]}") from error
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, failures)
    found = [failure for rank_failures in everywhere for failure in rank_failures]
    if found:
        broken, shown = {failure.split(":")[0] for failure in found}, "\n".join(found[:40])
        share = f"{len(broken)} of {len(cases)} configurations deviate"
        raise AssertionError(f"{share} ({len(found)} findings):\n{shown}")


def run_simulated(cases: Sequence[Named], run: Callable[[Any], Runs] = CaseRun) -> None:
    """The same where all work is late, gradients are accumulated on two side streams, and the
    checker listens.
    """
    torch.set_num_threads(1)
    few = Budget(queues=1, processors=1)
    with simulate(backward_streams=2), check_streams(), check_budgets(few):
        run_cases(cases, run)
