"""Trains one configuration, and tells what bits it has come to."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed import comm as dist
from unit.models import seeded, tokens
from unit.v1.reproducibility.cases import MICRO_BATCHES, OPTIMIZERS, PRECISIONS, Case

# Of a sequence in the long run, an eighth of the demo's, which take three times as long. The GPT's
# parameters, and so all sums over ranks and all updates, have the demo's shapes.
LONG_BYTES = 16 + 1


class Net(nn.Module):
    """Tied, frozen, sometimes unused parameters, and dropout."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(61, 24)
        self.norm = nn.LayerNorm(24)
        self.up, self.down = nn.Linear(24, 53), nn.Linear(53, 24, bias=False)
        # On other ranks in other micro-batches: so few elements stay whole at stage 3 (`SMALL`).
        self.sometimes = nn.LayerNorm(24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.dropout = nn.Dropout(0.1)
        self.recompute = recompute

    def block(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.dropout(torch.tanh(self.up(self.norm(hidden)))))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(batch)
        if self.recompute:
            is_reentrant = self.recompute == "reentrant"
            hidden = checkpoint(self.block, hidden, use_reentrant=is_reentrant)
        else:
            hidden = self.block(hidden)
        hidden = hidden + self.frozen(hidden)
        if int(batch[0, 0]) % 2:
            hidden = hidden + self.sometimes(hidden)
        logits = (hidden @ self.tokens.weight.T).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.roll(-1, 1).flatten())


def batch_of(step: int, number: int) -> torch.Tensor:
    return tokens(1000 * step + number, 61, 2, 11)


def config_of(case: Case, **more: Any) -> dict[str, Any]:
    optimizer = OPTIMIZERS[case.optimizer]
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES // dist.get_world_size(),
        "gradient_clipping": 0.4,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": case.zero,
        "reproducibility": {"world_size_invariant": True},
        **({} if optimizer is None else {"optimizer": optimizer}),
        **PRECISIONS[case.precision],
        **more,
    }


def engine_of(case: Case, **more: Any) -> Any:
    """An engine that has taken no step."""
    model = seeded(Net, case.recompute)
    trained = [param for param in model.parameters() if param.requires_grad]
    given: dict[str, Any] = {"model": model, "model_parameters": trained}
    if OPTIMIZERS[case.optimizer] is None:
        given["optimizer"] = torch.optim.Adafactor(trained, lr=1e-2)
    return deepspeed.initialize(**given, config=config_of(case, **more))[0]


def train(engine: Any, first: int = 0, steps: int = 2, batch: Any = batch_of) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(first, first + steps):
        for micro_step in range(MICRO_BATCHES // world):
            engine.backward(engine(batch(step, micro_step * world + rank)))
            engine.step()


def digest_of(case: Case, steps: int = 2) -> str:
    engine = engine_of(case)
    train(engine, steps=steps)
    assert (engine.skipped_steps > 0) == (case.precision == "fp16")
    digest: str = engine.state_digest()
    engine.destroy()
    return digest


def long_digest_of(case: Case, steps: int) -> str:
    """The same of the demo's GPT, in fp16 with a scale that grows until steps are skipped."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "examples"))
    from gpt import GPT, GPTConfig  # the path above is where it lies

    torch.manual_seed(0)
    model = GPT(GPTConfig(wide_products=True))
    config = config_of(case, train_micro_batch_size_per_gpu=4)
    if case.precision == "fp16":
        scale = {"initial_scale_power": 20, "loss_scale_window": 20}
        config["fp16"] = {**config["fp16"], **scale}
    given = {"model": model, "model_parameters": model.parameters(), "config": config}
    engine = deepspeed.initialize(**given)[0]
    train(engine, 0, steps, lambda step, number: tokens(1000 * step + number, 256, 4, LONG_BYTES))
    digest = f"{engine.state_digest()} {engine.skipped_steps} skipped"
    engine.destroy()
    return digest
