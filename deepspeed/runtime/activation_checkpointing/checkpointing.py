"""`deepspeed.checkpointing`: functions whose activations are computed again in backward instead of
being kept.

`checkpoint` runs a nested backward per function (reentrant); `non_reentrant_checkpoint`, which is
torch's with our settings around it, recomputes inside of the one backward. Both restore random
states and autocast, and save their inputs as `configure` says (`saved_inputs`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torchs

from deepspeed._lazy import lazy_attributes
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.state_files import StateFiles
from deepspeed.runtime.activation_checkpointing import saved_inputs, settings, tensor_lists
from deepspeed.runtime.activation_checkpointing.random_states import Surroundings
from deepspeed.runtime.config_utils import DeepSpeedConfigError
from deepspeed.utils.logging import logger
from deepspeed.utils.timer import SynchronizedWallClockTimer

# Upstream's path of these names.
_RANDOM_STATES = (
    *("_CUDA_RNG_STATE_TRACKER", "_MODEL_PARALLEL_RNG_TRACKER_NAME", "CudaRNGStatesTracker"),
    *("_set_cuda_rng_state", "get_cuda_rng_tracker", "model_parallel_cuda_manual_seed"),
    "model_parallel_reconfigure_tp_seed",
)
_INPUTS = ("get_partition_size", "get_partition_start", "is_activation_to_checkpoint")
_LISTS = (
    *("detach_variable", "extract_tensors", "gather_partitioned_activations", "merge_tensors"),
    *("get_cpu_activations_for_backward", "get_offloaded_activations_for_backward"),
    *("get_partitioned_activations_for_backward", "partition_activations"),
    "restore_offloaded_activations",
)
__getattr__ = lazy_attributes(
    __name__,
    {
        **dict.fromkeys(_RANDOM_STATES, "deepspeed.runtime.activation_checkpointing.random_states"),
        **dict.fromkeys(_INPUTS, "deepspeed.runtime.activation_checkpointing.saved_inputs"),
        **dict.fromkeys(_LISTS, "deepspeed.runtime.activation_checkpointing.tensor_lists"),
    },
)

# -- settings --------------------------------------------------------------------------------------


def configure(
    mpu_: object,
    deepspeed_config: object = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Choose how checkpointed functions save their inputs, from now on.

    Args:
        mpu_: Megatron-style object that knows the tensor-parallel group; None: the one given to
            `deepspeed.initialize`, if any.
        deepspeed_config: Configuration (path, dict, or `DeepSpeedConfig`) whose block
            "activation_checkpointing" is used where an argument after this one is None, and for
            what no argument is for.
        partition_activations: Save on each tensor-parallel rank its part only. Inputs must be equal
            on those ranks.
        contiguous_checkpointing: Save into long buffers.
        num_checkpoints: Inputs of one size per buffer.
        checkpoint_in_cpu: Save in host memory.
        synchronize: Wait for the device at the boundaries of each checkpointed function.
        profile: Log the time of each checkpointed function and of its recomputation.
    """
    tree = _tree_of(deepspeed_config)
    block: Any = None if tree is None else tree.activation_checkpointing
    folder = _chosen(None, block, "nvme_path", None)
    chosen = settings.Settings(
        mpu=mpu_,
        partition_activations=_chosen(partition_activations, block, "partition_activations", False),
        contiguous=_chosen(
            contiguous_checkpointing, block, "contiguous_memory_optimization", False
        ),
        num_checkpoints=_chosen(num_checkpoints, block, "number_checkpoints", None),
        cpu=_chosen(checkpoint_in_cpu, block, "cpu_checkpointing", False),
        files=folder and functools.partial(StateFiles.configured, folder, tree.aio),
        synchronize=_chosen(synchronize, block, "synchronize_checkpoint_boundary", False),
        profile=_chosen(profile, block, "profile", False),
        by_client=True,
    )
    if chosen.cpu:
        _move_inputs_of_torchs()
    settings.choose(chosen)


def _chosen(argument: object, block: object, key: str, default: object) -> Any:
    if argument is not None:
        return argument
    return default if block is None else getattr(block, key)


def _tree_of(deepspeed_config: Any) -> Any:
    if deepspeed_config is None:
        return None
    # startup: configuration models load pydantic.
    from deepspeed.runtime.config import DeepSpeedConfig, read_tree

    if isinstance(deepspeed_config, DeepSpeedConfig):
        return deepspeed_config.tree
    # Not a `DeepSpeedConfig`: that would want to know which ranks share the batch, which an
    # engine's filled-in configuration does not tell.
    return read_tree(deepspeed_config)[0]


def configure_for_engine(config: Any, mpu: object) -> None:
    """Use the block of an engine's configuration, unless the script called `configure` itself."""
    if (
        "activation_checkpointing" in config.tree.model_fields_set
        and not settings.current().by_client
    ):
        configure(mpu, deepspeed_config=config)
        settings.change(by_client=False)


