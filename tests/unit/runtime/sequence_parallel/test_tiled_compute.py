"""Computing in tiles, and the loader that gives every rank its piece of every rank's batches."""

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from unit.common import DistributedTest
from unit.models import config_of
from unit.models import tokens as drawn_tokens
from unit.one_process import OneProcess, assert_gradients, of_all_ranks
from unit.v1.looping import each

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator.sim_accelerator import simulate
from deepspeed.runtime.sequence_parallel.ulysses_sp import (
    AutogradComputeMLP,
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledLoss,
    TiledMLP,
    UlyssesSPDataLoaderAdapter,
    sequence_tiled_compute,
)
from deepspeed.sequence.cross_entropy import IGNORE_INDEX

WIDTH, VOCABULARY, ROWS, LENGTH = 8, 11, 2, 13
LR = 0.1
# Exact tests have small integers, whose sums are exact in any order. Elsewhere sums over positions
# are grouped by tile: a few roundings of fp32, 1e-7 each, of a gradient's norm.
TOLERANCE = 2e-6


class Mlp(nn.Module):
    """Feed-forward layer whose forward is, or isn't, tiled."""

    def __init__(self, tiles: int, width: int = WIDTH, times: int = 4) -> None:
        super().__init__()
        self.tiles = tiles
        self.up, self.down = nn.Linear(width, times * width), nn.Linear(times * width, width)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tiles == 1:
            return self.whole(x)
        return TiledMLP.apply(Mlp.whole, self, x, self.tiles, [self.up.weight])


def mean_loss(head: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(x).float(), y)


