"""`overlap_param_gather`: who waits for what, and that every read finds updated values."""

import copy
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.runtime.module_hooks.parameter_arrivals import PendingParameter
from deepspeed.runtime.module_hooks.parameter_reads import ParameterDict
from deepspeed.verify import check_streams
from unit.common import DistributedTest
from unit.v1.device.test_bucket_overlap import Order, on_stream
from unit.v1.gathering import collectives
from unit.v1.looping import each
from unit.verify.gather_scenarios import LAYERS, make_engine, train

CASES: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 2, "dtype": "bf16"},
    {"stage": 1, "dtype": "bf16+fp32"},
    {"stage": 2, "dtype": "fp16", "offload": True},
    {"stage": 2, "allgather_partitions": False},
    {"stage": 2, "overlap_comm": True},
]


def weights(engine: Any) -> list[torch.Tensor]:
    """Read outside of modules, by the parameters themselves."""
    return [param.detach().clone() for param in engine.module.parameters()]


def under_state_dict(engine: Any) -> list[torch.Tensor]:
    return [value.clone() for value in engine.module.state_dict().values()]


def by_data(engine: Any) -> list[torch.Tensor]:
    return [param.data.clone() for param in engine.known]


def in_lists(engine: Any) -> list[torch.Tensor]:
    return list(torch._foreach_mul(engine.known, 1.0))


def by_copies(engine: Any) -> list[torch.Tensor]:
    copied = copy.deepcopy(engine.module)
    assert all(type(param) is nn.Parameter for param in copied.parameters())
    return [param.detach() for param in copied.parameters()]


def by_pickles(engine: Any) -> list[torch.Tensor]:
    restored = pickle.loads(pickle.dumps(engine.module))
    assert all(type(param) is nn.Parameter for param in restored.parameters())
    return [param.detach() for param in restored.parameters()]


def on_another_stream(engine: Any) -> list[torch.Tensor]:
    accelerator = get_accelerator()
    weights(engine)  # this stream has waited; the other has not
    side = accelerator.Stream()
    with accelerator.stream(side):
        found = by_data(engine)
    accelerator.current_stream().wait_stream(side)
    return found


READS: list[Callable[[Any], list[torch.Tensor]]] = [
    weights,
    under_state_dict,
    by_data,
    in_lists,
    by_copies,
    by_pickles,
    on_another_stream,
]


class TestGathers(DistributedTest):
    world_size = 2
    backend = "gloo"

    @each(case=list(zip(CASES, itertools.cycle((0, 3)), strict=False)))
    def test_values(self, case: tuple[dict[str, Any], int]) -> None:
        # Kills: a gather of what the update has not written, or a forward that reads what the
        # gather has not.
        settings, schedule = case
        found = []
        for overlapped in (False, True):
            with simulate(schedule=schedule, backward_streams=2), check_streams():
                engine = make_engine(**settings, overlap_param_gather=overlapped)
                train(engine)
                pending = [type(param) is PendingParameter for param in engine.module.parameters()]
                assert all(pending) if overlapped else not any(pending)
                found.append(weights(engine))
                get_accelerator().synchronize()
                engine.destroy()
            assert not any(type(m._parameters) is ParameterDict for m in engine.module.modules())
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    @each(read=READS)
    def test_reads_outside_of_modules(self, read: Callable[[Any], list[torch.Tensor]]) -> None:
        # Kills: a way to read that is not heard.
        with simulate(), check_streams():
            engine = make_engine()
            engine.__dict__["known"] = list(engine.module.parameters())
            for _ in range(2):
                train(engine, 1)
                with torch.no_grad():
                    found = read(engine)
            whole = [torch.empty(0) for _ in range(dist.get_world_size())]
            dist.all_gather_object(whole, [value.tolist() for value in found])
            assert whole[0] == whole[1]
            masters = deepspeed.utils.safe_get_full_fp32_params(engine.known)
            get_accelerator().synchronize()
            assert all(torch.equal(a, b) for a, b in zip(found, masters, strict=True))
            engine.destroy()

    def test_a_module_waits_for_its_own(self) -> None:
        # Kills: a wait for all gathers before the first module, or at the end of the step.
        with simulate() as simulated:
            engine = make_engine()
            train(engine, 1)
            order = Order()
            with simulated.trace_streams(order):
                train(engine, 2)
            engine.destroy()
        gathers = on_stream(order.launches, "nccl stream", "all_gather")[: LAYERS + 1]
        assert len(gathers) == LAYERS + 1
        after = order.launches[order.launches.index(gathers[-1]) :]
        products = on_stream(after, "default stream", "aten::mm")[: LAYERS + 1]
        for layer, product in enumerate(products):
            waits = [product.waits_for(gather) for gather in gathers]
            assert waits == [other <= layer for other in range(LAYERS + 1)]

    def test_costs(self) -> None:
        # Kills: a collective, or a wait of the host, that only the overlap has.
        def cost(overlapped: bool) -> tuple[list[str], int]:
            with simulate():
                engine = make_engine(dtype="fp16", overlap_param_gather=overlapped)
                train(engine, 2)
                with collectives() as issued, get_accelerator().count_host_waits() as waits:
                    train(engine, 2)
                engine.destroy()
            return issued, waits.total

        assert cost(True) == cost(False)

    def test_where_reads_are_not_heard(self, tmp_path: Path) -> None:
        # Kills: compiled code, or a parameter of the client's class, that is not waited for.
        class Theirs(nn.Parameter):
            pass

        with simulate(), check_streams():
            engine = make_engine()
            engine.module[0].weight.__class__ = Theirs
            train(engine, 2)
            assert type(engine.module[0].weight) is Theirs
            assert type(engine.module[1].weight) is PendingParameter
            engine.module[1].compile(backend="eager")
            train(engine, 2)
            assert type(engine.module[2].weight) is nn.Parameter
            engine.save_checkpoint(str(tmp_path))
            train(engine, 1)
            engine.load_checkpoint(str(tmp_path))
            train(engine, 1)
            engine.destroy()

    def test_nothing_to_gather(self) -> None:
        # Kills: the key accepted where it means nothing.
        for stage in (0, 3):
            with pytest.raises(DeepSpeedConfigError, match="overlap_param_gather: true at stage"):
                make_engine(stage=stage)
        engine = make_engine()  # a host has no streams: readers have nothing to wait for
        train(engine, 2)
        assert all(type(param) is nn.Parameter for param in engine.module.parameters())
        engine.destroy()
