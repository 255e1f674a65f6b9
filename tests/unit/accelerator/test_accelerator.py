"""Choosing the accelerator, the host as one, and the contract of all of them."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator, real_accelerator
from deepspeed.accelerator import is_current_accelerator_supported as is_supported
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.accelerator.hpu_accelerator import HPU_Accelerator
from deepspeed.accelerator.mps_accelerator import MPS_Accelerator
from deepspeed.accelerator.npu_accelerator import NPU_Accelerator
from deepspeed.accelerator.torch_device_accelerator import TorchDeviceAccelerator
from deepspeed.accelerator.xpu_accelerator import XPU_Accelerator

BUILT_IN: list[Any] = [CPU_Accelerator, CUDA_Accelerator, XPU_Accelerator]
BUILT_IN += [NPU_Accelerator, HPU_Accelerator, MPS_Accelerator]


@pytest.fixture
def unchosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No accelerator is chosen yet; the present one comes back afterwards."""
    monkeypatch.setattr(real_accelerator, "ds_accelerator", None)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    yield


class Plugin(CPU_Accelerator):
    """A third-party accelerator."""

    available = True

    def __init__(self) -> None:
        super().__init__()
        self._name = "third"

    def is_available(self) -> bool:
        return self.available


def _register(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    point = EntryPoint(name, value, real_accelerator.ENTRY_POINT_GROUP)
    points = {point.group: [point]}
    monkeypatch.setattr(real_accelerator, "entry_points", lambda group: points.get(group, []))


def test_cuda_locks_no_more_than_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kills: memory that is rounded up to a power of two, or stays locked when it is let go.
    locked: dict[int, int] = {}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: locked.update({address: nbytes}) or 0,
        cudaHostUnregister=locked.pop,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda status: None)
    memory = CUDA_Accelerator().host_empty(100_001, torch.float32, pin=True)
    memory[0] = memory[-1] = 1.0
    assert memory.shape == (100_001,) and locked == {memory.data_ptr(): memory.nbytes}
    memory = memory[10:20]
    assert locked
    del memory
    assert not locked
    assert CUDA_Accelerator().host_empty(3, torch.int64).shape == (3,)


