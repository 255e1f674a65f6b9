"""Host optimizers: all implementations give the same bits, of the published updates."""

import logging
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from deepspeed.ops import host_optimizer
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.host_optimizer import HostOptimizer, native_op, update_native
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.ops.op_builder import ALL_OPS, OpBuilder

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
Patch = pytest.MonkeyPatch
SETS = ("avx512", "avx2", "scalar")
RULES: list[tuple[type[HostOptimizer], dict[str, Any]]] = [
    (DeepSpeedCPUAdam, {"weight_decay": 0.1}),
    (DeepSpeedCPUAdam, {"weight_decay": 0.1, "adamw_mode": False}),
    (DeepSpeedCPUAdam, {"amsgrad": True, "bias_correction": False}),
    (DeepSpeedCPUAdagrad, {"weight_decay": 0.1}),
    (DeepSpeedCPULion, {"weight_decay": 0.1}),
]
# (parameter, gradient, copy): fp32 masters in all combinations, and parameters of the model's own
# dtype.
DTYPES = [(F32, grad, out) for grad in (F32, BF16, F16) for out in (None, BF16, F16)]
DTYPES += [(BF16, BF16, None), (F16, F16, BF16)]
# Zeros, denormals of all dtypes, the ends of float16's range, infinities, not a number.
SPECIAL = [*map(float, "0 -0 1e-40 -1e-42 6e-8 2.9e-8 65504 65520 3e38 inf -inf nan".split())]


def use_torch(monkeypatch: Patch) -> None:
    monkeypatch.setattr(host_optimizer, "native_op", lambda name: None)


def use(monkeypatch: Patch, instruction_set: str) -> None:
    op = native_op("cpu_adam")
    if op is None or instruction_set not in op.instruction_sets():
        pytest.skip(f"this machine cannot build or run {instruction_set}")
    use_set = partial(update_native, instruction_set=instruction_set)
    monkeypatch.setattr(host_optimizer, "update_native", use_set)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits; every NaN counts as the same."""
    flat = torch.where(tensor.isnan(), torch.nan, tensor)
    return flat.contiguous().view(torch.int32 if flat.dtype == F32 else torch.int16)


def run(
    cls: Any, options: dict[str, Any], dtypes: Any, numel: int, fp32: bool, offset: int = 0
) -> list[torch.Tensor]:
    """Parameter, states and copy after three steps, `offset` elements behind aligned addresses."""
    torch.manual_seed(1)
    kind, grad_kind, out_kind = dtypes
    param = torch.randn(numel + offset).to(kind)[offset:]
    out = None if out_kind is None else torch.full((numel + offset,), 7.0, dtype=out_kind)[offset:]
    optimizer = cls([param], fp32_optimizer_states=fp32, **options)
    for _ in range(3):
        grad = torch.randn(numel + offset).to(grad_kind)[offset:]
        if numel > len(SPECIAL):
            grad[-len(SPECIAL) :] = torch.tensor(SPECIAL).to(grad_kind)
        optimizer.step_flat(param, grad, grad_factor=0.37, low_precision_out=out)
    states = [value for value in optimizer.state[param].values() if isinstance(value, torch.Tensor)]
    return [param, *states, *([] if out is None else [out])]


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("cls, options", RULES)
def test_all_give_the_same_bits(
    monkeypatch: Patch, instruction_set: str, cls: Any, options: dict[str, Any]
) -> None:
    # Kills: a fused multiply-add, a tail that is skipped or runs over, a dtype read as another, a
    # lost NaN, flushed denormals.
    sizes = ((1, 0), (77, 1), (1003, 0))
    for dtypes, (numel, offset), fp32 in product(DTYPES, sizes, (True, False)):
        with monkeypatch.context() as patch:
            use(patch, instruction_set)
            found = run(cls, options, dtypes, numel, fp32, offset)
        with monkeypatch.context() as patch:
            use_torch(patch)
            wanted = run(cls, options, dtypes, numel, fp32, offset)
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(bits(a), bits(b)), (dtypes, numel, fp32)


@pytest.mark.parametrize("cls, options", RULES)
def test_threads_change_no_bit(cls: type[HostOptimizer], options: dict[str, Any]) -> None:
    # Kills: threads that overlap or leave a gap; 70001 is cut into uneven parts for 3 threads.
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(run(cls, options, (F32, BF16, BF16), 70001, True))
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(*found, strict=True):
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("instruction_set", SETS)
def test_the_copy_is_rounded_to_nearest_even(monkeypatch: Patch, instruction_set: str) -> None:
    # Kills: truncation, ties away from zero, a NaN that becomes infinity, denormals rounded twice.
    use(monkeypatch, instruction_set)
    torch.manual_seed(3)
    patterns = torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int64).to(torch.int32)
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(F16).float()
    between = torch.nextafter(halves, torch.tensor(float("inf"))) * 0.5 + halves * 0.5
    lows = ((upper | low).view(F32) for low in (0, 0x7FFF, 0x8000, 0x8001))
    param = torch.cat([patterns.view(F32), *lows, halves, between])
    param = torch.cat([param, (halves[1:] + halves[:-1]) * 0.5])
    for dtype in (BF16, F16):
        out = torch.empty_like(param, dtype=dtype)
        still, zero = param.clone(), torch.zeros_like(param)
        DeepSpeedCPULion([still], lr=0.0).step_flat(still, zero, low_precision_out=out)
        number = ~param.isnan()
        assert torch.equal(out.isnan(), ~number)
        assert torch.equal(bits(out)[number], bits(param.to(dtype))[number])


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_gradient_is_read_exactly(
    monkeypatch: Patch, instruction_set: str, dtype: torch.dtype
) -> None:
    # Kills: denormals read as zero, infinity read as a number. The momentum becomes the gradient
    # when beta2 is 0.
    use(monkeypatch, instruction_set)
    grad = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    param = torch.zeros(grad.numel())
    optimizer = DeepSpeedCPULion([param], betas=(0.9, 0.0))
    optimizer.step_flat(param, grad)
    momentum = optimizer.state[param]["exp_avg"]
    torch.testing.assert_close(momentum, grad.float(), rtol=0, atol=0, equal_nan=True)


def ulps(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Distance in units of the last place of `wanted`, or of a parameter's step (1e-2)."""
    spacing = torch.finfo(F32).eps * wanted.abs().clamp_min(1e-2)
    return float(((found.double() - wanted.double()).abs() / spacing).max())