def is_configured() -> bool:
    """Tell whether `configure` was called, by the script or by an engine with the block."""
    return settings.is_configured()


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Switch partitioning on or off."""
    settings.change(partition_activations=partition_activation)


def set_num_layers(nlayers: int) -> None:
    """Set the number of inputs of one size that a long buffer holds."""
    settings.change(num_checkpoints=nlayers)


def reset() -> None:
    """Let go of long buffers, files and theirs, e.g. between training and evaluation."""
    for one in saved_inputs.stores():
        one.reset()


# -- reentrant -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _boundary(what: str) -> Iterator[None]:
    """Wait and measure at the edges of a forward or recomputation, where the settings ask for it.

    It waits for the current stream, which all that is computed here is on or has joined. The whole
    device would include receives that a pipeline has posted, for which it may wait for ever.
    """
    chosen = settings.current()
    if chosen.synchronize:
        get_accelerator().current_stream().synchronize()
    # A timer of its own: checkpointed functions nest.
    timer = None
    if chosen.profile:
        timer = SynchronizedWallClockTimer.Timer(f"activation checkpoint {what}")
    if timer is not None:
        timer.start()
    try:
        yield
    finally:
        if timer is not None:
            timer.stop()
            logger.info(f"{timer.name_}: {timer.elapsed():.3f} ms")
        if chosen.synchronize:
            get_accelerator().current_stream().synchronize()


class CheckpointFunction(torch.autograd.Function):
    """One checkpointed function on flat arguments: ``apply(run_function, all_outputs, *args)``.

    `run_function(*args)` returns a tensor, or a tuple or list of tensors and other objects. All of
    them are appended to the list `all_outputs`; `apply` returns the tensors, attached to the graph.
    """

    @staticmethod
    def forward(
        ctx: Any, run_function: Callable[..., Any], all_outputs: list[Any], *args: object
    ) -> Any:
        tensors, ctx.others, ctx.flags = tensor_lists.extract_tensors(args)
        ctx.run_function = run_function
        ctx.surroundings = Surroundings()
        ctx.set_materialize_grads(False)
        versions = [tensor._version for tensor in tensors]
        with torch.no_grad(), _boundary("forward"):
            outputs = run_function(*args)
        _refuse_changed(tensors, versions)
        ctx.save_for_backward(*tensors)
        all_outputs += outputs if isinstance(outputs, (tuple, list)) else [outputs]
        if isinstance(outputs, torch.Tensor):
            ctx.mark_non_differentiable(*_without_gradient([outputs]))
            return outputs
        results = tensor_lists.extract_tensors(tuple(all_outputs))[0]
        ctx.mark_non_differentiable(*_without_gradient(results))
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "torch.autograd.grad(), or backward(inputs=...), through "
                "deepspeed.checkpointing.checkpoint: a nested backward accumulates into .grad; "
                "call .backward(), or use non_reentrant_checkpoint"
            )
        inputs = tensor_lists.detach_variable(
            tensor_lists.merge_tensors(ctx.saved_tensors, ctx.others, ctx.flags)
        )
        with ctx.surroundings.again(), torch.enable_grad(), _boundary("recomputation"):
            outputs = ctx.run_function(*inputs)
        tensors = (
            [outputs]
            if isinstance(outputs, torch.Tensor)
            else tensor_lists.extract_tensors(tuple(outputs))[0]
        )
        if len(tensors) != len(grads):
            raise RuntimeError(
                f"a checkpointed function returned {len(grads)} tensors in forward and "
                f"{len(tensors)} in backward"
            )
        both = zip(tensors, grads, strict=True)
        pairs = [(out, grad) for out, grad in both if grad is not None and out.requires_grad]
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        return (None, None, *(x.grad if isinstance(x, torch.Tensor) else None for x in inputs))


def _without_gradient(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if not (tensor.is_floating_point() or tensor.is_complex())]


def _refuse_changed(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    for tensor, version in zip(tensors, versions, strict=True):
        if tensor._version != version:
            raise RuntimeError(
                f"a checkpointed function modified its input ({tensor.dtype}, "
                f"{list(tensor.shape)}) in place: recomputation would start from the modified "
                "value; clone the input first, or start the function after that operation"
            )


class _Flat:
    """A function on the leaves of its nested arguments and results, as autograd and saved-tensor
    hooks want it. It holds no argument: autograd keeps them, or what they were packed into.
    """

    def __init__(self, function: Callable[..., Any], arguments: pytree.TreeSpec) -> None:
        self._function = function
        self._arguments = arguments
        self._results: Any = None

    def __call__(self, *leaves: object) -> tuple[Any, ...]:
        """Compute the leaves of the result; further arguments than the function's are dropped."""
        args, kwargs = pytree.tree_unflatten(leaves[: self._arguments.num_leaves], self._arguments)
        results, self._results = pytree.tree_flatten(self._function(*args, **kwargs))
        return tuple(results)

    def nested(self, leaves: Sequence[Any]) -> Any:
        return pytree.tree_unflatten(leaves, self._results)


