"""Checkpointed functions against the same without: gradients, random numbers, nesting, refusals."""

import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.activation_checkpointing import checkpointing, saved_inputs, settings
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.verify import check_streams

KINDS = {
    "reentrant": checkpointing.checkpoint,
    "non_reentrant": checkpointing.non_reentrant_checkpoint,
}
both = pytest.mark.parametrize("recompute", KINDS.values(), ids=KINDS.keys())


@pytest.fixture(autouse=True)
def default_settings() -> Iterator[None]:
    yield
    settings._current, settings._is_configured = settings.Settings(), False
    checkpointing.get_cuda_rng_tracker().reset()


def save_into_long_buffers(inputs: int) -> None:
    switches = {"partition_activations": True, "contiguous_checkpointing": True}
    checkpointing.configure(None, **switches, num_checkpoints=inputs)


def direct(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def gradients_of(
    run: Callable[..., Any], function: Any, inputs: int = 1, model: nn.Module | None = None
) -> Any:
    """Result, gradients of fresh, equal inputs and of the model, and a random number drawn then."""
    torch.manual_seed(5)
    drawn = [torch.randn(4, 6, requires_grad=True) for _ in range(inputs)]
    result = run(function, *[item * 1 for item in drawn])
    result.square().sum().backward()
    params = list((model or function).parameters())
    found = [item.grad for item in (*drawn, *params)]
    for param in params:
        param.grad = None
    return [result.detach(), *found, torch.rand(3)]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        # Exactly: the same operators on the same numbers.
        assert one is None or torch.equal(one, other)


def block(dropout: float = 0.3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(dropout), nn.Tanh(), nn.Linear(6, 6))


@both
def test_gradients_and_dropout_are_those_of_the_plain_function(recompute: Any) -> None:
    # Kills: recomputing with another mask; leaving the generator where recomputation ended.
    model = block()
    assert_equal(gradients_of(recompute, model), gradients_of(direct, model))


@both
def test_named_random_states_are_restored(recompute: Any) -> None:
    # Kills: forgetting the tracker: fork() would draw other masks again, and go on elsewhere.
    model = block()
    tracker = checkpointing.get_cuda_rng_tracker()

    def function(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            x = nn.functional.dropout(x, 0.5)
        return model(x)

    def run(call: Callable[..., Any]) -> list[Any]:
        checkpointing.model_parallel_cuda_manual_seed(11)
        found = gradients_of(call, function, model=model)
        return [*found, tracker.get_states()["model-parallel-rng"]]

    assert_equal(run(recompute), run(direct))


@both
def test_autocast_is_restored(recompute: Any) -> None:
    # Kills: recomputing in fp32 what forward computed in bf16; backward runs outside of autocast.
    model = block(0.0)

    def run(call: Callable[..., Any]) -> list[Any]:
        def under_autocast(function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return call(function, x).float()

        return gradients_of(under_autocast, model)

    assert_equal(run(recompute), run(direct))


@both
def test_nested_arguments_and_results(recompute: Any) -> None:
    # Kills: gradients lost in containers, keyword arguments, or outputs beside None and numbers.
    model = block(0.0)

    def function(x: Any, more: dict[str, Any], flag: bool, scale: Any = None) -> Any:
        hidden = model(x) + more["pair"][0] * more["factor"]
        if flag and scale is not None:
            hidden = hidden * scale
        return {"hidden": hidden, "rest": [None, 3, x.argmax(-1), (hidden.sum(), x)]}

    def flat(call: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def run(function: Any, x: Any, y: Any, scale: Any) -> torch.Tensor:
            found = call(function, x, {"pair": (y, None), "factor": 0.5}, True, scale=scale)
            hidden, (nothing, three, index, (total, same)) = found["hidden"], found["rest"]
            assert nothing is None and three == 3
            assert index.dtype == torch.int64 and not index.requires_grad
            return hidden + total + same * index.unsqueeze(-1)

        return run

    plain = gradients_of(flat(direct), function, 3, model)
    assert_equal(gradients_of(flat(recompute), function, 3, model), plain)


@both
def test_integer_inputs_unused_outputs_and_frozen_parameters(recompute: Any) -> None:
    # Kills: asking for a gradient of an index, of an output that nobody used, of a frozen weight; a
    # first layer on raw data that silently learns nothing (torch's reentrant checkpoint).
    embedding, linear = nn.Embedding(10, 6), nn.Linear(6, 6)
    linear.weight.requires_grad_(False)
    index = torch.tensor([[1, 2, 2], [0, 9, 2]])

    def function(index: torch.Tensor) -> Any:
        hidden = embedding(index)
        return linear(hidden), hidden * 2, hidden.detach() * 3

    recompute(function, index)[0].sum().backward()
    found = [embedding.weight.grad.clone(), linear.bias.grad.clone(), linear.weight.grad]
    embedding.weight.grad = linear.bias.grad = None
    function(index)[0].sum().backward()
    assert_equal(found, [embedding.weight.grad, linear.bias.grad, None])


@both
def test_one_function_twice_and_one_inside_of_another(recompute: Any) -> None:
    # Kills: state kept per function instead of per call; recomputation that itself recomputes.
    model = block()

    def nested(call: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        return lambda f, x: call(lambda y: call(f, y) + call(f, y * 2), call(f, x))

    assert_equal(gradients_of(nested(recompute), model), gradients_of(nested(direct), model))


@both
def test_a_retained_graph_runs_again(recompute: Any) -> None:
    # Kills: what is saved let go at the first backward although the graph is retained.
    save_into_long_buffers(2)
    x = torch.randn(4, 6, requires_grad=True)
    loss = recompute(block(), x * 1).sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * first)


def test_arguments_and_results_are_upstreams() -> None:
    # A list comes as a tuple, a sequence of one element as that element.
    x = torch.randn(3, requires_grad=True)
    assert isinstance(checkpointing.checkpoint(lambda x: [x * 2, None], x), tuple)
    assert isinstance(checkpointing.checkpoint(lambda x: (x * 2,), x), torch.Tensor)
    assert checkpointing.checkpoint(lambda x: (None, 5), x) == (None, 5)
    # The function of upstream's name takes flat arguments.
    outputs: list[Any] = []
    attached = checkpointing.CheckpointFunction.apply(lambda x, k: (x * k, k), outputs, x, 3)
    assert outputs[1] == 3
    attached[0].sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))
    # Without gradients the function is called.
    with torch.no_grad():
        assert not checkpointing.checkpoint(torch.tanh, x).requires_grad


# -- refusals --------------------------------------------------------------------------------------


def test_what_would_give_wrong_gradients_is_refused() -> None:
    # Kills: torch.autograd.grad() that returns, and parameters that got gradients nobody asked for;
    # recomputing from the modified input, which gives wrong gradients without a word.
    x = torch.randn(3, 6, requires_grad=True)
    with pytest.raises(RuntimeError, match="non_reentrant_checkpoint"):
        torch.autograd.grad(checkpointing.checkpoint(block(), x).sum(), x)
    (grad,) = torch.autograd.grad(checkpointing.non_reentrant_checkpoint(block(), x).sum(), x)
    assert grad.shape == x.shape
    with pytest.raises(RuntimeError, match="modified its input .* clone"):
        checkpointing.checkpoint(lambda y: y.mul_(2).tanh(), x * 1)


@both
@pytest.mark.parametrize("contiguous", [False, True])
def test_an_input_modified_later_is_refused_or_was_copied(recompute: Any, contiguous: bool) -> None:
    # Kills: recomputing from whatever stands in the input's memory when backward comes.
    if contiguous:
        save_into_long_buffers(1)
    x, index = torch.ones(3, requires_grad=True), torch.arange(3)
    hidden = x * 1
    loss = recompute(lambda h, i: (h * h)[i], hidden, index).sum()
    with torch.no_grad():
        (hidden if not contiguous else index).mul_(0)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


def test_settings_that_cannot_be_honoured() -> None:
    for more, message in (
        ({}, "partition_activations: true"),
        ({"partition_activations": True}, "number_checkpoints is None"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=message):
            checkpointing.configure(None, contiguous_checkpointing=True, **more)
        assert not checkpointing.is_configured()


# -- settings and memory ---------------------------------------------------------------------------


def test_configure_reads_the_block_and_arguments_override_it() -> None:
    # Kills: a block that is read and dropped; an argument that loses against it.
    assert deepspeed.checkpointing is checkpointing and not checkpointing.is_configured()
    switches = "partition_activations contiguous_memory_optimization cpu_checkpointing profile "
    given = dict.fromkeys((switches + "synchronize_checkpoint_boundary").split(), True)
    config = {"train_batch_size": 1, "activation_checkpointing": {**given, "number_checkpoints": 3}}
    checkpointing.configure(None, config, checkpoint_in_cpu=False, num_checkpoints=7)
    chosen = settings.current()
    assert checkpointing.is_configured()
    assert chosen.partition_activations and chosen.contiguous
    assert chosen.num_checkpoints == 7 and chosen.cpu is False
    assert chosen.synchronize and chosen.profile
    checkpointing.partition_activations_in_checkpoint(False)
    checkpointing.set_num_layers(2)
    assert not settings.current().partition_activations and settings.current().num_checkpoints == 2


@both
def test_profile_logs_forward_and_recomputation(recompute: Any, monkeypatch: Any) -> None:
    lines: list[str] = []
    monkeypatch.setattr(checkpointing.logger, "info", lines.append)
    checkpointing.configure(None, profile=True, synchronize=True)
    gradients_of(lambda f, x: recompute(lambda y: recompute(f, y), x), block())
    assert sum("forward" in line for line in lines) >= 2
    assert sum("recomputation" in line for line in lines) == 2


@both
def test_activations_inside_and_moved_inputs_are_not_kept(recompute: Any) -> None:
    # Kills: a closure that keeps the whole input beside what was saved of it.
    save_into_long_buffers(1)
    inside: list[Any] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        hidden = x.tanh()
        inside.append(weakref.ref(hidden))
        return hidden.exp().sum()

    given = torch.randn(8, requires_grad=True) * 1
    inside.append(weakref.ref(given))
    loss = recompute(function, given)
    del given
    gc.collect()
    assert [reference() for reference in inside] == [None, None]
    loss.backward()


def test_blocks_of_long_buffers_are_reused_only_when_free() -> None:
    # Kills: overwriting a block whose input is still to be recomputed; a new buffer per step.
    save_into_long_buffers(2)
    model = block()
    x = torch.randn(4, 6, requires_grad=True)
    places = []
    take = saved_inputs.LongBuffers.take

    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        taken = take(self, *args, **kwargs)
        places.append(taken.memory.data_ptr())
        return taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_inputs.LongBuffers, "take", recording)
        losses = [checkpointing.checkpoint(model, x * factor).sum() for factor in (1, 2, 3)]
        assert len(set(places)) == 3
        for loss in losses:
            loss.backward()
        del loss, losses
        checkpointing.checkpoint(model, x * 4).sum().backward()
    assert places[3] in places[:3]


class OwnGradient(torch.autograd.Function):
    """sum(x * w), whose gradient with respect to w is the saved x itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x * w).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, ctx.saved_tensors[0]


@both
def test_a_gradient_may_be_the_recomputed_input(recompute: Any) -> None:
    # Kills: recomputing on the block itself: the next input would overwrite the gradient's memory.
    save_into_long_buffers(1)
    weight = nn.Parameter(torch.ones(3))
    recompute(lambda x: OwnGradient.apply(x, weight), torch.full((3,), 2.0)).backward()
    gc.collect()
    checkpointing.checkpoint(torch.tanh, torch.full((3,), 5.0))
    assert torch.equal(weight.grad, torch.full((3,), 2.0))


def test_a_block_is_written_after_its_last_use_on_another_stream() -> None:
    # Kills: forgetting the event of the last use when a block changes hands between streams.
    with simulate() as device, check_streams():
        buffers, like = saved_inputs.LongBuffers(1), torch.zeros(4)
        side = device.Stream()
        side.wait_stream(device.current_stream())
        with device.stream(side):
            block = buffers.take(like, 4, on_host=False)
            block.memory.copy_(like)
            block.used()
        del block
        buffers.take(like, 4, on_host=False).memory.fill_(1)


def test_strides_survive_packing() -> None:
    # Kills: another memory format in recomputation: another kernel may round otherwise.
    save_into_long_buffers(4)
    store = saved_inputs.store()
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    strided = [image, image.transpose(1, 3), torch.randn(7)[::2]]
    for tensor in (*strided, torch.randn(3, 1).expand(3, 4), torch.tensor(2.0)):
        assert torch.equal(store.unpack(store.pack(tensor)), tensor)
    assert store.unpack(store.pack(image)).stride() == image.stride()


def drawn(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.rand(4)


@pytest.fixture
def tracker() -> Any:
    """A tracker with a state that is called mine."""
    made = checkpointing.CudaRNGStatesTracker()
    made.add("mine", 7)
    return made


def test_fork_draws_from_the_named_state_and_goes_on_there(tracker: Any) -> None:
    # Kills: drawing from the accelerator's own state, moving it, starting the named one over.
    torch.manual_seed(1)
    with tracker.fork("mine"):
        first = torch.rand(2)
    with tracker.fork("mine"):
        second = torch.rand(2)
    assert torch.equal(torch.cat([first, second]), drawn(7))
    torch.manual_seed(1)
    with pytest.raises(KeyError), tracker.fork("mine"):
        torch.rand(2)
        raise KeyError
    assert torch.equal(torch.rand(4), drawn(1))


def test_names_and_seeds_are_taken_once(tracker: Any) -> None:
    with pytest.raises(ValueError, match="seed 7 already exists"):
        tracker.add("other", 7)
    with pytest.raises(ValueError, match="'mine' already exists"):
        tracker.add("mine", 8)
    with pytest.raises(ValueError, match="'none' is not added"), tracker.fork("none"):
        pass
    states = tracker.get_states()
    tracker.reset()
    assert tracker.get_states() == {}
    tracker.set_states(states)
    with tracker.fork("mine"):
        assert torch.equal(torch.rand(4), drawn(7))


@pytest.mark.parametrize("rank", [0, 3])
def test_seeds_of_tensor_parallel_ranks(rank: int) -> None:
    # Kills: equal masks for parts of an activation, different ones for a whole. 2718 is Megatron's.
    checkpointing.configure(SimpleNamespace(get_tensor_model_parallel_rank=lambda: rank))
    tracker = checkpointing.get_cuda_rng_tracker()
    checkpointing.model_parallel_cuda_manual_seed(100)
    replicated = torch.rand(4)
    with tracker.fork():
        split = torch.rand(4)
    assert torch.equal(replicated, drawn(100))
    assert torch.equal(split, drawn(100 + 2718 + rank))
    torch.manual_seed(1)
    checkpointing.model_parallel_reconfigure_tp_seed(200)
    with tracker.fork():
        split = torch.rand(4)
    assert torch.equal(torch.rand(4), drawn(1))
    assert torch.equal(split, drawn(200 + 2718 + rank))
