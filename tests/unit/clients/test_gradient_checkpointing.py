"""transformers' gradient checkpointing, by its own switch, with `cpu_checkpointing`."""

import pytest
import torch

import deepspeed
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.verify import check_streams
from unit.common import DistributedTest
from unit.models import config_of, sgd, tokens
from unit.runtime.activation_checkpointing.test_in_engine import Recorded

pytest.importorskip("transformers")


def trained(reentrant: bool | None, on_host: bool) -> list[torch.Tensor]:
    """Loss and parameters of a step of a Llama; None: nothing is checkpointed."""
    from .small_models import VOCABULARY, tiny_llama

    config = config_of(2, 2, optimizer=sgd(0.1))
    config["activation_checkpointing"] = {"cpu_checkpointing": on_host}
    model = tiny_llama()
    if reentrant is not None:
        kwargs = {"use_reentrant": reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.train()
    words = tokens(1, VOCABULARY, 2, 12).to(engine.device)
    loss = engine(input_ids=words, labels=words).loss
    engine.backward(loss)
    engine.step()
    found = [value.detach().clone() for value in (loss, *engine.module.parameters())]
    engine.destroy()
    return found


class TestLlama(DistributedTest):
    world_size = 1

    def test_its_layers_inputs_are_on_the_host(self) -> None:
        # Kills: the switch that transformers' users have, and a block that does nothing for it.
        with simulate():
            wanted = trained(None, on_host=False)
        for reentrant in (False, True):
            with simulate() as device, check_streams(), pytest.MonkeyPatch.context() as patch:
                recorded = Recorded(patch)
                found = trained(reentrant, on_host=True)
                sizes = recorded.sizes()
                assert all(map(device.is_pinned, recorded.content()))
                equal = [torch.equal(one, other) for one, other in zip(found, wanted, strict=True)]
            assert all(equal), reentrant
            assert sizes == [2 * 12 * 16] * 2, (reentrant, sizes)  # of both layers
