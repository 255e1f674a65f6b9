"""A pipeline of m micro-batches trains as a plain engine that accumulates them."""

import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_grad
from unit.common import DistributedTest
from unit.v1.contract.reference import LEARNING_RATE, Tensors
from unit.v1.looping import each
from unit.v1.pipe.contract.cases import PipeCase
from unit.v1.pipe.contract.model import Micro, micro_batch, parameter_groups
from unit.v1.pipe.contract.reference import Chain
from unit.v1.pipe.contract.runner import PipeRun

STEPS = 2
# fp32: sums over micro-batches and ranks in another order.
TOLERANCE = 1e-6


def whole_batch(step: int, accumulation: int) -> list[Micro]:
    """Micro-batches of an even number of rows: two of `micro_batch`, one after the other."""
    pairs = [
        [micro_batch(step, half, micro, 2, False) for half in range(2)]
        for micro in range(accumulation)
    ]
    return [
        Micro(
            tuple(torch.cat(parts) for parts in zip(a.inputs, b.inputs, strict=True)),  # type: ignore[arg-type]
            torch.cat((a.labels, b.labels)),
        )
        for a, b in pairs
    ]


def own_half(micro: Micro) -> Micro:
    """What this of two data-parallel ranks sees of it."""
    half = slice(None, None, 2) if dist.get_rank() == 0 else slice(1, None, 2)
    return Micro((micro.inputs[0][half], micro.inputs[1][half]), micro.labels[half])


def plain_run(accumulation: int) -> list[tuple[float, Tensors, float, Tensors]]:
    """Loss, gradients, norm and parameters of each step of a data-parallel engine."""
    chain = Chain(tied=False)
    named = chain.trainable()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
    }
    optimizer = torch.optim.SGD(parameter_groups(named), lr=LEARNING_RATE)
    engine, _, _, _ = deepspeed.initialize(model=chain, optimizer=optimizer, config=config)
    run = []
    for step in range(STEPS):
        total = torch.zeros(())
        for index, micro in enumerate(whole_batch(step, accumulation)):
            if index:
                engine.step()
            loss = engine(own_half(micro))
            engine.backward(loss)
            total += loss.detach() / accumulation
        dist.all_reduce(total)
        grads = {name: safe_get_full_grad(param).clone() for name, param in named.items()}
        engine.step()
        params = {name: param.detach().clone() for name, param in named.items()}
        run.append((total.item() / 2, grads, float(engine.get_global_grad_norm()), params))
    engine.destroy()
    return run


class TestTwoRanks(DistributedTest):
    world_size = 2

    @each(accumulation=(1, 4, 7))
    def test_mean_of_micro_batches(self, accumulation: int) -> None:
        # Kills: a division by the wrong number (or by m and by the stages), a micro-batch left out
        # of a ragged last round.
        wanted = plain_run(accumulation)
        for schedule in ("1f1b", "interleaved", "zero_bubble"):
            case = PipeCase(
                0,
                "fp32",
                accumulation,
                False,
                False,
                True,
                False,
                "huge",
                2,
                pipe=2,
                schedule=schedule,
            )
            run = PipeRun(case)
            for step, (loss, grads, norm, params) in enumerate(wanted):
                found = run.engine.train_batch(iter(whole_batch(step, accumulation)))
                assert abs(found.item() - loss) <= TOLERANCE * loss
                assert abs(float(run.engine.get_global_grad_norm()) - norm) <= TOLERANCE * norm
                bounds = {
                    name: TOLERANCE * max(norm, value.norm().item())
                    for name, value in params.items()
                }
                own = {name: value for name, value in grads.items() if name in run.params}
                run.compare_tensors(step, "gradient", run.found, own, bounds)
                run.compare_tensors(
                    step, "parameter", run.everywhere(run.masters()), params, bounds
                )
            run.engine.destroy()
            assert run.failures == []
