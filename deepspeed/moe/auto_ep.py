"""Spread a model's own experts over ranks. transformers keeps the experts of a layer in one module
whose parameters have a row for each. It becomes one that holds the rows of this rank's experts and
runs each token's where they are (`owner_exchange`), by its own forward.

Parameters keep their identity. To the outside the layer has whole experts: `state_dict()` gathers
them, `load_state_dict()` takes this rank's rows. At ZeRO stage 3 neither is so: `state_dict()` has
no elements of them, as of what else is sharded.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.comm.parallel_map import ParallelMap
from deepspeed.moe.expert_rows import ExpertRows
from deepspeed.moe.owner_exchange import run_on_owners
from deepspeed.utils.exceptions import MisuseError
from deepspeed.utils.logging import warn_once
from deepspeed.utils.tensor_fragment import logical_shape

ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
# What gpt-oss calls them.
_OTHER_NAMES = {"router_indices": "top_k_index", "routing_weights": "top_k_weights"}
_gathers = True


class SpreadExperts(nn.Module):
    """What a module of experts becomes: a class of its own made of this one and the module's.
    `num_experts` are those on this rank, which the module's own code asks for; `rows` says which.
    """

    num_experts: int
    rows: ExpertRows
    ep_size: int
    expert_group_name: str
    parallel_map: ParallelMap

    @property
    def spread_params(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters(recurse=False))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the module's own forward, each expert where it is, on tokens [..., M], the experts of
        each, [..., k], and their weights. Collective over the expert group.
        """
        given = dict(zip(ARGUMENTS, args, strict=False))
        given |= {_OTHER_NAMES.get(name, name): value for name, value in kwargs.items()}
        hidden, experts, weights = (given[name] for name in ARGUMENTS)
        own_forward = super().forward

        def run(rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = own_forward(
                rows, local.unsqueeze(1), rows.new_ones((len(rows), 1))
            )
            return output

        output = run_on_owners(
            hidden.reshape(-1, hidden.shape[-1]),
            experts.reshape(-1, experts.shape[-1]),
            weights.reshape(-1, weights.shape[-1]),
            self.rows.num_experts,
            self.parallel_map.experts(self.expert_group_name).expert.group,
            run,
            list(self.parameters()),
        )
        return output.view(*hidden.shape[:-1], -1)

    def gathered(self, keep: bool = True) -> dict[str, torch.Tensor]:
        """Gather the whole parameters into host memory on ranks that `keep` them. Collective."""
        found = {}
        for name, param in self.spread_params.items():
            whole = self.with_all_rows(param.data)
            if keep:
                found[name] = whole.cpu()
        return found

    def with_all_rows(self, own: torch.Tensor) -> torch.Tensor:
        group = self.parallel_map.experts(self.expert_group_name).expert.group
        whole = own.new_empty((self.rows.num_experts, *own.shape[1:]))
        dist.all_gather_into_tensor(whole, own.contiguous(), group=group)
        return whole

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not _gathers or keep_vars:
            return
        if _is_sharded(self):
            for name, param in self.spread_params.items():
                _refuse_held(prefix + name, param)
                destination[prefix + name] = destination[prefix + name].new_empty(0)
            return
        for name, value in self.gathered().items():
            destination[prefix + name] = value

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: object, **kwargs: object
    ) -> None:
        own = dict(state_dict)
        for name, param in self.spread_params.items():
            value = own.get(prefix + name)
            if value is not None and len(value) == self.rows.num_experts:
                own[prefix + name] = value.narrow(0, self.rows.first, len(param))
        super()._load_from_state_dict(own, prefix, *args, **kwargs)


def _is_sharded(module: nn.Module) -> bool:
    return any(hasattr(param, "ds_shape") for param in module.parameters(recurse=False))


def _refuse_held(name: str, param: nn.Parameter) -> None:
    """Refuse a shard that a script has gathered: ranks with other rows are perhaps not here."""
    if param.numel() and not getattr(param, "ds_persist", True):
        raise MisuseError(
            f"state_dict() of {name} inside deepspeed.zero.GatheredParameters has the experts of "
            "this rank only: use engine.save_16bit_model(), or leave the block and call "
            "engine._zero3_consolidated_16bit_state_dict() on all ranks"
        )


@contextmanager
def own_rows_only() -> Iterator[None]:
    """`state_dict()` inside has this rank's experts and communicates nothing."""
    global _gathers
    before, _gathers = _gathers, False
    try:
        yield
    finally:
        _gathers = before


def named_spread_experts(model: nn.Module) -> list[tuple[str, SpreadExperts]]:
    """The modules whose experts are spread, in the order of `named_modules`."""
    return [(name, part) for name, part in model.named_modules() if isinstance(part, SpreadExperts)]


