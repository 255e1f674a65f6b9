"""Updates on the host that begin before the norm is known: scripts that look or write in between,
disks that fail, streams. That bits are those of updates that wait, `test_product` shows.
"""

from __future__ import annotations

import errno
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.ops import early_update, state_files
from deepspeed.ops.aio.handle import AsyncIOHandle
from deepspeed.ops.host_optimizer import HostOptimizer
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.optimizers.master_weights import MasterWeights
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from deepspeed.verify import check_streams
from unit.common import DistributedTest
from unit.models import config_of, drawn
from unit.one_process import mean_square, placed
from unit.v1.offload.test_nvme_offload import same

WIDTH = 24
WINDOW = 64  # elements: a shard has six of them


def config(
    stage: int = 2,
    optimizer: str = "AdamW",
    device: str = "cpu",
    offload: dict[str, Any] | None = None,
    **zero: Any,
) -> dict[str, Any]:
    # It clips, but nothing.
    more: dict[str, Any] = {"gradient_clipping": 1e9}
    # Files of state have no names.
    places = {"device": device, "nvme_path": tempfile.gettempdir()}
    zero["offload_optimizer"] = {**places, "buffer_count": 1, **(offload or {})}
    zero = {"reduce_bucket_size": 200, "stage3_param_persistence_threshold": 0, **zero}
    more["optimizer"] = {"type": optimizer, "params": {"lr": 0.01, "weight_decay": 0.1}}
    return config_of(stage, 4, 1, "bf16", zero_optimization=zero, **more)


def start(settings: dict[str, Any], early: bool = True, depth: int = 3) -> Any:
    torch.manual_seed(3)
    wide = [nn.Linear(WIDTH, WIDTH) for _ in range(depth)]
    layers = (*wide, nn.Tanh(), nn.Linear(WIDTH, 7))
    settings["zero_optimization"]["offload_optimizer"]["speculative_update"] = early
    state_files.WINDOW_NUMEL = WINDOW  # in this rank
    return deepspeed.initialize(model=nn.Sequential(*layers), config=settings)[0]


def backward(engine: Any, number: int) -> None:
    x = drawn(10 * number + deepspeed.comm.get_rank(), 4, WIDTH)
    engine.backward(mean_square(engine, placed(engine, x)))


def train(engine: Any, steps: int) -> list[torch.Tensor]:
    for number in range(steps):
        backward(engine, number)
        engine.step()
    return everything(engine)


def everything(engine: Any) -> list[torch.Tensor]:
    """Masters, state and weights as they are now."""
    masters = engine.optimizer.masters
    states = [masters.optimizer.state.get(group.masters[0], {}) for group in masters.groups]
    kept = [value for own in states for _, value in sorted(own.items())]
    kept += [tensor for group in masters.groups for tensor in (group.master, group.flat)]
    return [torch.as_tensor(value).detach().clone() for value in kept]


def counts(engine: Any) -> tuple[int, int]:
    early = engine.optimizer.masters.early
    return early.hits, early.misses


def weight(engine: Any) -> nn.Parameter:
    return next(iter(engine.module.parameters()))


def edit_grad(engine: Any) -> None:
    param = weight(engine)
    safe_set_full_grad(param, safe_get_full_grad(param) * 2)


def edit_state(engine: Any) -> None:
    param = weight(engine)
    value = safe_get_full_optimizer_state(param, "exp_avg")
    safe_set_full_optimizer_state(param, value * 2, "exp_avg")


def edit_master(engine: Any) -> None:
    safe_set_full_fp32_param(weight(engine), torch.ones(WIDTH, WIDTH))


def edit_rate(engine: Any) -> None:
    engine.optimizer.param_groups[0]["lr"] *= 0.5


def edit_local_gradient(engine: Any) -> None:
    grad = safe_get_local_grad(weight(engine))
    if grad is not None:
        grad.data.mul_(1.5)  # torch does not count it


