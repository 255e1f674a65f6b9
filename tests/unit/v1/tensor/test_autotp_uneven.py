"""AutoTP with heads and widths that ranks do not divide: the first have one more."""

from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.checkpoint.resharding.tensor_parallel import Share, SlicePatterns
from deepspeed.module_inject.layers import GatherReplacedLayerParams
from unit.common import DistributedTest
from unit.v1.looping import each
from unit.v1.tensor.architectures import PlainDecoder, model_of
from unit.v1.tensor.test_autotp import Runs, alike, check_training, config, goes_on, start, zero
from unit.v1.tensor.test_autotp_stage3 import CHECKED

pytest.importorskip("transformers")

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


def test_the_first_ranks_have_one_more() -> None:
    # Kills: sizes that upstream's slices of the same weights do not have.
    def sizes(pieces: int, width: int, size: int) -> list[int]:
        return [Share.of_rank(pieces, rank, size).of(width) for rank in range(size)]

    assert sizes(10, 10, 4) == [3, 3, 2, 2]
    assert sizes(6, 96, 4) == [32, 32, 16, 16] and sizes(6, 48, 4) == [16, 16, 8, 8]


def test_slices_that_do_not_fit_their_pieces_are_named() -> None:
    stacked = {"patterns": ["w"], "shape": ((4, 2), -1), "partition_dim": 0}
    info = {
        "parameter_with_sub_params": [stacked],
        "parameter_with_pieces": [{"patterns": ["w"], "pieces": 4}],
    }
    with pytest.raises(CheckpointError, match=r"sizes \[4, 2\], of which 2 ranks .* 4 pieces"):
        SlicePatterns(info).merged("w", [torch.zeros(3, 1), torch.zeros(3, 1)])
    assert SlicePatterns(info).unmatched(["v"]) == ["w", "w"]


class TestFourRanks(DistributedTest):
    """One group of ranks for all: to start them takes longer than a check."""

    world_size = 4

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
        check_training(engine, first, 0.1, steps=1)

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
            whole = deepspeed.zero.GatheredParameters([param])
            with whole, GatherReplacedLayerParams([param], model):
                assert torch.equal(param, first.get_parameter(name)), name
        exported = engine._consolidated_16bit_state_dict()
        for name, value in (exported or {}).items():
            assert torch.equal(value, first.state_dict()[name]), name
        check_training(engine, first, steps=1)

    def check_sharded_before_it_is_cut(self) -> None:
        # Kills: slices of equal size of what zero.Init has sharded.
        model, first = alike(model_of, "phi3", **UNEVEN["phi3"])
        deepspeed.zero.Init(model, config_dict_or_path=config(2, 3))
        check_training(start(model, 2, 3), first, steps=1)

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