def gathered_experts(model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
    """Gather the parameters of all spread experts, by name in the model. Collective."""
    return {
        f"{prefix}.{name}".lstrip("."): value
        for prefix, module in named_spread_experts(model)
        for name, value in module.gathered(keep).items()
    }


def can_spread(module: nn.Module) -> bool:
    """Whether a module is experts of the kind that can be spread: see the module's text."""
    params = dict(module.named_parameters())
    num_experts = getattr(module, "num_experts", None)
    return (
        bool(params)
        and isinstance(num_experts, int)
        and len(params) == len(dict(module.named_parameters(recurse=False)))
        and all(
            len(shape) > 1 and shape[0] == num_experts
            for shape in map(logical_shape, params.values())
        )
        and _takes_routes(type(module))
    )


def _takes_routes(cls: type[nn.Module]) -> bool:
    names = [name for name in inspect.signature(inspect.unwrap(cls.forward)).parameters][1:]
    return tuple(_OTHER_NAMES.get(name, name) for name in names) == ARGUMENTS


def spreadable(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that `can_spread`."""
    return [module for module in model.modules() if can_spread(module)]


def check_spread(model: nn.Module, ep_size: int, parallel_map: ParallelMap) -> None:
    """Refuse what cannot be spread, or was over others; log what is left out."""
    what = f"expert_parallel.autoep_size: {ep_size}"
    if parallel_map.tensor.size > 1 or parallel_map.pipe.size > 1:
        raise MisuseError(
            f"{what} beside tensor or pipeline parallelism ({parallel_map}) is not supported; use "
            "deepspeed.moe.layer.MoE there, or 1"
        )
    found = {name: int(own.num_experts) for name, own in model.named_modules() if can_spread(own)}
    adapted = next((name for name in found if name.rpartition(".")[2] == "base_layer"), None)
    if adapted is not None:
        wrapper = model.get_submodule(adapted.rpartition(".")[0])
        raise MisuseError(
            f"{what}: {adapted} is inside a {type(wrapper).__name__}, which computes with all "
            "experts (peft's target_parameters): let adapters be on other layers, or use 1"
        )
    before = named_spread_experts(model)
    others = _other_experts(model)
    if not found and not before:
        kinds = f"; it has {', '.join(others)}" if others else ""
        raise MisuseError(
            f"{what}: the model has no experts that can be spread{kinds}. They must be one module "
            f"with a row for each expert in every parameter, and forward({', '.join(ARGUMENTS)}), "
            "as in transformers 5; use 1, or deepspeed.moe.layer.MoE"
        )
    if others:
        warn_once(f"{what}: every rank keeps all of {', '.join(others)}")
    ranks = parallel_map.replicas.size
    wrong = [name for name, count in found.items() if count % ep_size]
    if wrong or ranks % ep_size:
        raise MisuseError(
            f"{what} must divide the {ranks} data-parallel ranks and the number of experts"
            + (f", which of {wrong[0]} is {found[wrong[0]]}" if wrong else "")
        )
    for name, module in before:
        if module.ep_size != ep_size or module.parallel_map is not parallel_map:
            raise MisuseError(
                f"{what}: {name} has been spread over {module.ep_size} ranks by an earlier engine; "
                "make the model anew, or use the same size and groups"
            )


def _other_experts(model: nn.Module) -> list[str]:
    names = {}
    for name, module in model.named_modules():
        is_list = name.rpartition(".")[2] == "experts" and isinstance(
            module, (nn.ModuleList, nn.ModuleDict)
        )
        is_packed = type(module).__name__.endswith("Experts") and any(
            True for _ in module.parameters(recurse=False)
        )
        is_known = isinstance(module, SpreadExperts) or can_spread(module)
        if (is_list or is_packed) and not is_known:
            names[type(module).__name__] = name
    return [f"{name} ({kind})" for kind, name in names.items()]


def spread(module: nn.Module, ep_size: int, parallel_map: ParallelMap) -> None:
    """Keep this rank's experts of a module that `can_spread`, in place; the groups are made."""
    group_name = f"ep_size_{ep_size}"
    num_local = int(module.num_experts) // ep_size  # type: ignore[arg-type]  # `can_spread` says so
    rows = ExpertRows(parallel_map.experts(group_name).expert.rank * num_local, num_local * ep_size)
    vars(module)["num_experts"] = num_local
    module.__class__ = _spread_class(type(module))
    assert isinstance(module, SpreadExperts), "its class derives from it"
    module.rows, module.ep_size, module.expert_group_name = rows, ep_size, group_name
    module.parallel_map = parallel_map
    for param in module.parameters():
        param.data = param.data.narrow(0, rows.first, num_local).clone()
        # Marks read by the optimizers and by checkpoints.
        param.allreduce = False  # type: ignore[attr-defined]
        param.group_name = group_name  # type: ignore[attr-defined]
        param.ds_expert_rows = rows  # type: ignore[attr-defined]


# By the module's own class, the class of those that are spread.
_spread_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _spread_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of spread modules of a class, by the same name: code tells experts by it."""
    if cls not in _spread_classes:
        bases = (SpreadExperts, cls)
        _spread_classes[cls] = type(cls.__name__, bases, {"__module__": cls.__module__})
    return _spread_classes[cls]
