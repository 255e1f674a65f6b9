"""`PipelineModule` and its grid on ranks: who owns what, all parts, its checkpoint files."""

import functools
import os
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe.layer_spec import Layer, PipelineError
from deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
)
from deepspeed.runtime.utils import set_random_seed
from deepspeed.utils import groups
from unit import models
from unit.common import DistributedTest
from unit.v1.gathering import from_all_ranks

SEED = 1234
WIDTH = 6
BOTH = {"tied_weight_attr": ["weight", "bias"]}
one_stage = functools.partial(PipelineModule, num_stages=1)


def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def layers() -> list[Layer]:
    return [
        LayerSpec(nn.Linear, WIDTH, 8),
        nn.GELU(),
        LayerSpec(nn.Linear, 8, 8, bias=False),
        double,
        LayerSpec(nn.LayerNorm, 8),
        LayerSpec(nn.Linear, 8, WIDTH),
    ]


def seeded(**options: Any) -> PipelineModule:
    return PipelineModule(layers=layers(), seed_layers=True, base_seed=SEED, **options)


def whole_model() -> list[Any]:
    """`layers()` in plain torch, each one seeded by its index."""
    return [
        models.seeded(layer.build, seed=SEED + index) if isinstance(layer, LayerSpec) else layer
        for index, layer in enumerate(layers())
    ]


def weights_of(chain: list[Any]) -> dict[str, torch.Tensor]:
    modules = {str(at): layer for at, layer in enumerate(chain) if isinstance(layer, nn.Module)}
    return dict(nn.ModuleDict(modules).named_parameters())


def through_all_parts(
    module: PipelineModule, value: torch.Tensor, widths: list[int]
) -> torch.Tensor:
    """`value` through every part of the pipeline, handed from owner to owner by broadcasts."""
    group = module.grid.get_pipe_parallel_group()
    for part, width in enumerate(widths):
        chunk, stage = divmod(part, module.num_stages)
        if module.stage_id == stage:
            value = module.forward_chunk(chunk, value).detach().clone()
        else:
            value = torch.empty(len(value), width)
        dist.broadcast(value, src=module.grid.stage_to_global(stage), group=group)
    return value


def made_by_rank_0(tmpdir: str, name: str) -> Path:
    """A folder of all ranks."""
    folder = Path(tmpdir) / name
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    return folder


class InTuple(nn.Linear):
    """Returns its output as the one element of a tuple."""

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor]:  # type: ignore[override]  # the point of it
        return (super().forward(input),)