def test_environment_chooses(unchosen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    chosen = get_accelerator()
    assert isinstance(chosen, CPU_Accelerator)
    assert get_accelerator() is chosen
    assert is_supported()


def test_unknown_names_are_refused(unchosen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("simulator", "cpuu"):
        monkeypatch.setenv("DS_ACCELERATOR", name)
        with pytest.raises(ValueError, match=f"DS_ACCELERATOR={name} names no") as caught:
            get_accelerator()
        assert "'cpu'" in str(caught.value)


def test_plugin_by_name_and_by_detection(unchosen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _register(monkeypatch, "third", f"{__name__}:Plugin")
    assert get_accelerator()._name == "third"
    assert is_supported()
    monkeypatch.setattr(Plugin, "available", False)
    monkeypatch.setattr(real_accelerator, "ds_accelerator", None)
    assert get_accelerator()._name != "third"
    monkeypatch.setattr(real_accelerator, "ds_accelerator", None)
    monkeypatch.setenv("DS_ACCELERATOR", "third")
    assert get_accelerator()._name == "third"


def test_plugin_that_is_no_accelerator(unchosen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _register(monkeypatch, "odd", "builtins:dict")
    monkeypatch.setenv("DS_ACCELERATOR", "odd")
    with pytest.raises(TypeError, match="entry point 'odd'.*not a DeepSpeedAccelerator"):
        get_accelerator()


def test_set_accelerator(unchosen: None) -> None:
    mine = CPU_Accelerator()
    real_accelerator.set_accelerator(mine)
    assert get_accelerator() is mine
    unnamed = CPU_Accelerator()
    unnamed._name = "unheard"
    real_accelerator.set_accelerator(unnamed)
    assert not is_supported()
    with pytest.raises(TypeError, match="set_accelerator's argument"):
        real_accelerator.set_accelerator("cuda")  # type: ignore[arg-type]  # the mistake under test


def test_detection_leaves_the_driver_alone() -> None:
    script = """
        import torch
        from deepspeed.accelerator import get_accelerator
        accelerator = get_accelerator()
        assert not torch.cuda.is_initialized()
        accelerator.is_available(), accelerator.device_count()
        accelerator.communication_backend_name()
        assert not torch.cuda.is_initialized()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


@pytest.mark.parametrize("kind", BUILT_IN)
def test_every_accelerator_is_complete(kind: type[DeepSpeedAccelerator]) -> None:
    """Constructed and asked for its identity without its device."""
    accelerator = kind()
    assert accelerator.device_name() == accelerator._name
    assert accelerator.communication_backend_name()
    assert isinstance(accelerator.is_available(), bool)
    assert isinstance(accelerator.export_envs(), list)
    assert accelerator.op_builder_dir() == "deepspeed.ops.op_builder"
    assert accelerator.get_op_builder("NoSuchBuilder") is None
    assert accelerator.create_op_builder("NoSuchBuilder") is None
    public = [name for name in vars(DeepSpeedAccelerator) if not name.startswith("_")]
    said = [(getattr(DeepSpeedAccelerator, name).__doc__ or "").strip() for name in public]
    assert len(public) >= 70 and all(said)


def test_device_modules_that_are_missing_are_named() -> None:
    with pytest.raises(RuntimeError, match="torch_npu"):
        NPU_Accelerator().device_count()
    with pytest.raises(RuntimeError, match="habana_frameworks"):
        HPU_Accelerator().device_count()


def test_device_accelerator_asks_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of `TorchDeviceAccelerator` against a module that records what it is asked."""
    asked: list[Any] = []

    answers = {
        **{"current_device": 1, "set_device": None, "synchronize": None, "memory_allocated": 10},
        **{"memory_reserved": 30, "mem_get_info": (100, 200), "get_rng_state": torch.zeros(1)},
        "current_stream": "now",
    }

    def record(name: str) -> Any:
        return lambda *args: asked.append((name, *args)) or answers[name]

    module = SimpleNamespace(
        **{name: record(name) for name in answers},
        get_device_properties=lambda index: SimpleNamespace(total_memory=200 + index),
        Stream="stream class",
    )

    class Made(CUDA_Accelerator):
        @property
        def _module(self) -> Any:
            return module

    accelerator = Made()
    accelerator._name = "cuda"
    assert accelerator.current_device_name() == "cuda:1"
    accelerator.set_device(3)
    accelerator.synchronize()
    assert accelerator.available_memory() == 100 + 30 - 10
    assert accelerator.total_memory() == 201
    assert accelerator.max_memory_allocated() == 0  # the module keeps no peaks
    accelerator.reset_peak_memory_stats()
    accelerator.get_rng_state()
    accelerator.get_rng_state(2)
    assert accelerator.Stream == "stream class" and accelerator.current_stream() == "now"
    assert not accelerator.is_synchronized_device() and not accelerator.use_host_timers()
    assert ("set_device", 3) in asked and ("synchronize", None) in asked
    assert ("get_rng_state",) in asked and ("get_rng_state", 2) in asked
    monkeypatch.delattr(torch, "cuda")
    with pytest.raises(RuntimeError, match="no torch.cuda"):
        TorchDeviceAccelerator._module.fget(accelerator)  # type: ignore[attr-defined]  # a property


class TestHost:
    accelerator = CPU_Accelerator()

    def test_identity(self) -> None:
        host = self.accelerator
        assert host.device_name() == host.device_name(3) == host.current_device_name() == "cpu"
        assert host.device_count() == 1 and host.current_device() == 0
        assert host.is_available() and host.is_synchronized_device() and host.use_host_timers()
        assert host.resolves_data_dependency() and host.handles_memory_backpressure()
        with host.device(0):
            assert host.on_accelerator(torch.ones(1))
        host.set_device(0)
        host.synchronize()

    def test_backend_follows_oneccl(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import importlib.util

        assert CPU_Accelerator().communication_backend_name() in ("gloo", "ccl")
        for found, backend in ((None, "gloo"), (object(), "ccl")):
            monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=found: found)
            assert CPU_Accelerator().communication_backend_name() == backend

    def test_streams_order_nothing_and_never_wait(self) -> None:
        host = self.accelerator
        current = host.current_stream()
        assert current is host.current_stream() is host.default_stream()
        stream = host.Stream()
        assert len({current, host.current_stream(), stream}) == 2
        with host.stream(stream), stream:
            event = stream.record_event()
            stream.wait_stream(current)
            current.wait_event(event)
        end = host.Event(enable_timing=True)
        end.record(current)
        assert event.query() and stream.query() and event.elapsed_time(end) >= 0
        event.wait(), event.synchronize(), stream.synchronize()
        assert stream.record_event(end) is end
        with pytest.raises(RuntimeError, match="record"):
            host.Event().elapsed_time(end)

    def test_random_state(self) -> None:
        host = self.accelerator
        host.manual_seed_all(11)
        state = host.get_rng_state()
        first = torch.rand(3)
        host.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)
        assert host.initial_seed() == 11 and host.default_generator(0) is torch.default_generator
        assert host.random() is torch.random

    def test_memory_is_the_resident_set(self) -> None:
        host = self.accelerator
        host.reset_peak_memory_stats()
        before = host.memory_allocated()
        block = torch.ones(1 << 23)  # 32 MiB, touched
        assert host.memory_allocated() >= before + (20 << 20)
        del block
        assert host.max_memory_allocated() >= before + (20 << 20)
        host.reset_max_memory_allocated()
        assert host.max_memory_allocated() < before + (20 << 20)
        stats = host.memory_stats()
        assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] > 0
        assert host.total_memory() > host.available_memory() > 0
        host.empty_cache()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_low_precision_trains(self, dtype: torch.dtype) -> None:
        assert dtype in self.accelerator.supported_dtypes()
        assert self.accelerator.is_fp16_supported() and self.accelerator.is_bf16_supported()
        layer = torch.nn.Linear(4, 4).to(dtype)
        before = layer.weight.detach().clone()
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        layer(torch.ones(2, 4, dtype=dtype)).sum().backward()
        optimizer.step()
        assert not torch.equal(before, layer.weight) and layer.weight.isfinite().all()

    def test_pinning_is_the_identity(self) -> None:
        tensor = torch.ones(3)
        assert self.accelerator.pin_memory(tensor) is tensor
        assert not self.accelerator.is_pinned(tensor)
        assert self.accelerator.unpin_memory(tensor) is tensor

    def test_tensor_classes(self) -> None:
        host = self.accelerator
        names = "bfloat16 uint8 float64 float32 float16 int32 int64".split()
        kinds = "BFloat16 Byte Double Float Half Int Long".split()
        made = [getattr(host, f"{kind}Tensor")([1]).dtype for kind in kinds]
        assert made == [getattr(torch, name) for name in names]

    def test_graphs_run_at_once(self) -> None:
        ran: list[int] = []
        graph = self.accelerator.create_graph()
        with self.accelerator.capture_to_graph(graph):
            ran.append(1)
        self.accelerator.replay_graph(graph)
        assert ran == [1] and self.accelerator.lazy_call(lambda: 5) == 5

    def test_visible_devices(self) -> None:
        env: dict[str, str] = {}
        self.accelerator.set_visible_devices_envs(env, [0, 2])
        assert env == {"CUDA_VISIBLE_DEVICES": "0,2"}

    def test_compile_backend(self) -> None:
        host = CPU_Accelerator()
        assert host.get_compile_backend() == "inductor"
        host.set_compile_backend("eager")
        assert host.get_compile_backend() == "eager"
        with pytest.raises(ValueError, match="'nonsense' is unknown"):
            host.set_compile_backend("nonsense")
