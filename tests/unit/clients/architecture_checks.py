"""Holds one architecture at stage 3 to plain torch: its weights, however made, and a step."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.integrations import HfDeepSpeedConfig

import deepspeed
from deepspeed import comm as dist
from unit.clients.architectures import ARCHITECTURES, Architecture, Batch
from unit.clients.scripts import loss_of
from unit.one_process import OneProcess

LR = 0.5
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,  # a factor that differs in the last bit would hide what is equal
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
State = dict[str, torch.Tensor]


def whole_state(model: nn.Module) -> State:
    """Copies of a model's whole weights and buffers. All ranks call it."""
    with deepspeed.zero.GatheredParameters(model.parameters()):
        whole = {**model.state_dict(), **dict(model.named_buffers())}
        return {name: value.detach().clone() for name, value in whole.items()}


def differing(found: State, wanted: State) -> list[str]:
    """Names whose bits, dtypes or shapes differ, or that only one of them has."""
    both = found.keys() & wanted.keys()
    equal = {name for name in both if torch.equal(found[name], wanted[name])}
    equal -= {name for name in both if found[name].dtype != wanted[name].dtype}
    return sorted((found.keys() | wanted.keys()) - equal)


def _seeded(make: Callable[[], Any], seed: int) -> Any:
    torch.manual_seed(seed)
    return make()


def _initialized(architecture: Architecture, config: Any, seed: int) -> PreTrainedModel:
    """What `from_config` makes at stage 3: constructors draw nothing, then `_init_weights` all."""
    torch.manual_seed(seed)
    with no_init_weights():
        model: PreTrainedModel = architecture.cls._from_config(config)
    model.init_weights()
    return model


class Made:
    """One architecture and the ways in which stage 3 comes by its weights; `seed` draws all."""

    def __init__(self, name: str, seed: int, folder: Path) -> None:
        self.name, self.seed, self.folder = name, seed, folder / f"{name}-{seed}"
        self.architecture = ARCHITECTURES[name]

    def config(self) -> Any:
        """A new configuration: models keep and change theirs."""
        return self.architecture.config(self.name)

    def plain(self) -> PreTrainedModel:
        """Plain torch."""
        return _seeded(lambda: self.architecture.cls(self.config()), self.seed)

    def under_init(self) -> nn.Module:
        """The same constructor inside `zero.Init`."""
        with deepspeed.zero.Init():
            return self.plain()

    def from_config(self) -> nn.Module:
        """Made by the library, which enters `zero.Init` by itself."""
        return _seeded(lambda: self.architecture.cls._from_config(self.config()), self.seed)

    def loaded(self) -> nn.Module:
        """Loaded by the library from what plain torch has saved."""
        return self.architecture.cls.from_pretrained(self.folder)

    def adapted(self, model: Any) -> Any:
        """With adapters, if it is about them."""
        if not self.architecture.lora:
            return model
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(**self.architecture.lora)
        return _seeded(lambda: get_peft_model(model, config), self.seed)

    def batch(self, rank: int) -> Batch:
        """Other data on each rank."""
        generator = torch.Generator().manual_seed(100 * self.seed + rank)
        return self.architecture.batch(self.config(), generator)


def _at_stage3() -> HfDeepSpeedConfig:
    """While it lives, the library makes and loads models at stage 3."""
    return HfDeepSpeedConfig(CONFIG)


def weights(made: Made) -> dict[str, list[str]]:
    """Which weights differ from plain torch, for each way to come by them."""
    plain = made.plain()
    found = {"zero.Init": differing(whole_state(made.under_init()), whole_state(plain))}
    initialized = whole_state(_initialized(made.architecture, made.config(), made.seed))
    if dist.get_rank() == 0:
        plain.save_pretrained(made.folder)
    dist.barrier()
    reread = whole_state(type(plain).from_pretrained(made.folder))
    here = _at_stage3()
    if "from_config" in made.architecture.ways:
        found["from_config"] = differing(whole_state(made.from_config()), initialized)
    if "from_pretrained" in made.architecture.ways:
        found["from_pretrained"] = differing(whole_state(made.loaded()), reread)
    del here
    return found


def step_error(made: Made) -> float:
    """The largest difference of a weight after one SGD step on the batches of all ranks."""
    reference = made.adapted(made.plain()).eval()
    here = _at_stage3()
    is_loaded = "from_pretrained" in made.architecture.ways
    model = made.adapted(made.loaded() if is_loaded else made.under_init())
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LR)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    del here
    engine.eval()  # dropout of two ranks is not that of one process
    engine.backward(engine(**made.batch(dist.get_rank())).loss)
    engine.step()
    found = whole_state(model)
    engine.destroy()
    OneProcess(reference, LR, loss_of).step(map(made.batch, range(dist.get_world_size())))
    wanted = whole_state(reference)
    assert found.keys() == wanted.keys()
    return max((found[name].float() - wanted[name].float()).abs().max().item() for name in wanted)


def check(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """What differs from plain torch: weights for each way to make it, and a step. Collective."""
    made = Made(name, seed, folder)
    found: dict[str, Any] = {**weights(made), "step": step_error(made)}
    gc.collect()  # models of stage 3 are circles of references
    return found