class TestStages(DistributedTest):
    world_size = 4

    def test_seeded_weights_do_not_depend_on_the_stages(self) -> None:
        # Kills: seeds counted from the stage's first layer; a layer built on two stages or none.
        expected = weights_of(whole_model())
        for stages, chunks in ((1, 1), (2, 1), (4, 1), (2, 2)):
            torch.manual_seed(dist.get_rank())  # what the ranks have drawn before must not matter
            own = dict(seeded(num_stages=stages, num_model_chunks=chunks).named_parameters())
            for name, param in own.items():
                assert torch.equal(param, expected[name]), (stages, chunks, name)
            held = [name for names in from_all_ranks(sorted(own)) for name in names]
            assert sorted(held) == sorted(list(expected) * (4 // stages))

    def test_parts_chained_are_the_whole_model(self) -> None:
        # Kills: a layer skipped or run twice at a boundary, the wrong chunk of an interleaved
        # stage.
        inputs = models.drawn(7, 3, WIDTH)
        expected = functools.reduce(lambda value, layer: layer(value), whole_model(), inputs)
        for stages, chunks, method, widths in (
            (1, 1, "parameters", [WIDTH]),
            (2, 1, "uniform", [8, WIDTH]),
            (4, 1, [0, 1, 1, 5, 6], [8, 8, 8, WIDTH]),
            (2, 2, "uniform", [8, 8, 8, WIDTH]),
        ):
            how: dict[str, Any] = {"num_model_chunks": chunks, "partition_method": method}
            module = seeded(num_stages=stages, **how)
            assert torch.equal(through_all_parts(module, inputs, widths), expected), how
        assert module.parts == [0, 2, 4, 5, 6]
        assert module.stage_owner(4) == 0
        assert list(module.chunk_range(1)) == ([4] if module.stage_id == 0 else [5])
        with pytest.raises(PipelineError, match="forward_chunk"):
            module(inputs)

    def test_tied_weights_start_equal_and_sum_their_gradients(self) -> None:
        def scaled(module: nn.Linear, value: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(value, module.weight.t())

        rank = dist.get_rank()
        random.seed(rank)
        torch.manual_seed(rank)
        module = PipelineModule(
            layers=[
                TiedLayerSpec("ends", nn.Linear, 4, 4, bias=False),
                TiedLayerSpec("middle", nn.Linear, 4, 4, **BOTH),
                TiedLayerSpec("middle", nn.Linear, 4, 4, **BOTH),
                TiedLayerSpec("ends", nn.Linear, 4, 4, bias=False, forward_fn=scaled),
                TiedLayerSpec("ends", nn.Linear, 4, 4, bias=False),
            ],
            num_stages=4,
            partition_method=[0, 1, 2, 3, 5],
        )
        key = "ends" if rank in (0, 3) else "middle"
        ranks = [0, 3] if key == "ends" else [1, 2]
        # Kills: a group made on its members only, which hangs; a second module on the stage that
        # uses a key twice.
        assert list(module.tied_comms) == [key]
        assert module.tied_comms[key]["ranks"] == ranks
        names = module.tied_comms[key]["weight_attr"]
        assert list(module.state_dict()) == [f"tied_modules.{key}.{name}" for name in names]
        tied = module.get_tied_weights_and_groups()
        for weight, group in tied:
            assert dist.get_all_ranks_from_group(group) == ranks
            replicas: list[Any] = [None, None]
            dist.all_gather_object(replicas, weight.detach(), group=group)
            assert torch.equal(replicas[0], replicas[1])  # kills: no broadcast
            # Kills: counted twice in the norm, or never.
            assert getattr(weight, "ds_pipe_replicated", False) == (rank != ranks[0])
        torch.manual_seed(ranks[0])
        # Kills: the last owner's weights.
        assert torch.equal(tied[0][0], nn.Linear(4, 4, bias=key == "middle").weight)

        tied[0][0].grad = torch.full((4, 4), float(rank + 1)) if rank != 2 else None
        module.allreduce_tied_weight_gradients()
        expected = {0: 5.0, 3: 5.0, 1: 2.0, 2: 2.0}[rank]
        assert torch.equal(tied[0][0].grad, torch.full((4, 4), expected))

    def test_the_grid_is_an_mpu_whose_groups_are_made_once(self) -> None:
        two_by_two = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
        grid, again = PipelineParallelGrid(two_by_two), PipelineParallelGrid(two_by_two)
        rank = dist.get_rank()
        stage, slice_rank = divmod(rank, 2)
        expected = {
            "get_pipe_parallel_group": [slice_rank, slice_rank + 2],
            "get_data_parallel_group": [rank],
            "get_slice_parallel_group": [2 * stage, 2 * stage + 1],
            "get_tensor_model_parallel_group": [2 * stage, 2 * stage + 1],
            "get_model_parallel_group": [0, 1, 2, 3],
        }
        for getter, ranks in expected.items():
            assert dist.get_all_ranks_from_group(getattr(grid, getter)()) == ranks, getter
            # Kills: a communicator per engine.
            assert getattr(grid, getter)() is getattr(again, getter)(), getter
        assert (grid.stage_id, grid.get_slice_parallel_rank()) == (stage, slice_rank)
        assert grid.get_model_parallel_rank() == rank
        assert (grid.is_first_stage, grid.is_last_stage) == (rank < 2, rank >= 2)
        assert grid.p2p_groups == [[0, 2], [1, 3], [2, 0], [3, 1]]
        assert grid.stage_to_global(1) == slice_rank + 2
        assert grid.stage_to_global(0, model=1) == 1
        assert grid.describe(3) == "rank 3: pipe 1 of 2, data 0 of 1, model 1 of 2"

        groups.mpu = PipelineParallelGrid(PipeDataParallelTopology(num_pp=2, num_dp=2))
        assert groups.get_data_parallel_world_size() == 2
        assert groups.get_data_parallel_rank() == slice_rank
        assert groups._get_data_parallel_group_ranks() == [2 * stage, 2 * stage + 1]
        assert groups.get_model_parallel_world_size() == 2
        assert groups.get_model_parallel_rank() == stage
        # Kills: pipeline stages taken for tensor-parallel ranks, whose checkpoint files are merged.
        assert groups.get_tensor_model_parallel_world_size() == 1
        groups.reset()

    def test_a_plain_engine_beside_a_pipelines_is_refused(self) -> None:
        # Kills: training over the ranks of a stage, with a norm that counts the others once more.
        sgd = {"type": "SGD", "params": {"lr": 0.1}}
        config = models.config_of(0, 1, optimizer=sgd)
        pair = [LayerSpec(nn.Linear, 2, 2), LayerSpec(nn.Linear, 2, 2)]
        module = PipelineModule(pair, num_stages=2, loss_fn=nn.MSELoss())
        twice = {**config, "gradient_accumulation_steps": 2}
        pipeline = deepspeed.initialize(model=module, config=twice)[0]
        with pytest.raises(ValueError, match="a pipeline's groups are in use"):
            deepspeed.initialize(model=nn.Linear(2, 2), config=config)
        beside = deepspeed.initialize(model=nn.Linear(2, 2), config=config, mpu=pipeline.mpu)[0]
        assert beside.dp_world_size == 2
        beside.destroy()
        pipeline.destroy()
        assert deepspeed.initialize(model=nn.Linear(2, 2), config=config)[0].dp_world_size == 4

    def test_sizes_that_do_not_fit_are_named(self) -> None:
        too_many = "pipe 2 x data 2 x model 2 are 8 ranks, but the world has 4"
        with pytest.raises(ValueError, match=too_many):
            PipelineParallelGrid(PipeModelDataParallelTopology(2, 2, 2))
        with pytest.raises(PipelineError, match="num_stages=3 must divide the number of ranks, 4"):
            PipelineModule(layers=layers(), num_stages=3)
        with pytest.raises(PipelineError, match="num_stages=2, but the topology has 4 stages"):
            PipelineModule(layers=layers(), num_stages=2, topology=PipeDataParallelTopology(4, 1))
        with pytest.raises(PipelineError, match="give num_stages or topology"):
            PipelineModule(layers=layers())
        pair = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            with pytest.raises(ValueError, match="2 of the world's 4 ranks"):
                PipelineParallelGrid(PipeDataParallelTopology(2, 1), process_group=pair)
        shared = nn.Linear(4, 4)
        # Kills: one module in two places becoming two that drift apart.
        twice = [shared, nn.ReLU(), shared]
        with pytest.raises(PipelineError, match="layers 0 and 2 share a param.* TiedLayerSpec"):
            PipelineModule(layers=twice, num_stages=4, partition_method="uniform")
        misspelt = TiedLayerSpec("k", nn.Linear, 2, 2, tied_weight_attr="wight")
        with pytest.raises(PipelineError, match="no attribute 'wight'"):
            one_stage([misspelt])

    def test_layer_files_are_read_by_any_number_of_stages(self, class_tmpdir: str) -> None:
        folder = made_by_rank_0(class_tmpdir, "layers")
        written = seeded(num_stages=2, partition_method="uniform")
        before = set(os.listdir(folder))
        written.save_state_dict(str(folder))
        assert before <= set(os.listdir(folder))
        dist.barrier()
        # Kills: a layer without parameters left out, a stage's layers numbered from 0, functions
        # with files.
        names = [f"layer_{index:02d}-model_states.pt" for index in (0, 1, 2, 4, 5)]
        assert sorted(os.listdir(folder)) == names
        own = written.ckpt_layer_path(str(folder), 0)
        is_first = written.stage_id == 0
        assert own.endswith(f"layer_0{0 if is_first else 3}-model_states.pt")
        assert written.ckpt_layer_path_list(str(folder), 0) == ([own] if is_first else [])
        prefix = os.path.join("runs", "tag", f"module-pipe_0{written.stage_id}")
        assert written.ckpt_prefix("runs", "tag") == prefix
        expected = weights_of(whole_model())
        for stages, chunks in ((1, 1), (4, 1), (2, 2)):
            module = PipelineModule(layers(), num_stages=stages, num_model_chunks=chunks)
            module.load_state_dir(str(folder))
            for name, param in module.named_parameters():
                assert torch.equal(param, expected[name]), (stages, chunks, name)

    def test_a_stage_without_a_file_of_its_tied_layer_reads_the_first(
        self, class_tmpdir: str
    ) -> None:
        def made(num_stages: int) -> PipelineModule:
            first = TiedLayerSpec("a", nn.Linear, 4, 4, **BOTH)
            last = TiedLayerSpec("a", nn.Linear, 4, 4, **BOTH, forward_fn=lambda m, value: m(value))
            how = {"num_stages": num_stages, "partition_method": "uniform"}
            return PipelineModule([first, nn.ReLU(), last], **how)

        torch.manual_seed(5)
        written = made(1)
        folder = made_by_rank_0(class_tmpdir, "tied")
        written.save_state_dict(str(folder))
        dist.barrier()
        names = ["layer_00-model_states.pt", "layer_01-model_states.pt"]
        assert sorted(os.listdir(folder)) == names
        torch.manual_seed(6)
        read = made(2)
        # Kills: the replica of the later stage left as it was, so that the two differ from then on.
        read.load_state_dir(str(folder))
        for name in ("tied_modules.a.weight", "tied_modules.a.bias"):
            assert torch.equal(read.get_parameter(name), written.get_parameter(name))

    def test_the_data_ranks_of_a_stage_share_its_layers(self, class_tmpdir: str) -> None:
        class Writes:
            """A checkpoint engine that remembers."""

            def __init__(self) -> None:
                self.paths: list[str] = []

            def save(self, state_dict: dict[str, Any], path: str) -> None:
                self.paths.append(os.path.basename(path)[6:8])

        module = one_stage(layers())
        written = []
        for parallel in (True, False):
            module.checkpoint_parallel_write_pipeline = parallel
            engine = Writes()
            module.save_state_dict(class_tmpdir, checkpoint_engine=engine)
            written.append(from_all_ranks(engine.paths))
        shared, alone = written
        # Kills: each file written by every replica.
        assert shared == [["00", "01"], ["02"], ["04"], ["05"]]
        assert alone == [["00", "01", "02", "04", "05"], [], [], []]

    def test_tensor_parallel_ranks_have_files_of_their_own(self, class_tmpdir: str) -> None:
        two_by_two = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
        module = PipelineModule(layers=layers(), topology=two_by_two)
        own = os.path.basename(module.ckpt_layer_path("", 0))[8:]
        assert own == f"-model_0{module.grid.get_slice_parallel_rank()}-model_states.pt"
        folder = made_by_rank_0(class_tmpdir, "slices")
        module.save_state_dict(str(folder))
        dist.barrier()
        names = [os.path.basename(path) for path in module.ckpt_layer_path_list(str(folder), 0)]
        index = module.chunk_range(0)[0]
        assert names == [f"layer_{index:02d}-model_0{rank}-model_states.pt" for rank in (0, 1)]


class TestOneStage(DistributedTest):
    world_size = 1

    def test_a_tied_model_is_one_module(self) -> None:
        def plus_one(module: nn.Linear, value: torch.Tensor) -> torch.Tensor:
            return module(value) + 1

        first = TiedLayerSpec("a", nn.Linear, 4, 4)
        last = TiedLayerSpec("a", nn.Linear, 4, 4, forward_fn=plus_one)
        module = one_stage([first, nn.ReLU(), last])
        assert list(module.state_dict()) == ["tied_modules.a.weight", "tied_modules.a.bias"]
        assert module.get_tied_weights_and_groups() == []
        inputs = torch.randn(2, 4)
        tied = module.tied_modules["a"]
        assert torch.equal(module(inputs), tied(torch.relu(tied(inputs))) + 1)
        assert "part 0 on stage 0: 0 Linear, 1 ReLU, 2 Linear" in repr(module)

    def test_a_tuple_stays_one_argument(self) -> None:
        # Kills: unpacking, which breaks models written for upstream.
        seen: list[Any] = []
        module = one_stage([lambda pair: seen.append(pair) or pair, lambda pair: pair[0]])
        pair = (torch.ones(1), None)
        assert torch.equal(module(pair), pair[0])
        assert seen == [pair]

    def test_seeded_dropout_does_not_depend_on_the_cut(self) -> None:
        def outputs(chunks: int) -> list[torch.Tensor]:
            how: dict[str, Any] = {"num_model_chunks": chunks, "partition_method": "uniform"}
            module = one_stage([nn.Dropout(0.5)] * 4, seed_layers=True, **how)
            return [module(torch.ones(64)) for _ in range(2)]

        whole, cut = outputs(1), outputs(2)
        assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))
        assert not torch.equal(whole[0], whole[1])  # kills: the same masks in every micro-batch

    @pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "default"])
    def test_activation_checkpoints_change_no_gradient(self, kind: str) -> None:
        """Token numbers go in, which require no gradient: reentrant checkpoints mistake that."""
        calls: list[int] = []

        def checkpoint(function: Any, *args: Any) -> Any:
            calls.append(len(args))
            if kind == "default":
                return checkpointing.checkpoint(function, *args)
            reentrant = kind == "reentrant"
            return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=reentrant)

        def gradients(**options: Any) -> list[torch.Tensor]:
            module = one_stage(
                layers=[
                    LayerSpec(nn.Embedding, 11, 8),
                    LayerSpec(nn.Linear, 8, 8),
                    LayerSpec(nn.Dropout, 0.5),
                    lambda value: (value, None),
                    lambda pair: pair[0].relu(),
                    LayerSpec(InTuple, 8, 8),
                    # Kills: the one tensor of a tuple handed on by itself.
                    lambda single: single[0],
                    LayerSpec(nn.Linear, 8, 3),
                ],
                seed_layers=True,
                **options,
            )
            # A pipeline runs several forwards before a backward.
            outputs = [module(torch.arange(11)) for _ in range(2)]
            torch.stack(outputs).square().sum().backward()
            assert all(param.grad is not None for param in module.parameters())
            return [param.grad for param in module.parameters() if param.grad is not None]

        plain = gradients()
        for interval, kinds, segments in (
            (1, None, 4),
            (4, None, 2),
            (1, ["Linear"], 2),
            (2, ["Linear", "Embedding"], 1),
        ):
            calls.clear()
            how = {"activation_checkpoint_func": checkpoint, "checkpointable_layers": kinds}
            recomputed = gradients(activation_checkpoint_interval=interval, **how)
            # Kills: an embedding that gets no gradient; the last forward's dropout masks in a
            # recomputation (exact).
            assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True)), kinds
            assert len(calls) == 2 * segments, (interval, kinds)

    def test_nothing_is_recomputed_in_evaluation(self) -> None:
        def refuse(*args: Any) -> Any:
            raise AssertionError("checkpointed")

        how: dict[str, Any] = {"activation_checkpoint_func": refuse}
        module = one_stage(layers(), activation_checkpoint_interval=2, **how)
        inputs = torch.randn(2, WIDTH)
        with torch.no_grad():
            module(inputs)
        module.eval()
        module(inputs)
        with pytest.raises(AssertionError, match="checkpointed"):
            module.train()(inputs)
        with pytest.raises(PipelineError, match="activation_checkpoint_interval=-1"):
            module.set_checkpoint_interval(-1)

    def test_seed_function(self) -> None:
        seeds: list[int] = []

        def remember(seed: int) -> None:
            seeds.append(seed)
            set_random_seed(seed)

        how: dict[str, Any] = {"seed_layers": True, "seed_fn": remember, "base_seed": 10}
        module = one_stage([nn.ReLU(), nn.ReLU()], **how)
        assert seeds == [10, 11]
        module(torch.ones(1))
        module(torch.ones(1))
        assert seeds[2:] == [10, 11, 20, 21]

    def test_files_that_do_not_fit_change_nothing(self, tmpdir: str) -> None:
        def small() -> PipelineModule:
            return one_stage([LayerSpec(nn.Linear, 2, 2), LayerSpec(nn.Linear, 2, 3)])

        folder, module = str(tmpdir), small()
        with pytest.raises(CheckpointError, match=r"layer_00-model_states.pt does not exist"):
            module.load_state_dir(folder)
        module.save_state_dict(folder)
        other = small()
        before = [param.detach().clone() for param in other.parameters()]
        wrong = OrderedDict(weight=torch.zeros(3, 3), scale=torch.zeros(1))
        torch.save(wrong, os.path.join(folder, "layer_01-model_states.pt"))
        told = r"weight \(3, 3\) instead of \(3, 2\); bias is missing; scale is not"
        with pytest.raises(CheckpointError, match=told):
            other.load_state_dir(folder)
        # Kills: a model of two checkpoints, half old and half new.
        assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
        os.remove(os.path.join(folder, "layer_01-model_states.pt"))
        other.load_state_dir(folder, strict=False)
        loaded = list(zip(module.parameters(), other.parameters(), strict=True))
        assert all(torch.equal(a, b) for a, b in loaded[:2])
        assert torch.equal(loaded[2][1], before[2])

    def test_frozen_parameters_can_be_left_out(self, tmpdir: str) -> None:
        module = one_stage([nn.Linear(2, 2)])
        module.get_parameter("0.bias").requires_grad_(False)
        module.save_state_dict(str(tmpdir), exclude_frozen_params=True)
        assert list(torch.load(module.ckpt_layer_path(str(tmpdir), 0))) == ["weight"]

    def test_a_tied_layer_is_read_from_the_file_of_another_place(self, tmpdir: str) -> None:
        """With a forward_fn everywhere its weights are written once, at the first place."""

        def made() -> PipelineModule:
            spec = TiedLayerSpec("a", nn.Linear, 2, 2, forward_fn=lambda m, value: m(value))
            return one_stage([nn.ReLU(), spec, spec])

        first, second = made(), made()
        first.save_state_dict(str(tmpdir))
        names = ["layer_00-model_states.pt", "layer_01-model_states.pt"]
        assert sorted(os.listdir(str(tmpdir))) == names
        second.load_state_dir(str(tmpdir))
        assert torch.equal(first.tied_modules["a"].weight, second.tied_modules["a"].weight)

    def test_compile(self) -> None:
        module = one_stage([nn.Linear(2, 2), double])
        inputs = torch.randn(3, 2)
        expected = module(inputs)
        module.compile(backend="eager")
        assert torch.equal(module(inputs), expected)
        assert module.get_submodule("0")._compiled_call_impl is not None
