"""How parameters are laid out in groups of which ranks own shards: `GroupLayout`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.runtime.gradients.reduction import GradientContext
from deepspeed.runtime.optimizers.settings import ShardSettings
from deepspeed.runtime.sharding.fragments import FragmentTable, round_robin_order
from deepspeed.runtime.sharding.group import ShardedGroup, expert_group_of_all

# Every shard holds a multiple of this many elements; part of the checkpoint layout.
SHARD_ALIGNMENT = 2


class GroupLayout:
    """Lays groups out flat, one part for each rank of `shard_group`, which share one copy of the
    dense masters (None: every rank owns everything); experts are shared by those that hold the same
    ones.
    """

    def __init__(
        self, context: GradientContext, settings: ShardSettings, shard_group: dist.Group = None
    ) -> None:
        self.context = context
        self.settings = settings
        self.shard_group = shard_group
        self._registration = {p: position for position, p in enumerate(context.param_names)}

    def positions(self, params: Sequence[nn.Parameter]) -> list[int]:
        """Positions of parameters in the model; those that are not the module's come last."""
        known = self._registration
        return [known.get(param, len(known) + index) for index, param in enumerate(params)]

    def groups(self, optimizer: torch.optim.Optimizer, per_param: bool) -> list[ShardedGroup]:
        """Make one for each parameter group of `optimizer`, whose parameters become masters; with
        parts that stay on the device, as many of these behind them.
        """
        given = (group["params"] for group in optimizer.param_groups)
        trained = [[param for param in params if param.requires_grad] for params in given]
        kept = self._kept_on_device(trained)
        found = []
        for options, params, first in zip(optimizer.param_groups, trained, kept, strict=True):
            group = self._group(params[first:], self.settings.offload is not None)
            if per_param:
                group.masters = [nn.Parameter(view) for view in group.param_views(group.master)]
            options["params"] = group.masters
            found.append(group)
        if any(kept):
            parts = zip(trained, kept, strict=True)
            found += [self._group(params[:first], offload=False) for params, first in parts]
        return found

    def _group(self, params: Sequence[nn.Parameter], offload: bool) -> ShardedGroup:
        expert_group = expert_group_of_all(params)
        replicas = self.context.replicas(expert_group)
        # Experts are on fewer ranks than dense parameters, so their state has fewer and larger
        # shards.
        shard_group = (
            self.shard_group if expert_group is None or self.shard_group is None else replicas
        )
        num_shards = 1 if shard_group is None else dist.get_world_size(group=shard_group)
        if self.settings.round_robin:
            params = [params[i] for i in round_robin_order(len(params), num_shards)]
        dtypes = sorted({str(param.dtype) for param in params})
        if len(dtypes) > 1:
            raise ValueError(
                f"one optimizer group holds parameters of several dtypes ({', '.join(dtypes)}): "
                "cast the model to one dtype, or enable bf16/fp16 in the configuration so that the "
                "engine does"
            )
        alignment = SHARD_ALIGNMENT if shard_group is not None else 1
        file_table, table = self._tables(params, num_shards, alignment)
        model_device = params[0].device if params else self.context.device
        own, files = self.settings.offload, self.settings.files
        return self._maker(params)(
            table=table,
            shard=0 if shard_group is None else dist.get_rank(group=shard_group),
            file_table=file_table,
            master_dtype=self.settings.master_dtype,
            grad_dtype=self.settings.grad_dtype,
            device=torch.device("cpu") if offload else model_device,
            model_device=model_device,
            pin=own is not None and own.pin_memory,
            offload=offload,
            memory=files.zeros if offload and files is not None else None,
            process_group=shard_group,
            replicas=replicas,
        )

    # What stages do otherwise

    def _kept_on_device(self, params: Sequence[Sequence[nn.Parameter]]) -> list[int]:
        """Return how many of the first parameters of each group stay on the device with offload."""
        return [0] * len(params)

    def _tables(
        self, params: Sequence[nn.Parameter], num_shards: int, alignment: int
    ) -> tuple[FragmentTable, FragmentTable]:
        """Who owns which elements of a group's parameters, in files and in memory."""
        table = FragmentTable.build([param.numel() for param in params], num_shards, alignment)
        return table, table

    def _maker(self, params: Sequence[nn.Parameter]) -> Callable[..., ShardedGroup]:
        """Makes the buffers of a group; takes what `ShardedGroup` does."""
        return partial(ShardedGroup, params)
