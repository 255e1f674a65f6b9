"""Exposed communication of a training step of Llama-7B, by replay, beside FSDP2's order of issue.

    python benchmarks/exposed_communication.py
    python benchmarks/exposed_communication.py --worlds 8 --systems zero3 fsdp2

One process is rank 0 of a process group that only pretends (`pretended`) and trains, on the
simulated device, a model of the shape of Llama-7B in which every length is a 64th: features, inner
features, tokens, vocabulary. `replay` takes each length 64 times, and the sizes of the
configuration are scaled alike. One sequence of 4,096 tokens per rank, bf16, AdamW, clipping. FSDP2
is torch's own, every block and the rest a unit; its streams and collectives are the simulated
device's. `zero2-gathers`: with `overlap_param_gather`. The second of two logged steps counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import pretended
import torch
import torch.nn.functional as F
from replay import Device, Times, exposed, logged, replayed
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim.issue_log import HostWait
from deepspeed.accelerator.sim_accelerator import Sim_Accelerator, simulate

LENGTH = 64
WIDTH, INNER, TOKENS, VOCABULARY, HEADS = (
    4096 // LENGTH,
    11008 // LENGTH,
    4096 // LENGTH,
    32000 // LENGTH,
    32,
)
SYSTEMS = ("zero1", "zero2", "zero2-gathers", "zero3", "fsdp2")
PASSES = ("forward", "backward", "step")
WARM_UP = 3


class Block(nn.Module):
    """One of Llama's, without the rotation of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, features]
        """The same shape."""
        h = self.norms[0](x)
        heads = (
            one(h).view(1, TOKENS, HEADS, -1).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(TOKENS, WIDTH))
        h = self.norms[1](x)
        out: torch.Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class Llama(nn.Module):
    """The model; gives the loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of `tokens`, and one more."""
        x = self.embedding(tokens[:-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float(), tokens[1:])


def _scaled(default: float) -> int:
    return int(default / LENGTH**2)


def config_of(system: str) -> dict[str, Any]:
    """The defaults and `overlap_comm`, scaled."""
    name, *options = system.split("-")
    stage = int(name.removeprefix("zero"))
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True}
    zero["overlap_param_gather"] = "gathers" in options
    zero |= {name: _scaled(5e8) for name in ("reduce_bucket_size", "allgather_bucket_size")}
    if stage == 3:
        zero["stage3_prefetch_bucket_size"] = _scaled(5e7)
        # Vectors are a 64th.
        zero["stage3_param_persistence_threshold"] = 1000
        zero["stage3_unit_fusion_size"] = _scaled(8e5)
        zero["stage3_max_live_parameters"] = zero["stage3_max_reuse_distance"] = _scaled(1e9)
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "data_types": {"grad_accum_dtype": "bf16"},
        "steps_per_print": 1_000_000,
        "zero_optimization": zero,
    }


class Trained:
    """A system, one pass at a time."""

    def __init__(self, system: str, layers: int, simulator: Sim_Accelerator) -> None:
        torch.manual_seed(0)
        model = Llama(layers)
        self.tokens = torch.randint(VOCABULARY, (TOKENS + 1,))
        self.engine: Any = None
        if system == "fsdp2":
            self.model, self.optimizer = _fsdp2(model, simulator)
        else:
            self.engine = deepspeed.initialize(model=model, config=config_of(system))[0]
        self._loss: Any = None

    def forward(self) -> None:
        """Leaves the loss."""
        self._loss = (self.engine or self.model)(self.tokens)

    def backward(self) -> None:
        """Takes it."""
        (self._loss.backward if self.engine is None else lambda: self.engine.backward(self._loss))()
        self._loss = None

    def step(self) -> None:
        """With clipping."""
        if self.engine is not None:
            self.engine.step()
            return
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _fsdp2(model: nn.Module, simulator: Sim_Accelerator) -> tuple[nn.Module, Any]:
    # optional: only this system needs them
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import _disable_current_modes

    def past_modes(call: Any) -> Any:
        def inner(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():  # shapes of shapes are none of the device's
                return call(*args, **kwargs)

        return inner

    # Memory does not count here, and the simulated device's cannot be resized.
    _fsdp_param.free_storage = _fsdp_param.alloc_storage = lambda tensor: None
    host: Any = torch.cpu
    host.Stream, host.Event, host.stream = simulator.Stream, simulator.Event, simulator.stream
    host.current_stream = simulator.current_stream
    torch_dist: Any = torch.distributed

    def gathered(output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)

    def reduced(output: Any, input: Any, op: Any, group: Any, async_op: bool = False) -> Any:
        return dist.reduce_scatter_tensor(output, input, op, group, async_op)

    for name in ("all_gather_single", "all_gather_into_tensor"):
        setattr(torch_dist, name, gathered)
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
        setattr(torch_dist, name, reduced)
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    for name in ("propagate_op_sharding", "propagate_op_sharding_non_cached"):
        setattr(propagator, name, past_modes(getattr(propagator, name)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:  # type: ignore[union-attr]  # of this model
        fully_shard(block, mesh=mesh, mp_policy=policy)
    root: Any = fully_shard(model, mesh=mesh, mp_policy=policy)
    return root, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def measure(system: str, world: int, layers: int) -> dict[str, Times]:
    """Seconds of a step and what of them is exposed communication, by pass; and `unit`, a gather of
    one block.
    """
    pretended.start_group(world)
    device = Device(length=LENGTH, heads=HEADS)
    with simulate() as simulator:
        trained = Trained(system, layers, simulator)
        for _ in range(WARM_UP):
            _train(trained)
        simulator.synchronize()
        with logged() as log:
            log.mark("begin")
            for number in range(2):
                _train(trained, lambda name, number=number: log.mark(f"{name} {number}"))
        simulator.synchronize()
    if system == "fsdp2":
        # Those of `record_function` and of what DTensor asks; a device has none.
        log.entries = [one for one in log.entries if not isinstance(one, HostWait)]
    found = {}
    for name, times in (("all", replayed([log], device)), ("exposed", exposed([log], device))):
        before, found[name] = times[0]["step 0"], {}
        for part in PASSES:
            found[name][part] = times[0][f"{part} 1"] - before
            before = times[0][f"{part} 1"]
    return found


def _train(trained: Trained, mark: Any = lambda name: None) -> None:
    for part in PASSES:
        getattr(trained, part)()
        mark(part)


def main() -> None:
    """Measure every system in a process of its own and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        found = measure(arguments.systems[0], arguments.worlds[0], arguments.layers)
        print("FOUND " + json.dumps(found))
        return
    print("| ranks | system | step, ms | exposed, ms | in forward | in backward | in the step |")
    print("|---|---|---|---|---|---|---|")
    for world in arguments.worlds:
        for system in arguments.systems:
            flags = ("--one", "--worlds", str(world), "--systems", system)
            run = subprocess.run(
                [sys.executable, __file__, *flags, "--layers", str(arguments.layers)],
                env=os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world)},
                capture_output=True,
                text=True,
                check=False,
            )
            lines = [line for line in run.stdout.splitlines() if line.startswith("FOUND ")]
            if not lines:
                sys.exit(f"{system}: {run.stderr[-3000:]}")
            found = json.loads(lines[0].removeprefix("FOUND "))
            every, hidden = found["all"], found["exposed"]
            times = (sum(every.values()), sum(hidden.values()), *(hidden[p] for p in PASSES))
            shown = " | ".join(f"{1e3 * seconds:.1f}" for seconds in times)
            print(f"| {world} | {system} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