@pytest.mark.parametrize(
    "make, torchs, own, shared",
    [
        (DeepSpeedCPUAdam, torch.optim.AdamW, {}, {"lr": 1e-2}),
        (DeepSpeedCPUAdam, torch.optim.AdamW, {}, {"lr": 1e-2, "amsgrad": True}),
        (DeepSpeedCPUAdam, torch.optim.Adam, {"adamw_mode": False}, {"lr": 1e-2}),
        (DeepSpeedCPUAdagrad, torch.optim.Adagrad, {}, {}),
    ],
)
def test_torchs_agree_to_a_few_ulps(make: Any, torchs: Any, own: Any, shared: Any) -> None:
    # Kills: missing bias correction, the other weight decay, the root before the correction. A step
    # rounds about six times.
    torch.manual_seed(5)
    start, steps = torch.randn(5000), 10
    found, wanted = start.clone(), start.clone()
    ours = make([found], weight_decay=0.1, **own, **shared)
    theirs = torchs([wanted], weight_decay=0.1, **shared)
    for _ in range(steps):
        found.grad = torch.randn(5000)
        wanted.grad = found.grad.clone()
        ours.step()
        theirs.step()
    assert ulps(found, wanted) <= 2 * steps


@pytest.mark.parametrize("correct", [True, False])
def test_adam_without_bias_correction(correct: bool) -> None:
    # Kills: an argument that is accepted and ignored. One step from zero state: m = (1-b1)g, v =
    # (1-b2)g^2.
    for beta2, plain, rtol in ((0.99, -0.1 / 0.1, 1e-6), (0.999, -0.1 / 0.001**0.5, 1e-5)):
        param, options = torch.zeros(4), {"betas": (0.9, beta2), "bias_correction": correct}
        optimizer = DeepSpeedCPUAdam([param], lr=1.0, eps=0.0, **options)
        optimizer.step_flat(param, torch.full((4,), 3.0))
        wanted = torch.full((4,), -1.0 if correct else plain)
        torch.testing.assert_close(param, wanted, rtol=rtol, atol=0)


def test_unscaling_and_clipping_are_fused() -> None:
    # Kills: a factor that is applied twice, or to the stored gradient. 2^-3 is exact, so the bits
    # must agree.
    grad = torch.randn(100)
    fused, apart = torch.ones(100), torch.ones(100)
    kept = grad.clone()
    DeepSpeedCPUAdam([fused]).step_flat(fused, grad, grad_factor=0.125)
    DeepSpeedCPUAdam([apart]).step_flat(apart, grad * 0.125)
    assert torch.equal(fused, apart) and torch.equal(grad, kept)


