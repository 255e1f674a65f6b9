"""One look of `first_device.py` at a device, in processes of its own: what it found is one line of
JSON on stdout, of rank 0.

A look that needs what is not there says so by `NotHere`, which is an answer and no failure.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import os
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from device_worker import busy_intervals, choose, duration, union
from serving import Step, start_distributed, take_stdout
from systems import Workload, build_model, build_step, deepspeed_config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

Found = dict[str, Any]
MIB = 2**20
WARMUP = 2
# Gaps of the compute stream shorter than this are launches, not waits.
GAP_NS = 10_000
# The kernels by which stage 3 lays parameters out and gathers gradients up.
COPIES = ("split_with_sizes_copy", "_chunk_cat", "_foreach_copy_")


class NotHere(Exception):
    """What a look needs is not on this machine."""


@dataclass
class Place:
    """Where a look takes place: its workload, and deepspeed's accelerator, simulated or not."""

    work: Workload
    device: Any
    steps: int

    @property
    def is_real(self) -> bool:
        """Whether there is a device of CUDA's kind."""
        return self.work.device == "cuda"

    def timed(self, step: Callable[[], Any], count: int | None = None) -> float:
        """Milliseconds of one of `count` steps, which the device has ended."""
        count = count or self.steps
        self.device.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            step()
        self.device.synchronize()
        return (time.perf_counter() - begin) * 1e3 / count

    def peaks(self, step: Step) -> Found:
        """MiB that tensors took, and that the allocator held, at most in two steps."""
        self.device.reset_peak_memory_stats()
        for _ in range(2):
            step()
        self.device.synchronize()
        allocated, reserved = self.device.max_memory_allocated(), self.device.max_memory_reserved()
        return {"allocated MiB": allocated / MIB, "reserved MiB": reserved / MIB}

    def pinned(self) -> float | None:
        """MiB of page-locked memory that the host allocator holds; None where nobody counts."""
        if not self.is_real:
            return None
        return float(torch.cuda.host_memory_stats()["allocated_bytes.current"]) / MIB


def engine_of(place: Place, variant: str, model: nn.Module | None = None, **more: Any) -> Any:
    """An engine of a system of `systems.py`."""
    import deepspeed  # optional: torch's own systems are looked at without it

    model = build_model(place.work) if model is None else model
    config = {**deepspeed_config(place.work, variant, torch_adam=False), **more}
    return deepspeed.initialize(model=model, config=config)[0]


@contextmanager
def training(place: Place, variant: str, **more: Any) -> Iterator[tuple[Any, Step]]:
    """An engine that has trained, and its step on the same tokens each time; gone afterwards."""
    engine = engine_of(place, variant, **more)
    shape = (place.work.micro_batch, place.work.context + 1)
    text = torch.randint(256, shape, generator=torch.Generator().manual_seed(dist.get_rank()))
    text = text.to(place.work.device)

    def step() -> None:
        engine.backward(engine(text))
        engine.step()

    for _ in range(WARMUP):
        step()
    place.device.synchronize()
    yield engine, step
    engine.destroy()
    gc.collect()


# -- what is looked at -----------------------------------------------------------------------------


def start(place: Place) -> Found:
    """The first collective makes the communicator; the end of the process is looked at by the
    parent.
    """
    x = torch.ones(MIB, device=place.work.device)
    first = place.timed(lambda: dist.all_reduce(x), 1)
    return {"first collective ms": first, "next ms": place.timed(lambda: dist.all_reduce(x))}


def system(place: Place, variant: str) -> Found:
    """Time and peaks of a step, beside what the formula gives without activations."""
    step = build_step(place.work, variant)
    for _ in range(WARMUP):
        step()
    found: Found = {"step ms": place.timed(step)}
    if variant.startswith("zero") or place.is_real:
        found |= place.peaks(step)
    if variant.startswith("zero"):
        model = build_model(replace(place.work, device="meta"))
        found["formula MiB"] = formula(place, int(variant[4]), model) / MIB
    return found


def formula(place: Place, stage: int, model: nn.Module) -> int:
    """Bytes of the state of a stage on one rank, by the tables of the documentation."""
    # optional: torch's own systems are looked at without it
    from deepspeed.runtime.zero.estimates.replicated import plan_whole_gradients
    from deepspeed.runtime.zero.estimates.stage3 import ModelShape, plan_sharded_parameters
    from deepspeed.runtime.zero.estimates.stages_1_and_2 import plan_model_states
    from deepspeed.runtime.zero.gathering.units import GatherSettings

    numels = [param.numel() for param in model.parameters()]
    ranks, size = dist.get_world_size(), place.work.dtype.itemsize
    if stage == 0:
        return plan_whole_gradients(numels, model_bytes=size).device
    if stage < 3:
        return plan_model_states(numels, ranks, stage=stage, model_bytes=size).step
    settings = GatherSettings()
    shape = ModelShape.of(model, settings)
    return plan_sharded_parameters(shape, ranks, settings, model_bytes=size).device


