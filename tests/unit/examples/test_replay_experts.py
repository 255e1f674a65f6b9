"""Experts over ranks hide the reductions of their gradients."""

from collections.abc import Callable

import pytest
import torch
from exposure import SLACK, Found
from unit.common import DistributedTest
from unit.models import config_of, sgd

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate

pytest.importorskip("transformers.integrations.moe", reason="older releases have lists of experts")

from unit.clients.architectures import ARCHITECTURES, text


class TestExperts(DistributedTest):
    world_size = 2
    backend = "gloo"

    def test_reductions_are_hidden(self) -> None:
        name, zero = "qwen3_moe", {"overlap_comm": True, "reduce_bucket_size": 3000}
        config = config_of(2, 2, optimizer=sgd(0.1), zero_optimization=zero)
        config["expert_parallel"] = {"enabled": True, "autoep_size": 2}
        with simulate():
            architecture = ARCHITECTURES[name]
            model = architecture.cls(architecture.config(name))
            engine = deepspeed.initialize(model=model, config=config)[0]
            tokens = text(model.config, torch.Generator().manual_seed(dist.get_rank()))

            def train(mark: Callable[[str], None]) -> None:
                engine.backward(engine(**tokens).loss)
                engine.step()

            found = Found(train)
            engine.destroy()
        # Kills: gradients of experts, or of the rest, that are reduced behind backward: nothing
        # hides tokens on their way to experts, what is gathered after the update, and the last.
        shown = ("all_to_all_single", "all_gather_into_tensor", "all_reduce")
        reductions = found.total("reduce_scatter_tensor") - found.one("reduce_scatter_tensor")
        least = sum(map(found.total, shown))
        assert found.part("step") < least + found.one("reduce_scatter_tensor") + SLACK
        assert reductions > 2 * SLACK