def edit_averaged(engine: Any) -> None:
    for own in engine.optimizer.averaged_gradients[0]:
        own.data.mul_(1.5)


def load_state(engine: Any) -> None:
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())


def begin_again(engine: Any) -> None:
    engine.optimizer.zero_grad()
    backward(engine, 7)


def go_backward_again(engine: Any) -> None:
    backward(engine, 8)


# What a script does between the boundary's backward and the step, at stage 2.
WRITES = (
    edit_grad,
    edit_state,
    edit_master,
    edit_rate,
    edit_local_gradient,
    load_state,
    begin_again,
    go_backward_again,
)


class TestScripts(DistributedTest):
    world_size = 2

    def test_what_is_written_before_the_step_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Kills: gradients that are added to, or begun again, behind an update that was made of
        # them; edits that the step does not see.
        monkeypatch.setattr(early_update, "MAX_PAUSE", 0)
        for stage, device, acts in (
            (2, "cpu", WRITES),
            (2, "nvme", WRITES),
            (3, "cpu", (edit_averaged,)),
        ):
            engine, plain = start(config(stage, device=device)), start(config(stage), early=False)
            for own in (engine, plain):
                backward(own, 0)
                own.step()
            for number, act in enumerate(acts, 1):
                for own in (engine, plain):
                    backward(own, number)
                    act(own)
                    own.step()
                assert same(everything(engine), everything(plain)), act
                # One rank may have nothing of the parameter.
                missed = torch.tensor([engine.optimizer.masters.early.misses])
                deepspeed.comm.all_reduce(missed, op=deepspeed.comm.ReduceOp.MAX)
                assert missed == number, act

    def test_who_reads_sees_what_was_and_changes_nothing(self, tmpdir: str) -> None:
        for stage, device in ((2, "cpu"), (3, "cpu"), (3, "nvme")):
            engine, plain = start(config(stage, device=device)), start(config(stage), early=False)
            seen, views = [], []
            for own in (engine, plain):
                backward(own, 0)
                own.step()
                views += [safe_get_local_fp32_param(weight(own))]
                backward(own, 1)
                folder = Path(tmpdir, str(stage), device, str(own is plain))
                own.save_checkpoint(str(folder))
                with torch.no_grad():
                    output = own(placed(own, drawn(3, 4, WIDTH)))
                state = safe_get_full_optimizer_state(weight(own), "exp_avg")
                seen += [[*everything(own), output, state, safe_get_full_grad(weight(own))]]
                own.step()
            assert same(*seen) and same(everything(engine), everything(plain))
            # Views of files are not copied to: there the step does it all.
            assert counts(engine) == ((1, 0) if device == "cpu" else (0, 1))
            # It was taken before the step, and is of the memory that there is after it.
            assert torch.equal(*views) if views[0] is not None else views[1] is None
            for own, folder in ((engine, "False"), (plain, "True")):
                own.load_checkpoint(str(Path(tmpdir, str(stage), device, folder)))
            assert same(everything(engine), everything(plain)), stage
            engine.destroy(), plain.destroy()

    def test_refused_with_what_to_do(self) -> None:
        refused = (
            ({"stage": 1}, {"data_types": {"grad_accum_dtype": "fp32"}}, "grad_accum_dtype"),
            ({"optimizer": "SGD"}, {}, "SGD"),
            ({"offload": {"device": "none"}}, {}, "none"),
            ({"stage": 3, "offload": {"ratio": 0.0}}, {}, "ratio: 0.0"),
            ({}, {"reproducibility": {"world_size_invariant": True}}, "world_size_invariant"),
            (
                {},
                {
                    "bf16": dict.fromkeys(
                        ("enabled", "bf16_master_weights_and_grads", "stochastic_rounding"), True
                    )
                },
                "stochastic_rounding",
            ),
        )
        for case, more, named in refused:
            with pytest.raises(DeepSpeedConfigError, match=f"speculative_update: true.*{named}"):
                start({**config(**case), **more})