def checkpoint(function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Call `function(*args, **kwargs)`, keeping its arguments, and again in backward.

    Tensors may lie anywhere in nested arguments and results, and need not require gradients. The
    result is the function's; as upstream, a tuple or list at the top comes as a tuple, or, of one
    element, as that element.

    Raises:
        RuntimeError: The function modifies an argument in place; or, in backward, under
            `torch.autograd.grad`.
    """
    if not torch.is_grad_enabled():
        return _as_upstream(function(*args, **kwargs))
    leaves, arguments = pytree.tree_flatten((args, kwargs))
    flat = _Flat(function, arguments)
    if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        # autograd runs the backward of a node only if an input requires a gradient; the function's
        # parameters are no inputs.
        leaves = [*leaves, torch.empty(0, requires_grad=True)]
    outputs: list[Any] = []
    with saved_inputs.store().hooks():
        attached = iter(CheckpointFunction.apply(flat, outputs, *leaves))
    return _as_upstream(
        flat.nested([next(attached) if isinstance(one, torch.Tensor) else one for one in outputs])
    )


def _as_upstream(result: Any) -> Any:
    if type(result) not in (tuple, list):
        return result
    return result[0] if len(result) == 1 else tuple(result)


# -- non-reentrant ---------------------------------------------------------------------------------


class _Recomputation:
    """Entered around each recomputation of a function, several times for a retained graph."""

    def __init__(self) -> None:
        self._surroundings = Surroundings()
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._surroundings.again())
            stack.enter_context(_boundary("recomputation"))
            self._entered.append(stack.pop_all())

    def __exit__(self, *exc: Any) -> None:
        self._entered.pop().__exit__(*exc)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Checkpoint inside of the one backward: also under `torch.autograd.grad`, and each parameter's
    hook fires once. The result is the function's own.
    """
    with saved_inputs.store().hooks():
        return recomputed(function, *args, **kwargs)


def recomputed(function: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
    """Checkpoint without reentering, with inputs that stay where they are whatever `configure`
    says: pieces of a larger tensor, which are views and cost nothing to keep.
    """
    leaves, arguments = pytree.tree_flatten((args, kwargs))
    flat = _Flat(function, arguments)
    results = torchs.checkpoint(
        flat,
        *leaves,
        use_reentrant=False,
        # Random states are ours to restore: torch doesn't know the tracker's.
        preserve_rng_state=False,
        context_fn=lambda: (_boundary("forward"), _Recomputation()),
    )
    return flat.nested(results)


# -- torch's ---------------------------------------------------------------------------------------


@functools.cache
def _move_inputs_of_torchs() -> None:
    """From now on the host has inputs of `torch.utils.checkpoint.checkpoint` too, which models such
    as those of transformers call, where the settings say so.

    They have it by name: what is replaced is what it calls. Parts of inputs over tensor-parallel
    ranks are for those who ask for them, by our functions: such inputs must be equal on all ranks.

    Raises:
        DeepSpeedConfigError: torch's function calls something else, and would keep inputs on the
            device without a word.
    """
    name = "_checkpoint_without_reentrant_generator"
    if hasattr(torchs, f"{name}_impl"):  # torch 2.14: what it calls; the other is for outsiders
        name = f"{name}_impl"
    generator: Any = getattr(torchs, name, None)
    calls = 0

    def hooks() -> contextlib.AbstractContextManager[None]:
        nonlocal calls
        calls += 1
        is_asked = settings.current().cpu
        return saved_inputs.store(whole=True).hooks() if is_asked else contextlib.nullcontext()

    class Reentrant(torchs.CheckpointFunction):
        @classmethod
        def apply(cls, *args: Any) -> Any:
            with hooks():
                return super().apply(*args)

    def not_reentrant(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        # Our functions' inputs are where they should be.
        with contextlib.nullcontext() if isinstance(function, _Flat) else hooks():
            yield from generator(function, *args, **kwargs)

    replaced = {"CheckpointFunction": torchs.CheckpointFunction, name: generator}
    vars(torchs).update({"CheckpointFunction": Reentrant, name: not_reentrant})
    for is_reentrant in (True, False):
        number, tiny = calls, torch.zeros(1, device="cpu", requires_grad=True)
        torchs.checkpoint(torch.sin, tiny, use_reentrant=is_reentrant, preserve_rng_state=False)
        if calls == number:
            vars(torchs).update(replaced)
            raise DeepSpeedConfigError(
                "activation_checkpointing.cpu_checkpointing: torch "
                f"{torch.__version__} saves inputs of checkpoint(use_reentrant={is_reentrant}) in "
                "a way that this release does not know, and they would stay on the device; set "
                "cpu_checkpointing: false, or install a torch of docs/support.md"
            )