class Net(nn.Module):
    """Embedding, layers, and a head that shares the embedding's weight."""

    def __init__(self, tiles: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tiles = tiles
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Mlp(tiles) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        if self.tiles == 1:
            return mean_loss(self.head, hidden.flatten(0, 1), y.flatten())
        return TiledFusedLogitsLoss.apply(mean_loss, self.head, hidden, y, None, self.tiles)


def tokens(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, s] twice; whole tiles of labels are ignored."""
    x, y = drawn_tokens(index, VOCABULARY, 2, ROWS, LENGTH)
    y[0, : LENGTH - 2] = IGNORE_INDEX
    return x, y


def whole_numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape).double()


def make_exact(module: nn.Module) -> nn.Module:
    module.double()
    for param in module.parameters():
        param.data = whole_numbers(*param.shape)
    return module


class TestEqualsTheWhole:
    @pytest.mark.parametrize("tiles", (2, 5, LENGTH))
    def test_mlp(self, tiles: int) -> None:
        # Kills: positions left out or doubled at the borders of uneven tiles; a hook per tile, on
        # which a reduction would hang that misses the tiles still to come.
        torch.manual_seed(1)
        layer = make_exact(Mlp(1))
        x = whole_numbers(ROWS, LENGTH, WIDTH).requires_grad_()
        weights = whole_numbers(ROWS, LENGTH, WIDTH)
        wanted = layer(x)
        (wanted * weights).sum().backward()
        grads = [x.grad, *(param.grad for param in layer.parameters())]
        x.grad = None
        layer.zero_grad(set_to_none=True)
        fired: list[torch.Tensor] = []
        for param in layer.parameters():
            param.register_post_accumulate_grad_hook(fired.append)
        layer.tiles = tiles
        found = layer(x)
        (found * weights).sum().backward()
        assert torch.equal(found, wanted)
        for wanted_grad, tensor in zip(grads, (x, *layer.parameters()), strict=True):
            assert torch.equal(tensor.grad, wanted_grad)
        assert sorted(map(id, fired)) == sorted(map(id, layer.parameters()))

    @pytest.mark.parametrize("whole", (False, True))
    def test_any_function(self, whole: bool) -> None:
        # Kills: gradients for the named tensor only; a None that is cut; arguments mixed up; tiles
        # of another size weighing as much as the others.
        torch.manual_seed(2)
        x, z = (whole_numbers(ROWS, 6, 4).requires_grad_() for _ in range(2))
        factor = whole_numbers(4).requires_grad_()

        def function(*, x: Any, z: Any, absent: Any, function: Any, power: int) -> Any:
            assert absent is None
            result = (x * z * function) ** power
            return result.mean() if whole else result

        wanted = function(x=x, z=z, absent=None, function=factor, power=2)
        grads = torch.autograd.grad(wanted.sum(), (x, z, factor))
        cut, passed = {"x": x, "z": z, "absent": None}, {"function": factor, "power": 2}
        found = sequence_tiled_compute(function, 6, 3, cut, passed, "x")
        names, values = (list(cut), list(passed), "x", []), (*cut.values(), *passed.values())
        called = SequenceTiledCompute.apply(function, 6, 3, *names, 1, "mean", *values)
        assert torch.equal(found, called)
        of_tiles = torch.autograd.grad(found.sum(), (x, z, factor))
        for one, other in zip((found, *of_tiles), (wanted, *grads), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
        # A mean over uneven tiles.
        x = torch.arange(5.0)[None].requires_grad_()
        loss = sequence_tiled_compute(lambda x: x.mean(), 5, 2, {"x": x}, {}, "x")
        loss.backward()
        assert loss.item() == 2.0 and torch.equal(x.grad, torch.full((1, 5), 0.2))

    @pytest.mark.parametrize("how", ("mean", "sum", "mask"))
    def test_loss(self, how: str) -> None:
        # Kills: a mean of means, in which a tile of one label weighs as much as one of ten; NaN
        # from a tile without labels; a mask that the function doesn't get.
        torch.manual_seed(3)
        head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        x, y = torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True), tokens(0)[1]
        mask = (y != IGNORE_INDEX).float() if how == "mask" else None

        def loss_of(head: nn.Module, x: torch.Tensor, y: torch.Tensor, *mask: Any) -> torch.Tensor:
            if how != "mask":
                return F.cross_entropy(head(x), y, reduction=how)
            return (F.cross_entropy(head(x), y, reduction="none") * mask[0]).sum() / mask[0].sum()

        extra = () if mask is None else (mask.flatten(),)
        wanted = loss_of(head, x.flatten(0, 1), y.flatten(), *extra)
        grads = torch.autograd.grad(wanted, (x, head.weight))
        reduction = "sum" if how == "sum" else "mean"
        found = TiledFusedLogitsLoss.apply(loss_of, head, x, y, mask, 6, [head.weight], reduction)
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=0)
        for grad, of_whole in zip(torch.autograd.grad(found, (x, head.weight)), grads, strict=True):
            assert (grad - of_whole).norm() <= TOLERANCE * of_whole.norm()

    def test_loss_of_logits_and_one_tile(self) -> None:
        # Kills: a mean of means; NaN from a tile without labels; a layer whose inside is kept.
        torch.manual_seed(3)
        logits, y = torch.randn(ROWS, LENGTH, VOCABULARY, requires_grad=True), tokens(0)[1]
        y[:, :6] = IGNORE_INDEX
        seen: list[tuple[int, ...]] = []

        def loss_of(*, logits: Any, labels: None, vocab_size: int, shift_labels: Any) -> Any:
            seen.append(tuple(logits.shape))
            flat = logits.float().view(-1, vocab_size)
            return F.cross_entropy(flat, shift_labels.reshape(-1), ignore_index=IGNORE_INDEX)

        wanted = loss_of(logits=logits, labels=None, vocab_size=VOCABULARY, shift_labels=y)
        (grad,) = torch.autograd.grad(wanted, logits)
        found = TiledLoss.apply(loss_of, logits, VOCABULARY, y, 4)
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=0)
        (of_tiles,) = torch.autograd.grad(found, logits)
        assert (of_tiles - grad).norm() <= TOLERANCE * grad.norm()
        assert seen[1:5] == [(ROWS, n, VOCABULARY) for n in (4, 3, 3, 3)]
        with pytest.raises(ValueError, match=r"must be \[b, s, v\] and \[b, s\]"):
            TiledLoss.apply(loss_of, logits, VOCABULARY, y[0], 2)

        ran: list[bool] = []

        def layer(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
            ran.append(True)
            return mlp.whole(x)

        mlp, x = Mlp(1), torch.randn(3, WIDTH, requires_grad=True)
        again = AutogradComputeMLP.apply(layer, mlp, x)
        assert torch.equal(again, mlp.whole(x)) and len(ran) == 1
        inputs = (x, *mlp.parameters())
        grads = torch.autograd.grad(again.sum(), inputs)
        assert all(map(torch.equal, grads, torch.autograd.grad(mlp.whole(x).sum(), inputs)))
        assert len(ran) == 2

    def test_dropout_falls_alike_in_recomputation(self) -> None:
        # Kills: a backward through other units than the forward's.
        x = torch.ones(1, 64, 4, requires_grad=True)
        out = TiledMLP.apply(lambda _, x: F.dropout(x, 0.5), None, x, 4)
        out.sum().backward()
        assert torch.equal(out, x.grad) and 0 < (out == 0).sum() < out.numel()


class TestRefusals:
    def test_arguments(self) -> None:
        x, y = torch.ones(1, 4, 2), torch.ones(1, 4).long()

        def tiled(
            shards: int = 2, key: str = "x", how: str = "sum", length: int = 4, params: Any = None
        ) -> Any:
            function, cut = lambda x: x.sum(), {"x": x}
            return sequence_tiled_compute(function, length, shards, cut, {}, key, params, 1, how)

        for shards in (0, 5):
            with pytest.raises(ValueError, match="choose shards from 1 to 4"):
                TiledMLP.apply(lambda _, x: x, None, x, shards)
        for given, error, message in (
            ({"length": 3}, ValueError, "has not 3 positions in dimension 1"),
            ({"key": "z"}, ValueError, "'z' is not in kwargs_to_shard"),
            ({"how": "max"}, ValueError, "output_reduction 'max': choose one of"),
            ({"params": ["x"]}, TypeError, "compute_params holds a str"),
        ):
            with pytest.raises(error, match=message):
                tiled(**given)
        with pytest.raises(ValueError, match="one value for each key"):
            SequenceTiledCompute.apply(tiled, 4, 2, ["x"], ["z"], "x", None, 1, "sum", x)
        with pytest.raises(ValueError, match="must be"):
            TiledFusedLogitsLoss.apply(mean_loss, None, x, y[:, :3], None, 2)
        with pytest.raises(ValueError, match="is not"):
            TiledMLP.apply(lambda _, x: x, None, x[0, 0], 1)


class TestInAnEngine(DistributedTest):
    world_size = 2

    @each(stage=(0, 1, 2, 3), bucket=(20, 10**6))
    def test_trains_as_the_whole(self, stage: int, bucket: int) -> None:
        # Kills: a bucket sent after the first tile; a gradient per tile, of which the ledger tells.
        accumulation, world, rank = 2, dist.get_world_size(), dist.get_rank()
        one, model = OneProcess(Net(1), LR), Net(4)
        zero = {"reduce_bucket_size": bucket, "stage3_param_persistence_threshold": 0}
        config = config_of(stage, ROWS, accumulation, zero_optimization=zero)
        config["verify"] = {"ledger": True, "collectives": True}
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for step in range(2):
            batches = of_all_ranks(lambda n, of: tokens(n * world + of), step, accumulation)
            one.backward(batches)
            for micro, batch in enumerate(batches[rank::world]):
                loss = engine(*batch)
                torch.testing.assert_close(loss, one.model(*batch), rtol=TOLERANCE, atol=0)
                engine.backward(loss)
                if micro == accumulation - 1:
                    assert_gradients(model, one.model, TOLERANCE)
                engine.step()
            one.optimizer.step()
        engine.destroy()


def peak(what: str, length: int, tiles: int) -> int:
    """Most bytes that forward and backward hold beside weights and inputs."""
    width, vocabulary = 32, 1024
    gc.collect()
    with simulate() as device:
        layer, head = Mlp(tiles, width, 8), nn.Linear(width, vocabulary, bias=False)
        x = torch.randn(1, length, width, requires_grad=True)
        y = torch.randint(vocabulary, (1, length))
        device.synchronize()
        before = device.memory_allocated()
        device.reset_peak_memory_stats()
        if what == "mlp":
            loss = layer(x).sum()
        elif tiles == 1:
            loss = mean_loss(head, x.flatten(0, 1), y.flatten())
        else:
            loss = TiledFusedLogitsLoss.apply(mean_loss, head, x, y, None, tiles)
        loss.backward()
        device.synchronize()
        return int(device.max_memory_allocated()) - before


@pytest.mark.parametrize("what", ("mlp", "loss"))
def test_a_sequence_eight_times_as_long_at_the_same_peak(what: str) -> None:
    # Kills: intermediate results of all tiles kept for backward, or logits kept at all.
    assert peak(what, 8 * 128, 16) <= peak(what, 128, 1)
    assert peak(what, 8 * 128, 1) >= 7 * peak(what, 128, 1)


def batch_of(rank: int, length: int, **more: Any) -> dict[str, Any]:
    tokens = torch.arange(2 * length).view(2, length) + 100 * rank
    positions = torch.arange(length).repeat(2, 1)
    return {"input_ids": tokens, "position_ids": positions, "labels": tokens.clone(), **more}


class TestAdapter(DistributedTest):
    world_size = 2

    def adapter(self, batches: list[Any]) -> UlyssesSPDataLoaderAdapter:
        group, cpu = dist.get_world_group(), torch.device("cpu")
        return UlyssesSPDataLoaderAdapter(batches, dist.get_rank(), group, 2, cpu)

    def test_pieces(self) -> None:
        # Kills: a label lost at the border of two ranks, batches of one rank only or in different
        # orders, the lengths of the own batch used for all, a second epoch that is empty.
        rank = dist.get_rank()
        own = [
            batch_of(rank, 8 + 4 * rank, name=f"of {rank}", weight=torch.ones(2)),
            batch_of(rank, 6, attention_mask=torch.ones(2, 6), shift_labels=torch.zeros(2, 6)),
        ]
        adapter = self.adapter(own)
        adapter.set_epoch(1)
        for _ in range(2):
            found = list(adapter)
            assert len(found) == len(adapter) == 4
            for index, piece in enumerate(found):
                source, second = index % 2, index >= 2
                length = 6 if second else 8 + 4 * source
                half = slice(rank * length // 2, (rank + 1) * length // 2)
                whole = batch_of(source, length)
                assert "labels" not in piece
                for key in ("input_ids", "position_ids"):
                    assert torch.equal(piece[key], whole[key][:, half])
                shifted = whole["labels"].roll(-1, dims=1)
                shifted[:, -1] = -100
                wanted = torch.zeros(2, 3) if second else shifted[:, half]
                assert torch.equal(piece["shift_labels"], wanted)
                if second:
                    assert piece["attention_mask"].shape == (2, 3)
                else:
                    assert piece["name"] == f"of {source}" and piece["weight"].shape == (2,)

    def test_the_end_is_the_last_piece(self) -> None:
        # Kills: accumulation that accelerate ends with each piece of the loader's last batch.
        class Loader:
            end_of_dataloader = False

            def __iter__(self) -> Any:
                for index in range(2):
                    self.end_of_dataloader = index == 1
                    yield batch_of(dist.get_rank(), 8)

        loader: Any = Loader()
        said = [loader.end_of_dataloader for _ in self.adapter(loader)]
        assert said == [False, False, False, True]

    def test_all_ranks_refuse(self) -> None:
        # Kills: one rank that raises while the other waits for it.
        good, rank = batch_of(0, 8), dist.get_rank()
        cases: list[tuple[Any, str]] = [
            ({"input_ids": good["input_ids"]}, "has no position_ids"),
            (batch_of(0, 7), "has 7 positions, which 2 ranks do not divide"),
            (batch_of(0, 8, attention_mask=torch.ones(2, 1, 8, 8)), "cannot be cut"),
            ([1, 2], "is a list"),
            (None, "ended before the others"),
        ]
        for bad, message in cases:
            own = good if rank == 0 else bad
            with pytest.raises(ValueError, match=f"the batch of rank 1 of .* {message}"):
                list(self.adapter([own] if own is not None else []))
