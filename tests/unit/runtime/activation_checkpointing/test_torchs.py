"""Functions that models give to `torch.utils.checkpoint`: their inputs are on the host too."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from unit.common import DistributedTest
from unit.models import config_of, drawn, seeded, sgd
from unit.runtime.activation_checkpointing.test_in_engine import TORCHS, Recorded, direct, pieces
from unit.v1.looping import each

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.ops.state_files import place_in_file
from deepspeed.runtime.activation_checkpointing import checkpointing, saved_inputs, settings
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.verify import check_streams

kinds = pytest.mark.parametrize("call", TORCHS.values(), ids=TORCHS)
WIDTH, ROWS, LAYERS, MICRO_BATCHES = 8, 4, 3, 2


class Layers(nn.Module):
    """Layers with dropout and one mask for all, each checkpointed, as transformers does it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        made = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4)) for _ in range(LAYERS)]
        self.layers = nn.ModuleList(made)
        self.first, self.call = nn.Linear(WIDTH, WIDTH), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, hidden = (x > 0).to(x.dtype), self.first(x)
        for layer in self.layers:
            hidden = self.call(lambda h, m, layer=layer: layer(h).tanh() + m * h, hidden, mask)
        return hidden.square().mean()


def trained(stage: int, call: Callable[..., Any], **block: Any) -> list[torch.Tensor]:
    """Parameters and losses of a step of two micro-batches."""
    zero = {"reduce_bucket_size": 100, "overlap_comm": True}
    zero |= {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    config = config_of(stage, ROWS, MICRO_BATCHES, optimizer=sgd(0.1), zero_optimization=zero)
    config["activation_checkpointing"] = block
    engine, *_ = deepspeed.initialize(model=seeded(Layers, call, seed=3), config=config)
    losses = []
    for index in range(MICRO_BATCHES):
        loss = engine(drawn(10 * index + dist.get_rank(), ROWS, WIDTH).to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params, enabled=stage == 3):
        found = [value.detach().clone() for value in (*losses, *params)]
    engine.destroy()
    return found


class TestEngine(DistributedTest):
    world_size = 2

    @each(stage=(0, 2, 3))
    def test_the_block_moves_them(self, stage: int, tmp_path: Path) -> None:
        # Kills: a block that only our own functions obey; copies that come late; a mask that all
        # layers take copied once for each; other bits than without.
        with simulate(backward_streams=2):
            wanted = trained(stage, direct, cpu_checkpointing=False)
        in_files = {"nvme_path": str(tmp_path / str(dist.get_rank()))}
        for number, kind in enumerate(TORCHS):
            more = in_files if stage == 2 + number else {}
            with simulate(backward_streams=2) as device, check_streams():
                with pytest.MonkeyPatch.context() as patch:
                    recorded = Recorded(patch)
                    found = trained(stage, TORCHS[kind], cpu_checkpointing=True, **more)
                    moved = recorded.content()
                    where = place_in_file if more else device.is_pinned
                    assert all(map(where, moved))
                equal = [torch.equal(one, other) for one, other in zip(found, wanted, strict=True)]
            assert all(equal), (kind, more)
            assert len(moved) == MICRO_BATCHES * 2 * LAYERS
            assert more or pieces(moved) == MICRO_BATCHES * (LAYERS + 1)


@pytest.fixture
def device() -> Iterator[Any]:
    """A simulated one that is checked, with all inputs on the host."""
    before = settings._current, settings._is_configured
    with simulate() as device, check_streams(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_inputs, "MOVED_NUMEL", 16)
        checkpointing.configure(None, checkpoint_in_cpu=True)
        yield device
    settings._current, settings._is_configured = before


@kinds
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_retained_graph_and_a_failure_before(device: Any, call: Callable[..., Any]) -> None:
    # Kills: what came back for the first backward taken for the second's; hooks that a function
    # that raises leaves behind; a wait of the host.
    layer = seeded(nn.Sequential, nn.Linear(8, 8), nn.Dropout(0.4), seed=1)
    x = torch.ones(8, 8, requires_grad=True)

    def gradients(through: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(2)
        loss = through(lambda h: through(layer, h.sin()), x * 2).exp().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [one.grad.clone() for one in (x, *layer.parameters())]

    def failing(h: torch.Tensor) -> torch.Tensor:
        raise KeyError(h.shape)

    wanted = gradients(direct)
    x.grad = None
    layer.zero_grad()
    with pytest.MonkeyPatch.context() as patch, device.count_host_waits() as waits:
        with pytest.raises(KeyError):
            call(failing, x * 3)
        recorded = Recorded(patch)
        x.sin()
        assert not recorded.packed
        found = gradients(call)
    assert all(map(torch.equal, found, wanted))
    assert recorded.packed and waits.total == 0


@kinds
def test_what_stays_and_what_was_changed(device: Any, call: Callable[..., Any]) -> None:
    # Kills: parameters, indices and few numbers on the host; a tensor with other values taken for
    # what is there already.
    weight, index, few = nn.Parameter(torch.ones(64)), torch.arange(64), torch.ones(4)
    x, mask = torch.full((64,), 2.0, requires_grad=True), torch.ones(64)

    def layer(h: torch.Tensor, m: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return (h * more[0])[more[1]] * m + more[2].sum()

    def gradient(through: Callable[..., Any]) -> torch.Tensor:
        hidden, weight.grad = x * 1, None
        for one in (mask, mask, mask * 3):
            hidden = through(layer, hidden, one, weight, index, few)
        hidden.sum().backward()
        assert weight.grad is not None
        return weight.grad

    with pytest.MonkeyPatch.context() as patch:
        recorded = Recorded(patch)
        patch.setattr(saved_inputs, "MOVED_NUMEL", 5)
        assert torch.equal(gradient(call), gradient(direct))
    assert recorded.sizes() == [64] * 6 and pieces(recorded.content()) == 5


@pytest.mark.parametrize("later", [0, 1, 2])
def test_an_input_that_is_changed_while_it_is_copied_is_refused(device: Any, later: int) -> None:
    # Kills: a copy that has whatever the input is meanwhile. Two functions later the copy is done;
    # then what is changed is another input.
    call, numel = TORCHS["torch's, non_reentrant"], 64
    x = torch.ones(numel, requires_grad=True)
    hidden = x * 1
    loss = call(torch.sin, hidden).sum()
    for _ in range(later):
        loss = loss + call(torch.sin, x * 3).sum()
    if later < 2:
        device.synchronize()  # or it is a race, which the checker tells
    with torch.no_grad():
        hidden.mul_(2)
    loss = loss + call(torch.sin, hidden).sum()
    if later < 2:
        with pytest.raises(RuntimeError, match=r"float32, \[64\]. was modified in place"):
            loss.backward()
        return
    loss.backward()
    one = torch.ones(numel)
    assert torch.allclose(x.grad, one.cos() + 6 * (3 * one).cos() + (2 * one).cos())


@pytest.mark.parametrize("astray", [True, False])
def test_a_torch_that_calls_other_functions_is_refused(
    astray: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kills: names replaced that nobody calls, so that inputs stay on the device in silence (torch
    # 2.14 with the name of 2.13); replacements that stay after the refusal.
    torchs = torch.utils.checkpoint
    known = torchs.checkpoint

    def other(function: Any, x: torch.Tensor, use_reentrant: bool, **options: Any) -> Any:
        is_known = use_reentrant is not astray
        return known(function, x, use_reentrant=use_reentrant, **options) if is_known else x.sin()

    monkeypatch.setattr(torchs, "checkpoint", other)
    before = dict(vars(torchs))
    told = rf"cpu_checkpointing: torch .*use_reentrant={astray}.*set cpu_checkpointing: false"
    with pytest.raises(DeepSpeedConfigError, match=told):
        checkpointing._move_inputs_of_torchs.__wrapped__()
    assert vars(torchs) == before
