"""AutoTP: models of transformers, cut over ranks by the configuration alone, train alike."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.checkpoint.ds_to_universal import main, parse_arguments
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.checkpoint.resharding.tensor_parallel import Share, SlicePatterns
from deepspeed.module_inject.layers import GatherReplacedLayerParams
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.runtime.sharding.model_ranks import is_model_parallel_parameter
from deepspeed.runtime.sharding.model_slices import slices_of
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.verify import check_budgets, check_streams
from unit.common import DistributedTest
from unit.models import config_of, seeded, sgd
from unit.one_process import OneProcess, own_loss, train
from unit.v1.gathering import gradients_of, masters_of
from unit.v1.looping import each
from unit.v1.tensor.architectures import ARCHITECTURES, PlainDecoder, batch_of, model_of

LR = 0.5


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """At stage 3 some parameters stay whole, and some do not."""
    block: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 2000, **more}
    if stage == 3:
        block.setdefault("stage3_param_persistence_threshold", 50)
        block["stage3_gather_16bit_weights_on_model_save"] = True
    return block


def config(size: int, stage: int, rows: int = 2, **more: Any) -> dict[str, Any]:
    cut = {"autotp_size": size}
    keys = {"optimizer": sgd(LR), "tensor_parallel": cut, "zero_optimization": zero(stage), **more}
    return config_of(stage, rows, **keys)


def alike(make: Callable[..., Any], *args: Any, **more: Any) -> tuple[Any, Any]:
    """A model of other weights on each rank, and the first rank's."""
    first = seeded(make, *args, seed=0, **more)
    return seeded(make, *args, seed=dist.get_rank(), **more), first


def start(model: Any, size: int, stage: int, **more: Any) -> Any:
    return deepspeed.initialize(model=model, config=config(size, stage, **more))[0]


