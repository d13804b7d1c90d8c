"""KV pages as numbers: which blocks are free, and how often each used one is shared. Knows no tensor."""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """Reference-counted blocks 0 … `num_blocks` − 1 of `page_size` token slots each.

    A block is free (count 0) or used by as many holders as its count. `release` gives back one hold of each block.
    """

    def __init__(self, num_blocks: int, page_size: int) -> None:
        """Raises ValueError when either size is below 1."""
        if num_blocks < 1 or page_size < 1:
            raise ValueError(f"a block pool needs num_blocks >= 1 and page_size >= 1, got {num_blocks} and {page_size}")
        self.num_blocks = num_blocks
        self.page_size = page_size
        self._counts = [0] * num_blocks
        # A stack: the block released last is used next, while its memory may still be in a cache.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of blocks nobody holds."""
        return len(self._free)

    def blocks_for(self, slots: int) -> int:
        """Number of blocks that hold `slots` token slots."""
        return -(-slots // self.page_size)

    def can_allocate(self, n: int) -> bool:
        """Whether `n` blocks are free."""
        return n <= len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Take `n` free blocks, each with one hold. Ask `can_allocate` first."""
        assert n >= 0, f"cannot allocate {n} blocks"
        assert self.can_allocate(n), f"{n} blocks wanted, {self.free} of {self.num_blocks} free"
        blocks = [self._free.pop() for _ in range(n)]
        for block in blocks:
            self._counts[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add one hold to each of these used blocks."""
        for block in blocks:
            assert self._counts[block] > 0, f"block {block} is free and cannot be shared"
            self._counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one hold of each block; a block whose last hold goes becomes free."""
        for block in blocks:
            assert self._counts[block] > 0, f"block {block} is released twice"
            self._counts[block] -= 1
            if self._counts[block] == 0:
                self._free.append(block)

    def check_idle(self) -> None:
        """Assert that every block is free, as it must be when no request lives."""
        held = [block for block, count in enumerate(self._counts) if count]
        assert not held, f"blocks {held} are still held though the pool should be idle"
        assert sorted(self._free) == list(range(self.num_blocks)), "the free list lost or doubled a block"
