"""Faults of stage 3 and of gathers that run beside the next forward, for the table in `faults`."""

from __future__ import annotations

from unit.verify.mutation_form import Mutation

ZERO3 = (
    Mutation(
        "a shard is gathered before it is updated",
        "GatherResources.loading: stream.wait_event(self.shards_updated) -> pass",
        "streams: stage 3",
        "never waits for",
    ),
    Mutation(
        "a unit is gathered before its shard has come from the host",
        "GatherResources.loading: self.gather.stream.wait_event(self._last_load) -> pass",
        "streams: stage 3, on the host, 1 rank",
        r"never waits for(.|\n)*<parameter load stream>|parameter load stream(.|\n)*never waits "
        "for",
    ),
    Mutation(
        "the host updates a shard that is still being loaded",
        "before_write: self._last_load.synchronize() -> pass",
        "streams: stage 3, on the host, 1 rank",
        "the host never waits for <parameter load stream>",
    ),
    Mutation(
        "the device updates a shard that is still being loaded",
        "before_update: get_accelerator().current_stream().wait_event(self.last_gather) -> pass",
        "streams: stage 3, on the host, masters on the device, 1 rank",
        "never waits for <parameter load stream>",
    ),
    Mutation(
        "a row is loaded that a copy-out still reads",
        "MemoryPool.take: buffer.wait_for_reads(get_accelerator().current_stream()) -> pass",
        "streams: stage 3, on the host, 1 rank",
        "never waits for",
    ),
    Mutation(
        "rows are copied out before they are gathered",
        "GatherUnit._finish: current.wait_event(self._gathered) -> pass",
        "streams: stage 3",
        r"never waits for(.|\n)*copy_out",
    ),
    Mutation(
        "a buffer of the pool is handed out early",
        "MemoryPool.take: buffer.wait_for_reads(get_accelerator().current_stream()) -> pass",
        "streams: stage 3",
        "never waits for",
    ),
    Mutation(
        "autograd keeps memory that is given away",
        "SavedTensors._pack: buffer is None -> True",
        "oracle: stage 3 on the device",
        "stage 3: ",
    ),
    Mutation(
        "what persists is not gathered after a step",
        "after_update: self.gather_persistent() -> pass",
        "oracle: stage 3, all persist",
        "stage 3: ",
    ),
    Mutation(
        "the last cut is left out of the rows",
        "RowFiller.fill: filling.rest is not None -> False",
        "oracle: stage 3",
        "stage 3: ",
    ),
    Mutation(
        "an absent gradient is what was there",
        "RowFiller.fill: zeros.append(self._columns[filling.param]) -> pass",
        "oracle: stage 3",
        "stage 3: ",
    ),
    Mutation(
        "a parameter read elsewhere is not gathered",
        "_on_read: self.param_coordinator.enter([unit]) -> pass",
        "oracle: stage 3",
        "stage 3: ",
    ),
    Mutation(
        "a second stream does not wait for the copy-out",
        "GatherUnit.fetch: stream.wait_event(self._copied) -> pass",
        "streams: stage 3",
        r"never waits for(.|\n)*_finish(.|\n)*forward",
    ),
    Mutation(
        "whole memory goes back without its readers",
        "GatherUnit.forget: self.resources.whole.give_back(self._memory, self._readers) -> "
        "self.resources.whole.give_back(self._memory)",
        "streams: stage 3",
        r"never waits for(.|\n)*forward(.|\n)*copy_out",
    ),
    Mutation(
        "rows go back without their readers",
        "GatherUnit._finish: shared.rows.give_back(rows, () if current is None else (current,)) "
        "-> shared.rows.give_back(rows)",
        "streams: stage 3",
        r"never waits for(.|\n)*copy_out(.|\n)*in start",
    ),
    Mutation(
        "what is gathered stays over a step",
        "before_update: self.param_coordinator.release_all() -> pass",
        "oracle: stage 3, kept",
        r"stage 3: unit \S+ was gathered before update 1",
    ),
    Mutation(
        "copied shards do not follow an update",
        "_copy_to_units: if self.copied: ... -> pass",
        "oracle: stage 3",
        r"stage 3: after step 0 are off: .*blocks\.0\.up\.weight",
    ),
    Mutation(
        "a hold is dropped early",
        "_retire: unit.holds -> False",
        "oracle: stage 3",
        r"stage 3: .*gate\.weight is sharded",
    ),
    Mutation(
        "what was gathered ahead has an edited parameter's old value",
        "drop_ahead: self._release(unit) -> pass",
        "oracle: stage 3",
        r"stage 3: after step \d are off: evaluation",
    ),
    Mutation(
        "an edit is shown and not kept",
        "publish: record_of(param).write(param.data) -> pass",
        "oracle: stage 3",
        r"stage 3: after step \d are off: blocks\.0\.up\.weight",
    ),
    Mutation(
        "an edit does not reach the masters",
        "_tell_units: record.on_edit(param) -> pass",
        "oracle: stage 3",
        r"stage 3: after step \d are off: blocks\.",
    ),
    Mutation(
        "shards are put together in another order of ranks",
        "copy_out: rows.view(self._num_shards, -1) -> ....flip(0)",
        "oracle: stage 3",
        "stage 3: .*(inlet|blocks)",
    ),
    Mutation(
        "padding is not zero",
        "RowFiller.fill: list(self._padding) -> []",
        "oracle: stage 3 on the device",
        "stage 3: after step 0 are off: .*padding of ",
    ),
    Mutation(
        "the norm is that of one shard",
        "ZeroMasters.scaled_global_norm: reduce_squared_norm(squares, self.norm_group) -> squares",
        "oracle: stage 3",
        "stage 3: after step 0 are off: norm by [^,]*$",
    ),
    Mutation(
        "gradients of a unit are not sent when backward is done with it",
        "_send_unit: self._send_incomplete(index) -> pass",
        "ledger: stage 3",
        "lost: micro-batch 1 of 1 of every rank never arrived",
    ),
    Mutation(
        "an edited shard is gathered while it is written",
        "CutMasters.on_edit: self.parameter_offload.shard_changed(param) -> pass",
        "streams: stage 3, some persist",
        r"never waits for(.|\n)*on_edit(.|\n)*in start",
    ),
)

GATHERS = (
    Mutation(
        "a module does not wait for its parameters",
        "ParameterDict.__getitem__: getattr(type(param), 'ds_was_read', None) -> None",
        "streams: gathered beside forward",
        r"never waits for <nccl stream(.|\n)*gather_scenarios",
    ),
    Mutation(
        "a second stream does not wait",
        "Arrival.wait: stream not in self._waited -> not self._waited",
        "streams: gathered beside forward, two streams",
        r"never waits for <nccl stream(.|\n)*on_two_streams",
    ),
    Mutation(
        "a read outside of modules does not wait",
        "PendingParameter.__torch_function__: func not in _NO_READ -> False",
        "streams: gathered beside forward, read elsewhere",
        r"never waits for <nccl stream(.|\n)*in kept",
    ),
    Mutation(
        "a gather does not wait for the update",
        "ParameterArrivals.begin: self._gather.wait_for([self._gather.current_stream()]) -> pass",
        "streams: gathered beside forward, bf16",
        "never waits for <default stream>",
    ),
    Mutation(
        "readers wait for what came before the gather",
        "ParameterArrivals.begin: gather().wait -> gather",
        "streams: gathered beside forward",
        "never waits for <nccl stream",
    ),
)
