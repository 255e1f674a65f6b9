"""Connections to the store in which ranks meet."""

from pathlib import Path

import torch.distributed as torch_dist

from deepspeed.comm.process_groups import _connected_again


def test_a_store_of_old_torch_is_connected_to_again() -> None:
    """Kills: a second connection without the first's prefixes, which finds an earlier attempt's."""
    server = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def attempt(number: int) -> torch_dist.Store:
        return torch_dist.PrefixStore("group", torch_dist.PrefixStore(f"attempt{number}", server))

    ranks = [_connected_again(attempt(number)) for number in (1, 1, 2, 2)]
    ranks[0].set("key", "of the first attempt")
    assert ranks[1].get("key") == b"of the first attempt"
    assert [rank.check(["key"]) for rank in ranks] == [True, True, False, False]
    assert not attempt(1).check(["key"])


def test_a_store_without_a_server_stays_as_it_is(tmp_path: Path) -> None:
    file = torch_dist.PrefixStore("group", torch_dist.FileStore(str(tmp_path / "store"), 1))
    assert _connected_again(file) is file
