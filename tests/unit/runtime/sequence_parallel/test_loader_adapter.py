"""Every rank of a group gets its piece of every rank's batches, in one order."""

from typing import Any

import pytest
import torch
from unit.common import DistributedTest

from deepspeed import comm as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter


def batch_of(rank: int, length: int, **more: Any) -> dict[str, Any]:
    tokens = torch.arange(2 * length).view(2, length) + 100 * rank
    positions = torch.arange(length).repeat(2, 1)
    return {"input_ids": tokens, "position_ids": positions, "labels": tokens.clone(), **more}


class TestAdapter(DistributedTest):
    world_size = 2

    def adapter(self, batches: list[Any]) -> UlyssesSPDataLoaderAdapter:
        return UlyssesSPDataLoaderAdapter(
            batches, dist.get_rank(), dist.get_world_group(), 2, torch.device("cpu")
        )

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
