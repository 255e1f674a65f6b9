"""The flops profiler: counts worked out by hand, and what the configuration's block makes."""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.pipe import PipelineModule
from deepspeed.profiling import config as profiling_config
from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile, report
from deepspeed.profiling.flops_profiler import profiler as profilers
from deepspeed.profiling.flops_profiler.profiler import number_to_string, params_to_string
from unit.common import DistributedTest
from unit.models import config_of, seeded


class Net(nn.Module):
    """2 x 3 -> 4 -> 4 -> 4, the second layer called twice; its list is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.rest = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.rest[1](self.rest[0](self.rest[0](x)))


FIRST, AGAIN = 2 * 2 * 3 * 4, 2 * 2 * 4 * 4  # two operations per product, batch 2
TOTAL = FIRST + 2 * AGAIN
PARAMS = 3 * 4 + 4 + 4 * 4 + 4


def quiet(model: nn.Module, **given: Any) -> Any:
    return get_model_profile(model, print_profile=False, as_string=False, **given)


def test_counts_by_hand() -> None:
    # Kills: a layer that is called twice counted once, biases counted, MACs that are operations.
    x = torch.ones(2, 3)
    for given in ({"input_shape": (2, 3)}, {"args": [x]}, {"kwargs": {"x": x}}):
        assert quiet(Net(), **given) == (TOTAL, TOTAL // 2, PARAMS)
    assert get_model_profile(Net(), (2, 3), print_profile=False) == ("176 ", "88 MACs", "36")


def test_ignored_modules_count_nowhere() -> None:
    # Kills: operations of an ignored module that stay in the totals of those that call it.
    assert quiet(Net(), input_shape=(2, 3), ignore_modules=[nn.Linear])[0] == 0
    nested = nn.Sequential(Net(), nn.Linear(4, 4))
    assert quiet(nested, input_shape=(2, 3), ignore_modules=[Net])[0] == AGAIN


def test_attention_and_convolution() -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, k)

    # Batch 2, 3 heads, 5 queries, 7 keys, width 4: two products of 5 x 7 x 4 per head.
    q, k = torch.ones(2, 3, 5, 4), torch.ones(2, 3, 7, 4)
    assert quiet(Attention(), args=[q, k])[0] == 2 * 3 * 2 * (2 * 5 * 7 * 4)
    # 6 x 6 positions, 3 x 3 window, 2 -> 5 channels.
    assert quiet(nn.Conv2d(2, 5, 3, padding=1), input_shape=(1, 2, 6, 6))[0] == 2 * 36 * 9 * 2 * 5


def test_parts_and_their_sums() -> None:
    model = Net()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    for _ in range(2):
        model(torch.ones(2, 3))
    profiler.stop_profile()
    model(torch.ones(2, 3))  # not profiled any more
    assert report.get_module_flops(model) == profiler.get_total_flops() == 2 * TOTAL
    for part in (model.rest[0], model.rest):
        assert report.get_module_flops(part) == 4 * AGAIN
    whole = report.get_module_duration(model)
    assert 0 < report.get_module_duration(model.first) < whole == profiler.get_total_duration()
    assert profiler.get_total_params() == PARAMS
    assert profiler.get_total_macs(as_string=True) == "176 MACs"
    profiler.reset_profile()
    assert profiler.get_total_flops() == 0
    profiler.end_profile()
    # Kills: hooks or attributes that stay behind.
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(report.profile_of(module) is None for module in model.modules())


def test_a_forward_that_raises_leaves_nothing_open() -> None:
    # Kills: a counter that goes on, a total that has the failed forward's open modules in it.
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 4))
    with pytest.raises(RuntimeError):
        quiet(model, input_shape=(2, 3), warm_up=0)
    model[1] = nn.Linear(4, 4)
    assert quiet(model, input_shape=(2, 3)) == (FIRST + AGAIN, (FIRST + AGAIN) // 2, PARAMS)


def test_gradients_do_not_change() -> None:
    def gradients(profiled: bool) -> list[torch.Tensor]:
        model = seeded(Net)
        profiler = FlopsProfiler(model)
        if profiled:
            profiler.start_profile()
        out = checkpoint(model, torch.ones(2, 3), use_reentrant=False)
        profiler.stop_profile()
        out.sum().backward()
        return [param.grad for param in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="no input"):
        get_model_profile(Net())
    with pytest.raises(ValueError, match="mode='backward'"):
        get_model_profile(Net(), (2, 3), mode="backward")
    with pytest.raises(ValueError, match="units='Q'"):
        number_to_string(1.0, units="Q")


def test_units() -> None:
    numbers = (0, 1, 999, 1234, 1e6, 2.5e9, 3e12, 0.5, 1e-3, 1e-7)
    texts = ["0 ", "1 ", "999 ", "1.23 K", "1 M", "2.5 G", "3 T", "500 m", "1 m", "0.1 u"]
    assert [number_to_string(n) for n in numbers] == texts
    assert [params_to_string(n) for n in (0, 1234, 2.5e9)] == ["0", "1.23 K", "2.5 B"]
    assert params_to_string(2.5e9, units="M") == "2500 M"
    assert profilers.duration_to_string(0.5, units="ms") == "500 ms"


def test_report(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.txt"
    get_model_profile(Net(), (2, 3), output_file=str(path), top_modules=2)
    text = path.read_text()
    lines = [line.split() for line in text.splitlines()]
    assert ["fwd", "flops", "per", "GPU:", str(TOTAL)] in lines
    assert "depth 1:" in text
    assert "(first): Linear(16 = 44.44% Params, 24 MACs = 27.27% MACs" in text
    assert "bwd latency" not in text  # nothing was measured
    get_model_profile(Net(), (2, 3), output_file=str(path), detailed=False, module_depth=0)
    assert "(first)" not in path.read_text() and "depth 1:" not in path.read_text()


def start(model: nn.Module, accumulation: int = 1, **keys: Any) -> Any:
    optimizer = {"type": "SGD", "params": {"lr": 0.25}}
    config = config_of(0, 2, accumulation, optimizer=optimizer, **keys)
    return deepspeed.initialize(model=model, config=config)[0]


def trained(model: nn.Module, steps: int, **keys: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        engine = start(model, **keys)
        for _ in range(steps):
            if isinstance(model, PipelineModule):
                engine.train_batch(iter([(torch.ones(2, 3), torch.zeros(2, 4))] * 2))
                continue
            for _ in range(engine.gradient_accumulation_steps()):
                engine.backward(engine(torch.ones(2, 3)).sum())
                engine.step()
        engine.destroy()
    return out.getvalue()


PHASES = ("forward", "backward", "step")


class TestEngine(DistributedTest):
    world_size = 1

    @pytest.mark.parametrize("pipeline", [False, True])
    def test_the_step_is_profiled_once(self, pipeline: bool) -> None:
        # Kills: several micro-batches in one number, a report each or the wrong step, left hooks.
        model: nn.Module = Net()
        if pipeline:
            layers = [nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
            model = PipelineModule(layers, num_stages=1, loss_fn=nn.functional.mse_loss)
        keys = {"accumulation": 2, "flops_profiler": {"enabled": True, "profile_step": 1}}
        assert "Profiler" not in trained(model, 1, **keys)
        out = trained(model, 4, **keys)
        assert out.count("DeepSpeed Flops Profiler") == 1 and "Profile Summary at step 1:" in out
        (flops,) = [line for line in out.splitlines() if line.startswith("fwd flops per GPU:")]
        assert flops.split(":")[1].strip() == str(TOTAL)
        lines = ("bwd latency", "step latency", "samples/second", "batch size per GPU")
        assert all(line in out for line in lines)
        assert not any(m._forward_hooks or report.profile_of(m) for m in model.modules())

    def test_getters_and_defaults(self) -> None:
        # Kills: a constant that is not the block's default, a getter of another key.
        block = {
            **{"enabled": False, "profile_step": 7, "module_depth": 2, "top_modules": 3},
            **{"detailed": False, "output_file": "f"},
        }
        engine = start(Net(), flops_profiler=block, memory_breakdown=True)
        assert {key: getattr(engine, f"flops_profiler_{key}")() for key in block} == block
        assert engine.flops_profiler_recompute_fwd_factor() == 0.0
        assert engine.memory_breakdown() is True
        engine.destroy()
        for key, default in profiling_config.DeepSpeedFlopsProfilerConfig():
            name = f"FLOPS_PROFILER_{key.upper()}"
            assert getattr(profiling_config, name) == key
            assert getattr(profiling_config, f"{name}_DEFAULT") == default

    def test_memory_breakdown(self) -> None:
        out = trained(Net(), 2, memory_breakdown=True)
        phases = [f"{when} {what}" for what in PHASES for when in ("before", "after")]
        at = [out.index(f"{phase}\nMA ") for phase in phases]
        assert at == sorted(at)
        assert out.count("after step") == 2
        assert out.count("CPU Virtual Memory:") == 12