def seen(engine: Any) -> list[torch.Tensor]:
    params = list(engine.module.parameters())
    found = [safe_get_full_fp32_param(param) for param in params]
    found += [safe_get_full_optimizer_state(param, "exp_avg") for param in params]
    return [tensor.detach().clone() for tensor in found if tensor is not None]


def gone(*_: Any) -> int:
    raise OSError(errno.EIO, "the disk is gone", "state")


class TestInFiles(DistributedTest):
    world_size = 2

    def test_places_that_have_changed_and_a_disk_that_fails_ahead(self, tmpdir: str) -> None:
        # Kills: what looks at the places of before; an error ahead of the step that one rank alone
        # raises, or none; what it leaves behind.
        param = {"device": "nvme", "nvme_path": str(tmpdir), "max_in_cpu": 0}
        engine = start(config(3, device="nvme", offload_param=param))
        plain = start(config(3), early=False)
        trained = train(engine, 2), train(plain, 2)
        assert same(*trained) and same(seen(engine), seen(plain)) and counts(engine) == (1, 0)
        engine.save_checkpoint(str(tmpdir))
        is_mine = deepspeed.comm.get_rank() == 1
        with mock.patch.object(AsyncIOHandle, "async_pwrite", gone) if is_mine else nullcontext():
            backward(engine, 5)
            for task in engine.optimizer.masters.early._tasks:
                task.exception()
        with pytest.raises(OSError, match="the disk is gone.*rank 1"):
            engine.step()
        engine.load_checkpoint(str(tmpdir))
        assert same(everything(engine), trained[1])
        for number in range(5, 8):
            for own in (engine, plain):
                backward(own, number)
                own.step()
        assert same(everything(engine), everything(plain)) and same(seen(engine), seen(plain))


# Stage, and further settings.
RUNS: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {}),
    (2, {"device": "nvme"}),
    (3, {"offload_param": {"device": "cpu"}, "offload": {"ratio": 0.6}}),
)


class TestOnStreams(DistributedTest):
    # On one rank too: to the simulation, waiting for a collective of gloo's holds the host up.
    world_size = [1, 2]

    def test_updates_while_backward_runs_and_leaves_nothing_to_the_step(self) -> None:
        # Kills: an update that begins when all gradients are there, or of some that are not; one
        # that is made anew in the step; memory that a copy still reads when it is written again.
        log: list[tuple[str, int]] = []
        run, norm_of = HostOptimizer._run, MasterWeights._norm_of

        def noted(self: HostOptimizer, update: Any) -> None:
            log.append(("update", update.param.numel()))
            run(self, update)

        def norm(self: MasterWeights, squares: torch.Tensor) -> torch.Tensor:
            log.append(("norm", 0))
            return norm_of(self, squares)

        waited: dict[int, list[torch.Tensor]] = {}  # by stage: files are no difference
        for stage, more in RUNS:
            for early in (True, False)[: 1 if stage in waited else 2]:
                settings = config(stage, overlap_comm=True, **more)
                with (
                    mock.patch.object(HostOptimizer, "_run", noted),
                    mock.patch.object(MasterWeights, "_norm_of", norm),
                    simulate(backward_streams=2),
                    check_streams(),
                ):
                    engine = start(settings, early, depth=6)
                    weight(engine).register_post_accumulate_grad_hook(
                        lambda _: log.append(("last gradient", 0))
                    )
                    for number in range(3):
                        log.clear()
                        backward(engine, number)
                        engine.step()
                    found = everything(engine)
                    engine.destroy()
                if early:
                    names = [name for name, _ in log]
                    behind = sum(numel for _, numel in log[names.index("norm") :])
                    assert "update" in names[: names.index("last gradient")], (stage, more)
                    assert behind <= 1, (stage, more)  # padding, which no gradient fills
                    updated = found
                else:
                    waited[stage] = found
            assert same(updated, waited[stage]), (stage, more)