def test_state_dtypes_and_loading() -> None:
    # Kills: fp32 moments that torch's load_state_dict rounds to a bf16 parameter's dtype.
    for fp32, dtype in ((True, F32), (False, BF16)):
        param = torch.randn(50).to(BF16)
        first = DeepSpeedCPUAdam([param], fp32_optimizer_states=fp32)
        first.step_flat(param, torch.randn(50))
        assert first.state[param]["exp_avg"].dtype == dtype
        second = DeepSpeedCPUAdam([param], fp32_optimizer_states=fp32)
        second.load_state_dict(first.state_dict())
        assert torch.equal(second.state[param]["exp_avg"], first.state[param]["exp_avg"])
        assert second.state[param]["exp_avg"].dtype == dtype and second.state[param]["step"] == 1


def test_torchs_state_is_taken_over_and_another_optimizers_refused() -> None:
    # Kills: state of another name that is left unused, so that training starts anew without a word.
    param = torch.randn(50)
    torchs = torch.optim.AdamW([param])
    param.grad = torch.randn(50)
    torchs.step()
    ours = DeepSpeedCPUAdam([param])
    ours.load_state_dict(torchs.state_dict())
    ours.step()
    assert ours.state[param]["step"] == 2
    adagrad = DeepSpeedCPUAdagrad([param])
    adagrad.load_state_dict(torchs.state_dict())
    told = r"DeepSpeedCPUAdagrad: the state .* without \['exp_avg_sq'\]: it was saved by another"
    with pytest.raises(ValueError, match=told):
        adagrad.state[param].pop("exp_avg_sq")
        adagrad.step()


@pytest.mark.parametrize(
    "grad, out, said",
    [
        (torch.zeros(6, 2).T, None, r"gradient of shape \(2, 6\) is not contiguous"),
        (torch.zeros(11), None, "gradient of shape .* has 11 elements, the parameter 12"),
        (torch.zeros(12).double(), None, "gradient .* is torch.float64; use torch.float32"),
        (
            torch.zeros(12, device="meta"),
            None,
            "gradient .* is on meta; use zero_optimization.offload_optimizer",
        ),
        (
            torch.zeros(12),
            torch.zeros(12),
            "low_precision_out is torch.float32; use torch.bfloat16",
        ),
        (torch.zeros(12), torch.zeros(24, dtype=BF16)[::2], "low_precision_out .* not contiguous"),
        (torch.zeros(12).to_sparse(), None, "layout torch.sparse_coo; use dense"),
    ],
)
def test_what_cannot_be_updated_changes_nothing(grad: torch.Tensor, out: Any, said: str) -> None:
    param = torch.ones(12)
    optimizer = DeepSpeedCPUAdam([param])
    told = said if "low_precision_out is" in said else f"DeepSpeedCPUAdam: .*{said}"
    with pytest.raises(ValueError, match=told):
        optimizer.step_flat(param, grad, low_precision_out=out)
    assert torch.equal(param, torch.ones(12)) and not optimizer.state[param]
    with pytest.raises(ValueError, match="in no parameter group"):
        optimizer.step_flat(torch.ones(3), torch.ones(3))


def test_step_takes_closures_copied_gradients_and_empty_parameters() -> None:
    whole, empty, idle = torch.ones(3, 4), torch.ones(0), torch.ones(2)
    optimizer = DeepSpeedCPUAdagrad([{"params": [whole, idle], "lr": 0.5}, {"params": [empty]}])

    def closure() -> float:
        whole.grad, empty.grad = torch.arange(1.0, 13).view(4, 3).T, torch.ones(0)
        return 7.0

    assert optimizer.step(closure) == 7.0
    torch.testing.assert_close(whole, torch.full((3, 4), 0.5))
    assert torch.equal(idle, torch.ones(2)) and idle not in optimizer.state


@pytest.fixture
def without_op(monkeypatch: Patch) -> Iterator[None]:
    """A machine whose compiler does not work."""
    monkeypatch.setattr(OpBuilder, "_loaded", {})
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(type(ALL_OPS["cpu_adam"]), "is_prebuilt", lambda self: False)
    native_op.cache_clear()
    yield
    native_op.cache_clear()


def test_without_a_compiler_torch_does_it(without_op: None, caplog: Any) -> None:
    # Kills: a run that ends, or warns at every step, because no compiler is there.
    log = logging.getLogger("DeepSpeed")
    log.addHandler(caplog.handler)
    try:
        for _ in range(2):
            param = torch.ones(8)
            optimizer = DeepSpeedCPUAdam([param], lr=0.1)
            for _ in range(2):
                optimizer.step_flat(param, torch.ones(8))
    finally:
        log.removeHandler(caplog.handler)
    torch.testing.assert_close(param, torch.full((8,), 0.8))
    (text,) = (record.getMessage() for record in caplog.records)
    assert "op cpu_adam cannot be used" in text and "no C++ compiler found" in text