def whole(engine: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What all tensor-parallel ranks have, put together."""
    slices = slices_of(engine.module)
    assert slices is not None
    return values | dict(slices.whole(engine.module, values))


def assert_close(what: str, found: torch.Tensor, right: torch.Tensor, scale: float) -> None:
    distance = (found - right).norm().item()
    assert distance <= 1e-5 * scale + 1e-7, f"{what}: off by {distance:.3g} of {scale:.3g}"


def own_part(engine: Any, samples: int, seed: int, parts: int = 1, part: int = 0) -> dict[str, Any]:
    """This data-parallel rank's of a batch, or one of `parts` micro-batches of it."""
    count = samples // (engine.dp_world_size * parts)
    at = count * (engine.get_data_parallel_rank() * parts + part)
    return {key: value[at : at + count] for key, value in batch_of(samples, seed).items()}


def check_training(
    engine: Any,
    model: torch.nn.Module,
    clip: float = 0.0,
    steps: int = 1,
    micros: int = 1,
    ends: bool = True,
) -> None:
    """Compare gradients, norm and parameters with one process after steps of `micros`."""
    process = OneProcess(copy.deepcopy(model), LR, clip=clip)
    samples = 2 * micros * engine.dp_world_size
    for step in range(steps):
        process.backward([batch_of(samples, step)])
        for micro in range(micros):
            if micro:
                engine.step()
            engine.backward(own_loss(engine, own_part(engine, samples, step, micros, micro)))
        trained = {key: p for key, p in engine.module.named_parameters() if p.requires_grad}
        right = process.grads()
        plain = not all(hasattr(param, "_hp_mapping") for param in trained.values())
        found = gradients_of(trained, plain)
        assert found.keys() == trained.keys()
        largest = max(right[key].norm().item() for key in trained)
        for key, grad in whole(engine, found).items():
            assert_close(f"step {step}, gradient of {key}", grad, right[key], largest)
        process.update()
        engine.step()
        assert float(engine.get_global_grad_norm()) == pytest.approx(process.norm.item(), rel=1e-5)
        params = process.params()
        for key, value in whole(engine, masters_of(trained, plain)).items():
            wanted = params[key]
            assert_close(f"step {step}, {key}", value, wanted, LR * largest + wanted.norm().item())
    if ends:
        engine.destroy()


# Ranks that share layers and stage of the engine that saves, and of the one that loads, which may
# read a universal checkpoint.
Runs = tuple[tuple[int, int], tuple[int, int], bool]


def goes_on(
    tmpdir: str,
    make: Callable[[], Any],
    saved_by: tuple[int, int],
    loaded_by: tuple[int, int],
    universal: bool = False,
) -> None:
    """Save, load and go on: whole weights are the saved ones, and the step after as without."""
    folder = f"{tmpdir}/{saved_by}"

    def engine_of(size: int, stage: int, seed: int) -> Any:
        keys = config(size, stage, rows=size)
        keys["checkpoint"] = {"load_universal": universal and seed == 2}
        keys["optimizer"]["params"]["momentum"] = 0.9
        return deepspeed.initialize(model=seeded(make, seed=seed), config=keys)[0]

    def weights_around_a_step(engine: Any) -> list[Any]:
        before = engine._zero3_consolidated_16bit_state_dict()
        train(engine, [own_part(engine, 4, 1)])
        after = engine._zero3_consolidated_16bit_state_dict()
        engine.destroy()
        assert (before is None) == (dist.get_rank() > 0)
        return [before, after]

    if not Path(folder).exists():
        engine = engine_of(*saved_by, seed=1)
        train(engine, [own_part(engine, 4, 0)])
        engine.save_checkpoint(folder, tag="t")
        assert engine.save_16bit_model(folder)
        held = weights_around_a_step(engine)
        if dist.get_rank() == 0:
            torch.save(held, f"{folder}/held")
        dist.barrier()
    if universal and dist.get_rank() == 0:
        main(parse_arguments(["--input_folder", f"{folder}/t", "--output_folder", f"{folder}/u"]))
    dist.barrier()
    engine = engine_of(*loaded_by, seed=2)
    engine.load_checkpoint(folder, tag="u" if universal else "t")
    found = weights_around_a_step(engine)
    if dist.get_rank() > 0:
        return
    exported = torch.load(f"{folder}/pytorch_model.bin")
    make().load_state_dict(exported)  # its names and shapes
    saved, went_on = torch.load(f"{folder}/held")
    for key, value in saved.items():
        assert torch.equal(exported[key], value) and torch.equal(found[0][key], value), key
        moved = (went_on[key] - value).norm().item()
        off = (found[1][key] - went_on[key]).norm().item()
        assert off <= (0 if saved_by == loaded_by else 1e-4 * moved + 1e-6), f"{key}: {off}"


class FourRanks(DistributedTest):
    """One group of ranks for all: to start them takes longer than a check."""

    world_size = 4
    exec_timeout = 120


class TestArchitectures(FourRanks):
    def test_four_ranks(self, class_tmpdir: str) -> None:
        self.check_train_like_one_process()
        self.check_resume_with_other_sizes(class_tmpdir=class_tmpdir)

    @each(name=list(ARCHITECTURES), stage=[0, 1, 2])
    def check_train_like_one_process(self, name: str, stage: int) -> None:
        # Kills: a layer cut by columns instead of rows, or in one piece where several lie behind
        # one another; heads, alibi or position bias of other ranks; a norm of heads with its own
        # rank's gradient; slices that are not marked; a bias added on every rank; weights of ranks
        # that were initialized otherwise.
        at_all_stages = name in ("qwen3", "gpt2", "t5")
        if stage < 2 and not at_all_stages:
            return
        more = {} if at_all_stages else {"num_hidden_layers": 1}
        model, first = alike(model_of, name, **more)  # the engine makes them alike
        clip = 0.0 if stage == 1 else 0.1
        engine = start(model, 2, stage, gradient_clipping=clip)
        check_training(engine, first, clip, steps=2 if stage == 1 else 1)

    @each(name=["phi3", "t5"], sizes=[(2, 1), (1, 4)])
    def check_resume_with_other_sizes(
        self, name: str, sizes: tuple[int, int], class_tmpdir: str
    ) -> None:
        # Kills: optimizer state or weights sliced otherwise than the model; whole weights put
        # together in the order of ranks where several lie behind one another.
        heads = {"num_key_value_heads": 4} if name == "phi3" else {}
        runs = [(size, 1) for size in sizes]
        goes_on(f"{class_tmpdir}/{name}", lambda: model_of(name, **heads), *runs)


# -- stage 3: layers are cut over tensor-parallel ranks, then each slice is sharded ----------------

CHECKED = {"verify": {"ledger": True, "collectives": True}}
HOST = {"device": "cpu"}
MORE: list[dict[str, Any]] = [
    {"zero_optimization": {"num_optimizer_instances": 2, "stage3_param_persistence_threshold": 0}},
    {"zero_optimization": {"offload_param": HOST, "offload_optimizer": HOST}},
    {"tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True}, "checkpointed": True},
]
REFUSED: list[dict[str, Any]] = [{"zero_hpz_partition_size": 2}]


def freeze(model: Any) -> None:
    """A layer that is cut, and one that is not."""
    model.model.layers[0].mlp.down_proj.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)


class TestStage3(FourRanks):
    def test_four_ranks(self, class_tmpdir: str) -> None:
        self.check_trains_like_one_process()
        self.check_with_other_features()
        self.check_sharded_before_it_is_cut()
        self.check_half_precision()
        self.check_on_streams()
        self.check_goes_on(class_tmpdir=class_tmpdir)
        self.check_refusals(class_tmpdir=class_tmpdir)

    def check_trains_like_one_process(self, name: str = "gpt2") -> None:
        # Kills: parameters cut over ranks with other slices; a norm without other slices, or with
        # replicas counted twice; norms of heads that leave with a part of their gradient.
        model, first = alike(model_of, name)
        engine = start(model, 2, 3, gradient_clipping=0.1)
        for key, param in model.named_parameters():  # whole for scripts: first shards, then slices
            if is_model_parallel_parameter(param):
                with GatherReplacedLayerParams([param], model):
                    assert torch.equal(param, first.get_parameter(key)), key
            shards = deepspeed.zero.GatheredParameters([param])
            with shards, GatherReplacedLayerParams([param], model):
                assert torch.equal(param, first.get_parameter(key)), key
        check_training(engine, first, 0.1, steps=2)

    @each(more=MORE)
    def check_with_other_features(self, more: dict[str, Any]) -> None:
        # Kills: instances of ranks with several slices; shards on the host of other ranks' slices;
        # the ledger or the intent check taking tensor-parallel ranks for those that share a shard.
        model, first = alike(model_of, "qwen3", num_hidden_layers=1)
        more = copy.deepcopy(more)
        if more.pop("checkpointed", False):
            model.gradient_checkpointing_enable()
        freeze(model)
        freeze(first)
        more["zero_optimization"] = zero(3, **more.get("zero_optimization", {}))
        engine = start(model, 2, 3, gradient_accumulation_steps=2, **CHECKED, **more)
        check_training(engine, first, micros=2)

    @each(before=[True, False])
    def check_sharded_before_it_is_cut(self, before: bool) -> None:
        # Kills: slices of one rank's shard; whole parameters left beside slices; weights of ranks
        # that were initialized otherwise.
        model, first = alike(model_of, "phi3" if before else "t5")
        keys = config(2, 3)
        deepspeed.zero.Init(model, config_dict_or_path=keys)
        if before:
            deepspeed.tp_model_init(model, 2, None)
            groups = [param.ds_process_group for param in model.parameters()]
            assert {dist.get_world_size(group=group) for group in groups} == {2}
        engine = deepspeed.initialize(model=model, config=keys)[0]
        check_training(engine, first, ends=False)
        del model._ds_model_slices
        with pytest.raises(DeepSpeedConfigError, match="an engine at zero_optimization.stage"):
            deepspeed.tp_model_init(model, 2, None)
        engine.destroy()

    def check_half_precision(self) -> None:
        # Kills: shards in another precision than their slices' ranks.
        model, first = alike(model_of, "llama", num_hidden_layers=1)
        engine = start(model, 2, 3, bf16={"enabled": True})
        loss = own_loss(engine, own_part(engine, 4, 0))
        losses = [torch.zeros(()) for _ in range(4)]
        dist.all_gather(losses, loss.detach().float())
        right = own_loss(first, batch_of(4, 0))
        right.backward()
        assert torch.stack(losses).mean().item() == pytest.approx(right.item(), rel=0.03)
        engine.backward(loss)
        engine.step()
        norm = torch.nn.utils.clip_grad_norm_(first.parameters(), 1e9).item()
        assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=0.05)
        engine.destroy()

    def check_on_streams(self) -> None:
        # Kills: a gather that reads a slice before its update; a sum over tensor-parallel ranks
        # beside a reduction of the same gradient.
        with simulate(schedule=1, backward_streams=2), check_streams(), check_budgets():
            model, first = alike(model_of, "qwen3", num_hidden_layers=1)
            keys = {"tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True}}
            engine = start(model, 2, 3, **keys)
            check_training(engine, first, ends=False)
            engine(**own_part(engine, 4, 1))
            engine.destroy()

    @each(runs=[((2, 3), (2, 3), False), ((2, 3), (2, 2), True), ((4, 1), (2, 3), False)])
    def check_goes_on(self, runs: Runs, class_tmpdir: str) -> None:
        # Kills: files of tensor-parallel ranks that overwrite each other, or are read by others;
        # weights saved as slices; a frozen slice of another rank; a universal checkpoint with the
        # first rank's buffers alone.
        def frozen() -> Any:
            model = model_of("phi3", num_key_value_heads=4, num_hidden_layers=1)
            freeze(model)
            return model

        goes_on(class_tmpdir, frozen, *runs)

    def check_refusals(self, class_tmpdir: str) -> None:
        # Kills: values of a rank with another slice; a model that one rank builds otherwise and
        # others wait for; copies of gathered shards over ranks with several slices.
        with pytest.raises(ValueError, match="convert it with .*ds_to_universal"):
            get_fp32_state_dict_from_zero_checkpoint(f"{class_tmpdir}/{(2, 3)}", "t")
        for block in REFUSED:
            with pytest.raises(DeepSpeedConfigError, match=next(iter(block))):
                start(model_of("qwen2"), 2, 3, zero_optimization=zero(3, **block))
        model = model_of("qwen2")
        engine = start(model, 2, 3)
        head = model.model.layers[0].mlp.up_proj.weight
        own = dist.get_rank() % 2  # the first rank that has this slice
        if own:
            with (
                pytest.raises(RuntimeError, match=r"ranks \[1, 3\] have .*modifier_rank=1"),
                deepspeed.zero.GatheredParameters(head, modifier_rank=0),
            ):
                pass
        with deepspeed.zero.GatheredParameters(head, modifier_rank=own):
            head.data.fill_(dist.get_rank())
        with deepspeed.zero.GatheredParameters(head):
            assert head.shape == (12, 16) and bool((head == own).all())
        with pytest.raises(CheckpointError, match="a slice of a layer"):
            safetensors = pytest.importorskip("safetensors.torch")
            path = f"{class_tmpdir}/own-{dist.get_rank()}.safetensors"
            safetensors.save_file({"model.layers.0.mlp.up_proj.weight": torch.zeros(24, 16)}, path)
            deepspeed.utils.load_sharded_safetensors(model, path, strict=False)
        engine.destroy()
        model = model_of("qwen2")
        if dist.get_rank() == 3:
            model.lm_head.requires_grad_(False)
        with pytest.raises(RuntimeError, match=r"different models: lm_head.weight .* on rank 3"):
            start(model, 2, 3)


# -- heads and widths that ranks do not divide: the first have one more ----------------------------

THREE = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3}
UNEVEN: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 18, "n_head": 3},
    "falcon": {**THREE, "num_kv_heads": 3},
    "gpt2": {"n_embd": 18, "n_head": 3, "n_inner": 25},
    "gpt_neox": {"hidden_size": 18, "num_attention_heads": 3, "intermediate_size": 25},
    "phi3": {**THREE, "intermediate_size": 25},
    "qwen3": {**THREE, "intermediate_size": 25, "head_dim": 8},
    "t5": {"num_heads": 3, "d_ff": 25},
}
FIVE = {"hidden_size": 40, "num_attention_heads": 10, "num_key_value_heads": 5}


