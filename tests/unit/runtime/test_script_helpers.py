"""What scripts import of `deepspeed.runtime.utils` and the like; numbers are upstream's."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint import (
    UNIVERSAL_CHECKPOINT_INFO,
    DeepSpeedCheckpoint,
    ZeROCheckpoint,
    get_model_3d_descriptor,
    model_3d_desc,
)
from deepspeed.checkpoint.files import CheckpointError
from deepspeed.git_version_info import torch_info
from deepspeed.runtime import utils
from deepspeed.runtime.zero import offload_states
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.utils.torch import register_grad_hook, required_torch_version
from unit.common import DistributedTest
from unit.models import config_of

NAN, INF = float("nan"), float("inf")
ADAM = {"type": "Adam", "params": {"lr": 0.1}}


def test_norms() -> None:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.tensor([3.0, 4.0])
    assert utils.get_global_norm([3.0, 4.0]) == 5.0
    assert utils.get_flattened_grad_norm([param]) == 5.0
    assert utils.get_weight_norm(param) == pytest.approx(2**0.5)
    tensors = [torch.tensor([3.0]), torch.tensor([-4.0])]
    assert utils.get_global_norm_of_tensors(tensors) == 5.0
    assert utils.get_global_norm_of_tensors(tensors, norm_type=INF) == 4.0
    assert utils.clip_tensors_by_global_norm(tensors) == 5.0
    assert torch.allclose(torch.cat(tensors), torch.tensor([0.6, -0.8]))
    param.grad[1] = INF
    check = utils.CheckOverflow([[param]])
    assert check.has_overflow_serial([param]) and check.check()
    assert check.check_using_norm([1.0, -1]) and not check.check_using_norm([1.0])


def test_tensors_and_structures(tmp_path: Path) -> None:
    values = torch.tensor([1.0, NAN, INF, -INF])
    utils.mask_nan_or_inf_with_val_inplace(values)
    assert values.tolist() == [1.0, -1.0, -1.0, -1.0]
    aligned = utils.align_dense_tensors([torch.ones(3), torch.ones(2)], 4)
    assert [part.numel() for part in aligned] == [3, 2, 3]
    assert utils.get_tensor_bytes([torch.ones(3), (torch.ones(2), 5)]) == 20
    assert utils.compare_tensors_in_structures([torch.ones(2), 1], [torch.ones(2), 1])
    assert not utils.compare_tensors_in_structures({"a": torch.ones(2)}, {"a": torch.zeros(2)})
    assert utils.maybe_loss_for_backward(torch.ones(1, requires_grad=True) * 2)
    assert not utils.maybe_loss_for_backward(torch.ones(2, requires_grad=True) * 2)
    full, empty = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(0))
    full, empty = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(0))
    assert utils.filter_empty_parameters([full, empty]) == [full]
    (kept,) = utils.filter_empty_parameters([{"params": [full, empty], "lr": 1}])
    assert kept == {"params": [full], "lr": 1}
    assert utils.call_to_str("f", 1, "a", x=2) == "f(1, 'a', x=2)"
    with pytest.raises(RuntimeError, match="one unique item"):
        utils.get_only_unique_item([2, 3])
    utils.ensure_directory_exists(tmp_path / "a" / "b.txt")
    (tmp_path / "a" / "b.txt").write_text("12345")
    assert utils.get_checkpoint_folder_size(str(tmp_path), "a") == 5
    assert zero_utils.is_zero_supported_optimizer(torch.optim.AdamW([full]))
    assert not zero_utils.is_zero_supported_optimizer(torch.optim.LBFGS([full]))
    doubled = zero_utils.apply_to_tensors_only(lambda t: 2 * t, {"a": [full.data, "text"]})
    assert torch.equal(doubled["a"][0], 2 * full.data) and doubled["a"][1] == "text"


def test_torch() -> None:
    assert required_torch_version(min_version=2.6)
    assert not required_torch_version(max_version="1.13")
    assert required_torch_version(min_version="2.6", max_version="99.0")
    with pytest.raises(ValueError, match="give min_version"):
        required_torch_version()
    assert torch.__version__.startswith(torch_info["version"]) and "bf16_support" in torch_info
    param, seen = nn.Parameter(torch.ones(2)), []
    register_grad_hook(param, lambda p: seen.append(p.grad.clone()))
    (3 * param).sum().backward()
    assert torch.equal(seen[0], torch.tensor([3.0, 3.0]))
    # States move.
    optimizer = torch.optim.Adam([param])
    optimizer.step()
    offload_states.offload_adam_states(optimizer, "meta")
    assert {t.device.type for t in optimizer.state[param].values() if t.dim()} == {"meta"}
    assert optimizer.state[param]["step"].device.type == "cpu"


@pytest.mark.parametrize("ins, outs", [(1, 1), (2, 3), (5, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_tiles_are_the_layer(ins: int, outs: int, bias: bool) -> None:
    # Kills: a bias per tile, tiles in another order, a remainder on another tile than upstream's.
    whole = nn.Linear(5, 7, bias=bias)
    splits = {"in_splits": ins, "out_splits": outs, "init_linear": whole}
    tiled = deepspeed.zero.TiledLinear(5, 7, bias=bias, **splits)
    x = torch.randn(3, 5)
    assert torch.allclose(tiled(x), whole(x), atol=1e-6)
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in whole.parameters())
    if (ins, outs, bias) == (2, 3, True):
        shapes = [(name, tuple(p.shape)) for name, p in tiled.named_parameters()][:3]
        assert shapes[0] == ("linears.0.0.weight", (3, 3))
        assert shapes[1:] == [("linears.0.1.weight", (3, 2)), ("linears.0.1.bias", (3,))]
    with pytest.raises(RuntimeError, match="6 in_splits of 5 features"):
        deepspeed.zero.TiledLinear(5, 7, in_splits=6)


def test_tiles_that_return_their_bias() -> None:
    class Apart(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]  # Megatron's way
            return nn.functional.linear(x, self.weight), self.bias

    tiled = deepspeed.zero.TiledLinearReturnBias(4, 6, in_splits=2, out_splits=3, linear_cls=Apart)
    whole = deepspeed.zero.TiledLinear(4, 6, in_splits=2, out_splits=3)
    whole.load_state_dict(tiled.state_dict())
    x = torch.randn(2, 4)
    output, bias = tiled(x)
    assert torch.allclose(output + bias, whole(x), atol=1e-6)


def test_numbers_of_ranks() -> None:
    found = model_3d_desc(2, 2, 1)
    assert found.get_desc() == "PP,TP,DP = (2, 2, 1)" and found.world_size() == 4
    assert found.is_valid(1, 1, 0) == (True, [])
    assert found.is_valid(0, 0, 1) == (False, ["DP indexing error: index 1 >= degree 1"])
    expansion = "Expansion reshape not supported - TP: 2 ---> 4"
    assert found.can_reshape(model_3d_desc(2, 4, 1))[1] == [expansion]
    with pytest.raises(ValueError, match=expansion):
        found.reshape(model_3d_desc(2, 4, 1))
    with pytest.raises(ValueError, match="PP: 3 ---> 2 is uneven"):
        model_3d_desc(3, 1, 1).reshape(model_3d_desc(2, 1, 1))
    assert UNIVERSAL_CHECKPOINT_INFO == "universal_checkpoint_info"


Numbers = tuple[int, int, int]


@pytest.mark.parametrize(
    ("old", "new", "dealt"),
    [
        # As 0.19.6 deals them.
        ((2, 2, 2), (1, 1, 1), [[[0, 4, 1, 5, 2, 6, 3, 7]]]),
        ((2, 2, 2), (2, 2, 1), [[[0, 4], [1, 5], [2, 6], [3, 7]]]),
        ((2, 2, 2), (1, 2, 2), [[[0, 4], [1, 5]], [[2, 6], [3, 7]]]),
        ((2, 2, 2), (2, 1, 2), [[[0, 4], [2, 6]], [[1, 5], [3, 7]]]),
        ((2, 4, 1), (1, 2, 1), [[[0, 1, 4, 5], [2, 3, 6, 7]]]),
        ((1, 1, 4), (1, 1, 2), [[[0, 1]], [[2, 3]]]),
    ],
)
def test_ranks_are_dealt_to_fewer(old: Numbers, new: Numbers, dealt: list[list[list[int]]]) -> None:
    # Kills: ranks in another order than files are numbered.
    found = model_3d_desc(*old).reshape(model_3d_desc(*new), verbose=True)
    for places, own in zip(found, dealt, strict=True):
        wanted = iter(own)
        for stage in range(new[0]):
            for rank in range(new[1]):
                assert places.get_data(pp_index=stage, tp_index=rank) == next(wanted)
        assert places.get_data() == [number for numbers in own for number in numbers]
        with pytest.raises(ValueError, match=r"\(9, 0\) are not among"):
            places.get_data(9, 0)


class TestOnRanks(DistributedTest):
    world_size = 2

    def test_partitioned_tensor(self) -> None:
        # Kills: parts in another order, an odd element lost.
        whole, group = torch.arange(15.0).view(3, 5), dist.get_world_group()
        parted = utils.PartitionedTensor(whole, group)
        assert parted.local_size() == torch.Size([8 - dist.get_rank()])
        assert parted.to_meta().tolist() == [2, 3, 5, 2, dist.get_rank(), 0, 8, 15]
        other = utils.PartitionedTensor.from_meta(parted.to_meta(), parted.data(), group)
        assert torch.equal(parted.full(), whole) and torch.equal(other.full(), whole)
        assert other.full_size() == [3, 5]

    def test_overflow_anywhere(self) -> None:
        # Kills: an answer of this rank alone, and ranks that are asked where they should not be.
        param = nn.Parameter(torch.ones(2))
        param.grad = torch.tensor([1.0, INF if dist.get_rank() else 1.0])
        check = utils.CheckOverflow([[param]])
        assert check.check()
        norm = -1.0 if dist.get_rank() else 1.0
        assert check.check_using_norm([norm])
        assert check.check_using_norm([norm], reduce_overflow=False) == bool(dist.get_rank())

    def test_files_of_a_folder(self, tmpdir: Any) -> None:
        config = config_of(2, 1, optimizer=ADAM)
        engine, *_ = deepspeed.initialize(model=nn.Linear(3, 3), config=config)
        engine.save_checkpoint(str(tmpdir), tag="t")
        folder = str(tmpdir.join("t"))
        assert get_model_3d_descriptor(folder).get_desc() == "PP,TP,DP = (1, 1, 2)"
        found = ZeROCheckpoint(folder)
        assert found.get_src_world_size() == 2 and found.get_src_dp_degree() == 2
        (path,) = found.get_files_for_rank(0, 0, 1)
        assert path.endswith("zero_pp_rank_1_mp_rank_00_optim_states.pt")
        state = found.get_state_for_rank(0, 0, 1, keys_to_ignore=["ds_version"])
        assert "optimizer_state_dict" in state and "ds_version" not in state
        with pytest.raises(ValueError, match="DP indexing error: index 2 >= degree 2"):
            found.get_files_for_rank(0, 0, 2)
        with pytest.raises(RuntimeError, match="no pipeline saved it"):
            DeepSpeedCheckpoint(folder).get_embedding_files(0)
        dist.barrier()
        if dist.get_rank() == 0:
            # Kills: counting the files: a rank of another run's is there, one of this run's is not.
            os.rename(path, path.replace("mp_rank_00", "mp_rank_02"))
            missing = r"= \(1, 1, 2\), .* ranks \[\(1, 0\), \(1, 2\)\] are missing"
            with pytest.raises(CheckpointError, match=missing):
                get_model_3d_descriptor(folder)
            os.remove(os.path.join(folder, "mp_rank_00_model_states.pt"))
            with pytest.raises(CheckpointError, match="mp_rank_00_model_states.pt"):
                get_model_3d_descriptor(folder)

    def test_getters_are_upstreams(self) -> None:
        # Kills: a getter that answers for another key.
        config = config_of(3, 1, 1, "bf16", optimizer=ADAM, zero_force_ds_cpu_optimizer=True)
        model = nn.Linear(3, 3)
        engine, *_ = deepspeed.initialize(model=model, config=config)
        layers = "linear.Linear conv.Conv1d conv.Conv2d conv.Conv3d"
        layers = [f"torch.nn.modules.{name}" for name in layers.split()]
        aio = {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1}
        scaling = {"init_scale": 65536, "scale_window": 1000, "delayed_shift": 2}
        on = "checkpoint_serialization_enabled zero_force_ds_cpu_optimizer "
        on += "is_first_weights_partition_group zero_multi_rank_bucket_allreduce"
        off = "amp_enabled amp_params bf16_optimizer_states checkpoint_writer_enabled "
        off += "compile_autotp curriculum_params_legacy data_efficiency_enabled pld_enabled "
        off += "optimizer_legacy_fusion super_offload zero_nvme_offload_optimizer"
        wanted = {
            **dict.fromkeys([*off.split(), "zero_use_cpu_optimizer"], False),
            **dict.fromkeys(("log_level", "zero_offload_param", "zeropp_loco_param"), None),
            **dict.fromkeys(on.split(), True),
            **dict.fromkeys(("zero_max_live_parameters", "zero_sub_group_size"), 1_000_000_000),
            "aio_config": {**aio, "single_submit": False, "overlap_events": True, "use_gds": False},
            "autotp_size": 0,
            "cpuadam_cores_perc": 0.9,
            "dynamic_loss_scale_args": {**scaling, "consecutive_hysteresis": False, "min_scale": 1},
            "eigenvalue_layer_name": "bert.encoder.layer",
            "eigenvalue_max_iter": 100,
            "initial_dynamic_scale": 65536,
            "mics_shard_size": -1,
            "torch_autocast_lower_precision_safe_modules": layers,
            "zero_hpz_partition_size": 1,
            "zero_param_persistence_threshold": 100_000,
            "zero_partial_offload": 1.0,
            "zero_prefetch_bucket_size": 50_000_000,
        }
        assert {name: getattr(engine, name)() for name in wanted} == wanted
        assert engine.get_data_parallel_rank() == dist.get_rank()
        assert engine.sparse_tensor_module_names == set()
        # What an evaluation has gathered is let go.
        with torch.no_grad():
            engine(torch.ones(1, 3, dtype=torch.bfloat16))
        engine.empty_partition_cache()
        with deepspeed.zero.unwrap_model_for_generation(engine) as whole:
            assert whole is model and whole.weight.shape == (3, 3)

    def test_modules_outside_of_init(self) -> None:
        parts, is_sharded = deepspeed.runtime.zero.partition_parameters, zero_utils.is_zero_param
        with deepspeed.zero.Init() as init:
            sharded = nn.Linear(3, 3)
            parts.shutdown_init_context()
            plain = nn.Linear(3, 3)
            parts.restore_init_context()
            again = nn.Linear(3, 3)
        assert init.num_partitions == 2 and init.get_partition_rank() == dist.get_rank()
        assert is_sharded(sharded.weight) and is_sharded(again.weight)
        assert not is_sharded(plain.weight)
        with deepspeed.zero.GatheredParameters([sharded.weight, plain.weight]):
            tiled = deepspeed.zero.TiledLinear(3, 3, in_splits=3, init_linear=sharded)
            tiles = torch.cat([tile.weight for tile in tiled.linears[0]], 1)
            assert torch.equal(tiles, sharded.weight)
