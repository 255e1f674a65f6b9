"""Offload that overlaps, and the host's step in one pass: the same bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.ops import host_optimizer
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.host_optimizer import HostOptimizer
from deepspeed.runtime.gradients import sink
from deepspeed.runtime.optimizers import master_weights
from deepspeed.runtime.optimizers.master_weights import MasterWeights
from deepspeed.runtime.sharding import publisher
from deepspeed.runtime.sharding.publisher import Publisher
from deepspeed.verify import check_streams
from unit.common import DistributedTest
from unit.models import config_of, drawn
from unit.one_process import mean_square, placed, train
from unit.v1.gathering import collectives
from unit.v1.offload.test_nvme_offload import same

WIDTH = 24
# A rank's shard of the model has 388 elements: 7 pieces.
PIECE = 64
STAGED = 50
WHOLE = 1 << 30


def config(
    precision: str = "bf16", stage: int = 2, offload: dict[str, Any] | None = None, **zero: Any
) -> dict[str, Any]:
    more: dict[str, Any] = {"gradient_clipping": 0.05}
    if precision == "fp16":
        more["fp16"] = {"enabled": True, "initial_scale_power": 8}
    zero["offload_optimizer"] = {"device": "cpu", **(offload or {})}
    return config_of(stage, 4, 2, precision, zero_optimization=zero, **more)


def start(settings: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 7))
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=0.01, weight_decay=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def micro_batches(engine: Any, count: int) -> None:
    rank = deepspeed.comm.get_rank()
    for index in range(count):
        x = placed(engine, drawn(10 * index + rank, 4, WIDTH))
        engine.backward(mean_square(engine, x))
        engine.step()


def trained(
    settings: dict[str, Any], piece: int = WHOLE, staged: int = WHOLE, fuses: bool = True
) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher, "UPDATE_NUMEL", piece)
        patch.setattr(sink, "STAGE_NUMEL", staged)
        if not fuses:
            # What the step sees is then no optimizer of the host's: it scales before and rounds
            # after.
            patch.setattr(master_weights, "HostOptimizer", int)
        engine = start(settings)
        micro_batches(engine, 6)
        kept = [*engine.module.parameters(), *(group.master for group in engine.optimizer.groups)]
        values = [tensor.detach().clone() for tensor in kept]
        engine.destroy()
    return values


class TestPieces(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    def test_same_bits_as_the_whole(self, precision: str) -> None:
        # Kills: a piece that is left out, updated twice, counted as a step of its own or gathered
        # before it is updated; clipping or unscaling that misses a piece; pieces that are cut
        # otherwise where gathers are bounded (100 elements) or broadcasts. In one pass: the factor
        # left out or applied twice (clipping is on, fp16 is scaled), weights that stay behind their
        # masters.
        kinds = ({}, {"allgather_bucket_size": 200}, {"allgather_partitions": False})
        for stage, gathers in itertools.product((1, 2), kinds):
            settings = config(precision, stage, **gathers)
            whole = trained(settings)
            assert same(trained(settings, PIECE), whole), (stage, gathers)
            if not gathers:
                assert same(trained(settings, fuses=False), whole), stage

    def test_a_piece_is_on_its_way_before_the_next_is_updated_and_the_norm_known_before_the_first(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: an update before the norm is decided, and gathers that begin when all pieces are
        # updated: nothing would overlap.
        log: list[str] = []
        noted = ((MasterWeights, "_norm_of"), (HostOptimizer, "_run"), (Publisher, "_gather"))
        for owner, name in noted:
            original = getattr(owner, name)

            def logged(*args: Any, of: Any = original, name: str = name, **kwargs: Any) -> Any:
                log.append(name)
                return of(*args, **kwargs)

            monkeypatch.setattr(owner, name, logged)
        monkeypatch.setattr(publisher, "UPDATE_NUMEL", PIECE)
        engine = start(config())
        micro_batches(engine, 2)
        pieces = math.ceil(engine.optimizer.groups[0].table.shard_numel / PIECE)
        assert pieces == 7 and log == ["_norm_of", *["_run", "_gather"] * pieces]

    def test_a_gradient_that_is_not_finite_updates_no_piece(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Kills: pieces that are updated while other ranks may still have an infinity to report.
        monkeypatch.setattr(publisher, "UPDATE_NUMEL", PIECE)
        engine = start(config())
        groups = engine.optimizer.groups
        before = [group.master.clone() for group in groups]
        value = math.inf if deepspeed.comm.get_rank() == 1 else 1.0
        train(engine, [placed(engine, torch.full((4, WIDTH), value))], mean_square)
        micro_batches(engine, 1)
        assert engine.optimizer.overflow and same(before, [group.master for group in groups])
        assert not engine.optimizer.state


# Schedule, buffers for staged gradients, overlap_comm (and then no bucket buffer is used twice).
# Memory that is not page-locked is the device's to the simulation.
RUNS = (
    ("fp32", True, [(0, 1, True), (3, 4, False)]),
    ("bf16", True, [(0, 4, True), (0, 1, False)]),
    ("bf16", False, [(0, 4, True)]),
)


class TestOnStreams(DistributedTest):
    # On one rank too: to the simulation, waiting for a collective of gloo's holds the host up, and
    # so hides waits that are missing.
    world_size = [1, 2]

    @pytest.mark.parametrize("precision, pin, runs", RUNS)
    def test_silent_and_the_same_bits(
        self, precision: str, pin: bool, runs: list[tuple[int, int, bool]]
    ) -> None:
        # Kills: a copy to the host that waits for no reduction, gradients read before their copy, a
        # bucket that is filled while its slice is still being copied, a staging buffer that is
        # written before its copy has left, weights gathered too early.
        # Who owns what, and so the order in which the norm is summed, follows from the buckets.
        buckets = {"reduce_bucket_size": 200}
        with simulate():
            plain = trained(config(precision, **buckets))
        for schedule, buffers, overlap in runs:
            offload = {"pin_memory": pin, "buffer_count": buffers}
            zero = {"overlap_comm": overlap, "contiguous_gradients": not overlap, **buckets}
            settings = config(precision, offload=offload, **zero)
            with simulate(schedule=schedule, backward_streams=2), check_streams():
                values = trained(settings, PIECE, STAGED)
            assert same(values, plain), (schedule, buffers, overlap)


class Recorder:
    """Takes pieces of three, and remembers what it was given."""

    def __init__(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        self.grad = grad
        self._param = param
        self._before = param.clone()
        self.out = torch.zeros(param.numel(), dtype=torch.bfloat16)
        self.seen: list[torch.Tensor] = []

    def pieces(self) -> Iterator[tuple[int, int]]:
        numel = self._param.numel()
        yield from ((start, min(start + 3, numel)) for start in range(0, numel, 3))

    def low_precision_out(self, start: int, end: int) -> torch.Tensor:
        return self.out[start:end]

    def updated(self, start: int, end: int) -> None:
        assert torch.equal(self._param[end:], self._before[end:])
        assert torch.equal(self.out[start:end], self._param[start:end].bfloat16())
        self.seen.append(self._param[start:end].clone())


def test_delivered_pieces_are_final_and_what_follows_is_untouched() -> None:
    # Kills: a piece that is handed on before it is updated, or after the whole parameter is.
    params = [torch.linspace(-1.0, 1.0, 10) for _ in range(2)]
    whole, pieced = DeepSpeedCPUAdam(params[:1]), DeepSpeedCPUAdam(params[1:])
    params[0].grad = torch.linspace(2.0, -2.0, 10).bfloat16().float()
    whole.step()
    recorder = Recorder(params[1], params[0].grad.bfloat16())
    with pieced.fused(1.0, {params[1]: recorder}):
        pieced.step()
    assert torch.equal(torch.cat(recorder.seen), params[0]) and torch.equal(*params)
    assert pieced.state[params[1]]["step"] == 1


class TestBothWays(DistributedTest):
    world_size = 2

    def test_a_simulated_device_takes_the_way_of_devices(self) -> None:
        # Kills: reductions in pairs, or an optimizer past the streams, where devices are simulated:
        # what `ds_verify` and the stream checker look at would be no device's. Masters and
        # gradients that are page-locked, which no copy touches.
        ways: dict[str, list[str]] = {"host": [], "device": []}
        for stage, where in itertools.product((1, 2, 3), ways):
            with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
                native = Mock(wraps=host_optimizer.update_native)
                patch.setattr(host_optimizer, "update_native", native)
                device = stack.enter_context(simulate()) if where == "device" else None
                zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
                engine = start(config("fp32", stage, {"pin_memory": True}, **zero))
                with collectives() as names:
                    micro_batches(engine, 1)
                    groups = engine.optimizer.groups
                    kept = [kind for one in groups for kind in (one.master, one.grad)]
                    micro_batches(engine, 1)
                locked = [device is not None and device.is_pinned(one) for one in kept]
                assert kept and not any(locked), (stage, locked)
                engine.destroy()
            sent = set(names) - {"all_reduce"}  # of norms
            if where == "device":
                assert sent == {"reduce_scatter_tensor", "all_gather_into_tensor"}, (stage, sent)
                assert not native.called
            else:
                assert sent == {"isend", "irecv"}, (stage, sent)
                assert native.called == (host_optimizer.native_op("cpu_adam") is not None)