class Units(nn.Module):
    """Pairs of layers through hidden sizes that differ: the units of stage 3."""

    def __init__(self, width: int, hidden: list[int]) -> None:
        super().__init__()
        pairs = ((nn.Linear(width, size), nn.Linear(size, width)) for size in hidden)
        self.units = nn.ModuleList(nn.Sequential(*pair) for pair in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            x = unit(x)
        return x.float().square().mean()


def units(place: Place, order: str) -> Found:
    """Peaks at stage 3 where units grow, shrink or alternate, beside the formula."""
    width, count = 2 * place.work.width, 16
    sizes = [width * (number + 1) // 4 for number in range(count)]
    if order == "shrinking":
        sizes.reverse()
    elif order == "alternating":
        sizes = list(itertools.chain(*zip(sizes[: count // 2], sizes[count // 2 :], strict=True)))
    model = Units(width, sizes).to(place.work.device)
    planned = formula(place, 3, model) / MIB
    engine = engine_of(place, "zero3", model)
    x = torch.ones(1, width, dtype=place.work.dtype, device=place.work.device)

    def step() -> None:
        engine.backward(engine(x))
        engine.step()

    step()
    found = {**place.peaks(step), "formula MiB": planned}
    before = place.device.memory_allocated()
    engine.empty_partition_cache()
    place.device.synchronize()
    return {**found, "given back MiB": (before - place.device.memory_allocated()) / MIB}


class CopiedBytes(TorchDispatchMode):
    """Counts what the operators of `COPIES` write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in COPIES:
            outputs = (kwargs or {}).get("out", args[0] if name.endswith("copy_") else result)
            for output in outputs if isinstance(outputs, list | tuple) else [outputs]:
                self.written[name] += output.numel() * output.element_size()
        return result


def trace(place: Place) -> Found:
    """A step of stage 3 as the profiler sees it: copies, launches, gaps of the compute stream."""
    with training(place, "zero3") as (_, step):
        with CopiedBytes() as counted:
            step()
        with torch.profiler.profile() as profile:
            step()
            place.device.synchronize()
        # Without the operators, whose recording keeps the host from running ahead.
        kind = "CUDA" if place.is_real else "CPU"
        activities = [torch.profiler.ProfilerActivity.__members__[kind]]
        with torch.profiler.profile(activities=activities) as kernels:
            step()
            place.device.synchronize()
    found: Found = {}
    for event in profile.key_averages():
        name, us = event.key.removeprefix("aten::"), event.device_time_total
        if name in counted.written and us:
            found[f"{name} GB/s"] = counted.written[name] / us / 1e3
    found["copied MiB"] = {name: size / MIB for name, size in counted.written.items()}
    streams = sorted(busy_intervals(kernels), key=lambda one: duration(union(one)))
    if not streams:
        return found
    launches, compute = sum(map(len, streams)), union(streams[-1])
    gaps = [begin - end for (_, end), (begin, _) in itertools.pairwise(compute)]
    long = [gap for gap in gaps if gap > GAP_NS]
    return {
        **found,
        "launches": launches,
        "launches per block": launches / place.work.layers,
        "streams ms": [duration(union(one)) / 1e6 for one in reversed(streams)],
        "gaps": len(long),
        "gaps ms": sum(long) / 1e6,
        "kernels ms": longest(kernels),
    }


def longest(profile: Any, of: str = "", count: int = 12) -> dict[str, float]:
    """Milliseconds of the kernels, named `of`..., that took most."""
    times: Counter[str] = Counter()
    for event in profile.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.name().startswith(of):
            times[event.name()[:90]] += event.duration_ns()
    return {name: ns / 1e6 for name, ns in times.most_common(count)}


def waits(place: Place) -> Found:
    """Where the host waits for the device within a step, by stage; an error on a device."""
    found: Found = {}
    for stage in range(4):
        with training(place, f"zero{stage}") as (_, step):
            found[f"stage {stage}"] = waits_of(place, step)
    return found


def waits_of(place: Place, step: Step) -> Any:
    """What waits for the device in a step: by place where it is simulated, else the first."""
    if not place.is_real:
        with place.device.count_host_waits() as counted:
            step()
        return dict(counted.by_place)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        return "none"
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)[-4:]
        return [str(error), *(f"{frame.filename}:{frame.lineno} {frame.line}" for frame in frames)]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def graph(place: Place) -> Found:
    """A graph is captured and replayed beside an engine of stage 3 that has trained, whose watchers
    go on.
    """
    if not place.is_real:
        raise NotHere("graphs are captured on a device")
    model = nn.Linear(place.work.width, place.work.width, device=place.work.device)
    x = torch.randn(8, place.work.width, device=place.work.device)
    with torch.no_grad():  # a graph of autograd would tie the parameters to the default stream
        wanted = model(x)
    with training(place, "zero3") as (_, step):
        replayed = torch.cuda.make_graphed_callables(model, (x,))
        step()
        return {"equal": bool(torch.equal(replayed(x), wanted))}


def offload(place: Place, variant: str) -> Found:
    """Step, pinned memory and rates of copies with state on the host, and two background saves."""
    more: Found = {"checkpoint": {"writer": {"decoupled": True}}}
    if variant == "zero3-offload":
        config = deepspeed_config(place.work, variant, torch_adam=False)
        more["zero_optimization"] = {
            **config["zero_optimization"],
            "offload_param": {"device": "cpu", "pin_memory": True},
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        }
    # A quarter of the model: its state goes to the disk twice.
    place = replace(place, work=replace(place.work, layers=max(2, place.work.layers // 4)))
    with (
        training(place, variant, **more) as (engine, step),
        tempfile.TemporaryDirectory() as folder,
    ):
        found: Found = {"step ms": place.timed(step), "pinned MiB": place.pinned(), **rates(place)}
        with torch.profiler.profile() as profile:
            step()
            place.device.synchronize()
        # Their names tell whether the host's memory was page-locked.
        found["copies ms"] = longest(profile, "Memcpy")
        for number in (1, 2):
            begin = time.perf_counter()
            engine.save_checkpoint(folder, tag=str(number))
            found[f"save {number} ms"] = (time.perf_counter() - begin) * 1e3
            step()
            found[f"pinned in save {number} MiB"] = place.pinned()
    return found


def rates(place: Place) -> Found:
    """GB/s of copies to and from page-locked memory."""
    size = min(256 * MIB, 64 * place.work.width**2)
    there = torch.empty(size, dtype=torch.uint8, device=place.work.device)
    here = place.device.pin_memory(torch.empty(size, dtype=torch.uint8))
    out = place.timed(lambda: here.copy_(there, non_blocking=True))
    back = place.timed(lambda: there.copy_(here, non_blocking=True))
    return {"to the host GB/s": size / out / 1e6, "to the device GB/s": size / back / 1e6}


def streams(place: Place) -> Found:
    """Races and lifetimes of memory that the checker sees in training, by stage."""
    from deepspeed.verify import check_streams  # optional: as above

    found: Found = {}
    for stage in (1, 2, 3):
        with check_streams(raises=False) as checker, training(place, f"zero{stage}"):
            pass
        found[f"stage {stage}"] = checker.report() if checker.findings else "silent"
    return found


def ulysses(place: Place) -> Found:
    """A Llama with Ulysses' attention: the kernel, the step, and where the host waits."""
    if importlib.util.find_spec("transformers") is None:
        raise NotHere("needs transformers")
    import transformers  # optional: this look alone needs it

    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    flash = place.is_real and importlib.util.find_spec("flash_attn") is not None
    attention = "flash_attention_2" if flash else "sdpa"
    width = place.work.width
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=place.work.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
        attn_implementation=attention,
    )
    with torch.device(place.work.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=place.work.dtype)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation=attention,
        sequence_parallel_size=dist.get_world_size(),
        micro_batch_size=1,
    )
    ours = deepspeed_config(place.work, "zero3", torch_adam=False)
    ours |= {"train_micro_batch_size_per_gpu": 1}
    engine = deepspeed.initialize(model=model, config=ours, mpu=mpu)[0]
    length, rank = place.work.context, dist.get_rank()
    tokens = torch.randint(256, (1, length), device=place.work.device)
    positions = torch.arange(rank * length, (rank + 1) * length, device=place.work.device)[None]

    def step() -> None:
        output = engine(input_ids=tokens, position_ids=positions)
        engine.backward(output.logits.float().square().mean())
        engine.step()

    for _ in range(WARMUP):
        step()
    return {
        "attention": attention,
        "step ms": place.timed(step),
        "host waits": waits_of(place, step),
    }


LOOKS: dict[str, Callable[..., Found]] = {
    look.__name__: look
    for look in (start, system, units, trace, waits, graph, offload, streams, ulysses)
}


def main() -> None:
    """Take one look and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("look", help="NAME or NAME:ARGUMENT")
    parser.add_argument("--workload", required=True, help="JSON of systems.Workload")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    protocol = take_stdout()
    name, _, argument = arguments.look.partition(":")
    begin = time.perf_counter()
    # optional in torch's own systems; here it knows the device for all of them
    from deepspeed.accelerator import get_accelerator

    work, device = Workload(**json.loads(arguments.workload)), get_accelerator()
    if work.device == "cuda":
        torch.cuda.set_device(choose(int(os.environ["LOCAL_RANK"]), torch.cuda))
    start_distributed(True, arguments.backend)
    joined = time.perf_counter() - begin
    try:
        found = LOOKS[name](Place(work, device, arguments.steps), *([argument] if argument else []))
    except NotHere as reason:
        found = {"not here": str(reason)}
    begin = time.perf_counter()
    dist.destroy_process_group()
    found |= {"joined s": joined, "left s": time.perf_counter() - begin}
    if os.environ["RANK"] == "0":
        print(json.dumps(found), file=protocol, flush=True)


if __name__ == "__main__":
    main()
