"""AutoTP at stage 3: layers are cut over tensor-parallel ranks, then each slice is sharded."""

import copy
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.module_inject.layers import GatherReplacedLayerParams
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.runtime.sharding.model_ranks import is_model_parallel_parameter
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.verify import check_budgets, check_streams
from unit.common import DistributedTest
from unit.v1.looping import each
from unit.v1.tensor.architectures import batch_of, model_of
from unit.v1.tensor.test_autotp import (
    Runs,
    alike,
    called,
    check_training,
    config,
    goes_on,
    own_part,
    start,
    zero,
)

pytest.importorskip("transformers")

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


class TestFourRanks(DistributedTest):
    """One group of ranks for all: to start them takes longer than a check."""

    world_size = 4

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
            whole = deepspeed.zero.GatheredParameters([param])
            with whole, GatherReplacedLayerParams([param], model):
                assert torch.equal(param, first.get_parameter(key)), key
        check_training(engine, first, 0.1)

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
        check_training(engine, first, steps=1, micros=2)

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
        check_training(engine, first, steps=1, ends=False)
        del model._ds_model_slices
        with pytest.raises(DeepSpeedConfigError, match="an engine at zero_optimization.stage"):
            deepspeed.tp_model_init(model, 2, None)
        engine.destroy()

    def check_half_precision(self) -> None:
        # Kills: shards in another precision than their slices' ranks.
        model, first = alike(model_of, "llama", num_hidden_layers=1)
        engine = start(model, 2, 3, bf16={"enabled": True})
        loss = called(engine, own_part(engine, 4, 0))
        losses = [torch.zeros(()) for _ in range(4)]
        dist.all_gather(losses, loss.detach().float())
        right = called(first, batch_of(4, 0))
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
            check_training(start(model, 2, 3, **keys), first)

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
