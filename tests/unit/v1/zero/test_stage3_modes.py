"""Stage 3 together with modes of torch and with the checks that users switch on."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed import comm as dist
from unit.common import DistributedTest
from unit.v1.zero.stage3_models import (
    config_of,
    distance,
    engine_of,
    make_net,
    reference,
    tokens_of,
    train,
)


class TestModes(DistributedTest):
    """What stands around training."""

    world_size = 2

    def test_inference_mode_between_steps(self) -> None:
        # Kills: memory that is made in inference mode, which training may not write to.
        model = make_net()
        engine = engine_of(model, config_of(3, stage3_param_persistence_threshold=0))
        for step in range(4):
            with torch.inference_mode():
                engine.eval()(tokens_of(0, dist.get_rank()))
            engine.train()
            train(engine, 1, first=step)
        engine.destroy()
        assert distance({n: p.detach() for n, p in model.named_parameters()}, reference()) < 1e-5

    def test_gradients_are_checked(self) -> None:
        # Kills: a ledger that takes placeholders for parameters, and so cries wolf or sees nothing.
        config: dict[str, Any] = config_of(3, stage3_param_persistence_threshold=0)
        config["verify"] = {"ledger": True, "collectives": True}
        model = make_net()
        engine = engine_of(model, config)
        train(engine, 4)
        engine.destroy()
        assert distance({n: p.detach() for n, p in model.named_parameters()}, reference()) < 1e-5

    def test_optimizer_on_the_host(self) -> None:
        # Kills: masters on the host whose update does not come to the shards.
        config = config_of(
            3, stage3_param_persistence_threshold=10, offload_optimizer={"device": "cpu"}
        )
        config["zero_force_ds_cpu_optimizer"] = False
        model = make_net()
        engine = engine_of(model, config)
        train(engine, 4)
        engine.destroy()
        assert distance({n: p.detach() for n, p in model.named_parameters()}, reference()) < 1e-5