def test_uneven_parts_are_larger_on_the_first_ranks() -> None:
    # Kills: sizes that upstream's slices of the same weights do not have.
    def sizes(pieces: int, width: int, size: int) -> list[int]:
        return [Share.of_rank(pieces, rank, size).of(width) for rank in range(size)]

    assert sizes(10, 10, 4) == [3, 3, 2, 2]
    assert sizes(6, 96, 4) == [32, 32, 16, 16] and sizes(6, 48, 4) == [16, 16, 8, 8]


def test_uneven_slices_that_do_not_fit_their_pieces_are_named() -> None:
    stacked = {"patterns": ["w"], "shape": ((4, 2), -1), "partition_dim": 0}
    info = {
        "parameter_with_sub_params": [stacked],
        "parameter_with_pieces": [{"patterns": ["w"], "pieces": 4}],
    }
    with pytest.raises(CheckpointError, match=r"sizes \[4, 2\], of which 2 ranks .* 4 pieces"):
        SlicePatterns(info).merged("w", [torch.zeros(3, 1), torch.zeros(3, 1)])
    assert SlicePatterns(info).unmatched(["v"]) == ["w", "w"]


class TestUneven(FourRanks):
    def test_four_ranks(self, class_tmpdir: str) -> None:
        self.check_sizes_on_four_ranks()
        self.check_trains_like_one_process()
        self.check_every_stage()
        self.check_sharded_before_it_is_cut()
        self.check_goes_on(class_tmpdir=class_tmpdir)

    def check_sizes_on_four_ranks(self) -> None:
        # Kills: heads of queries that are not those of the rank's keys.
        model, first = alike(PlainDecoder, 12, 6, 10)
        engine = start(model, 4, 1, gradient_clipping=0.1)
        attention, mlp, rank = model.blocks[1].attention, model.blocks[1].mlp, dist.get_rank()
        assert attention.q_proj.out_features == (16, 16, 8, 8)[rank]
        assert attention.k_proj.weight.shape[0] == (8, 8, 4, 4)[rank]
        assert (attention.num_heads, attention.num_kv_heads) == ((4, 2), (2, 1))[rank > 1]
        assert mlp.fc1.bias.numel() == mlp.fc2.in_features == (3, 3, 2, 2)[rank]
        check_training(engine, first, 0.1)

    @each(name=list(UNEVEN))
    def check_trains_like_one_process(self, name: str) -> None:
        # Kills: alibi, position bias or fused layers of other heads; a norm without a rank's slice.
        model, first = alike(model_of, name, **UNEVEN[name], num_hidden_layers=1)
        engine = start(model, 2, 1, gradient_clipping=0.1)
        check_training(engine, first, 0.1)

    @each(stage=[0, 2, 3])
    def check_every_stage(self, stage: int) -> None:
        # Kills: buckets or shards of one rank's sizes on others; checks that take ranks with slices
        # of other sizes for ranks that do something else; whole weights put together in the order
        # of units, which are others where slices are smaller than the threshold.
        model, first = alike(model_of, "qwen3", **UNEVEN["qwen3"])
        # A slice of 13 x 24 elements travels, one of 12 x 24 stays.
        block = zero(stage, stage3_param_persistence_threshold=300) if stage == 3 else zero(stage)
        more = {"tensor_parallel": {"tp_overlap_comm": True, "autotp_size": 2}, **CHECKED}
        engine = start(model, 2, stage, zero_optimization=block, **more)
        for name, param in model.named_parameters():
            shards = deepspeed.zero.GatheredParameters([param])
            with shards, GatherReplacedLayerParams([param], model):
                assert torch.equal(param, first.get_parameter(name)), name
        exported = engine._consolidated_16bit_state_dict()
        for name, value in (exported or {}).items():
            assert torch.equal(value, first.state_dict()[name]), name
        check_training(engine, first)

    def check_sharded_before_it_is_cut(self) -> None:
        # Kills: slices of equal size of what zero.Init has sharded.
        model, first = alike(model_of, "phi3", **UNEVEN["phi3"])
        deepspeed.zero.Init(model, config_dict_or_path=config(2, 3))
        check_training(start(model, 2, 3), first)

    @each(
        runs=[
            ((4, 1), (4, 1), False),
            ((4, 1), (1, 3), False),
            ((4, 1), (2, 2), True),
            ((2, 3), (2, 3), False),
            ((2, 3), (4, 2), False),
            ((1, 1), (4, 1), False),
        ]
    )
    def check_goes_on(self, runs: Runs, class_tmpdir: str) -> None:
        # Kills: optimizer state or weights of another rank's heads; stacked slices taken apart as
        # if they were of one size; a universal checkpoint that forgets how many pieces there were.
        sizes = {**FIVE, "intermediate_size": 26, "num_hidden_layers": 1}
        goes_on(class_tmpdir, lambda: model_of("phi3", **sizes), *runs)
