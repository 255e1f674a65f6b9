"""Which piece of memory is used again."""

import torch

from deepspeed.runtime.zero.gathering.memory_pool import MemoryPool, PoolBuffer

CPU = torch.device("cpu")


def take(
    pool: MemoryPool, numel: int, owner: str, dtype: torch.dtype = torch.float32
) -> PoolBuffer:
    return pool.take(numel, dtype, CPU, owner)


def test_the_smallest_that_fits_and_of_those_the_own_one() -> None:
    # Kills: a large buffer for a small need, which the next large one then lacks; views that are
    # made anew because units swap memory; another dtype's memory; memory that two have.
    pool = MemoryPool(has_streams=False)
    large, first, second = take(pool, 10, "large"), take(pool, 4, "a"), take(pool, 4, "b")
    for buffer in (large, first, second):
        pool.give_back(buffer)
    assert take(pool, 3, "a") is first
    assert take(pool, 3, "new") is second
    assert take(pool, 3, "a") is large  # its own one is in use
    assert take(pool, 1, "c").tensor.numel() == 1
    pool.give_back(first)
    pool.give_back(second)
    assert take(pool, 4, "other", torch.bfloat16) not in (first, second)
    assert take(pool, 4, "newer") is second  # given back last
    assert pool.num_bytes == (10 + 4 + 4 + 1) * 4 + 4 * 2
