"""KV pages as numbers: who holds them, which are known by their content, which are evicted first. Knows no tensor."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a full page's content: a digest of its tokens and, through the key of the page before, of all tokens before it.

    Two pages of one key hold the same K/V, since those depend on the tokens up to each position and on nothing else.
    """
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=32).digest()


def root_key(salt: str) -> bytes:
    """The `parent` of a first page. Requests of different `salt` never share a page."""
    return blake2b(salt.encode(), digest_size=32).digest()


class BlockPool:
    """Blocks 0 … `num_blocks` − 1 of `page_size` token slots each. Every block is in exactly one state:

    - *used*: as many holders as its count; `release` gives one hold back. Its content may be registered under a key.
    - *cached*: nobody holds it, but its content is registered, so `share` can bring it back to use.
    - *free*: neither.

    A registered block is full and never written again. New blocks come from the free ones first, then from the cached one that
    was used least recently. Blocks are released from the end of a block table to its start, and who holds a page holds
    those before it, so a page is evicted before the pages that it continues.
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
        self._keys: dict[int, bytes] = {}  # registered block → key
        self._registered: dict[bytes, int] = {}  # key → block
        self._cached: dict[int, None] = {}  # in order of release, least recently used first

    @property
    def free(self) -> int:
        """Number of blocks that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Number of blocks that nobody holds and whose content can still be shared."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Number of blocks that somebody holds."""
        return self.num_blocks - self.available

    def blocks_for(self, slots: int) -> int:
        """Number of blocks that hold `slots` token slots."""
        return -(-slots // self.page_size)

    def can_allocate(self, n: int, beside: Sequence[int] = ()) -> bool:
        """Whether `n` blocks are available without those of `beside`, which are to be shared."""
        return n <= self.available - sum(self._counts[block] == 0 for block in beside)

    def allocate(self, n: int) -> list[int]:
        """Take `n` blocks, each with one hold and no content. Ask `can_allocate` first."""
        assert n >= 0, f"cannot allocate {n} blocks"
        assert self.can_allocate(n), f"{n} blocks wanted, {self.available} of {self.num_blocks} available"
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(n)]
        for block in blocks:
            self._counts[block] = 1
        return blocks

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest run of registered `keys` from the first on. They are not held yet: `share` them."""
        blocks: list[int] = []
        for key in keys:
            block = self._registered.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add one hold to each of these used or cached blocks."""
        for block in blocks:
            assert self._counts[block] > 0 or block in self._cached, f"block {block} is free and cannot be shared"
            self._cached.pop(block, None)
            self._counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one hold of each block, last block first; one that nobody holds any more is cached or free."""
        for block in reversed(blocks):
            assert self._counts[block] > 0, f"block {block} is released twice"
            self._counts[block] -= 1
            if self._counts[block] == 0:
                if block in self._keys:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def register(self, block: int, key: bytes) -> int:
        """Make the content of a full private block known as `key`; returns the block to use in its place from now on.

        That is the block itself, or the one that has this content already, to which the hold then moves.
        """
        assert self.is_private(block), f"block {block} is shared or free and cannot be registered"
        known = self._registered.setdefault(key, block)
        if known == block:
            self._keys[block] = key
        else:
            self.share([known])
            self.release([block])
        return known

    def is_private(self, block: int) -> bool:
        """Whether the block has one holder and no registered content, so that the holder may write to it."""
        return self._counts[block] == 1 and block not in self._keys

    def forget(self) -> None:
        """Drop all registered content: cached blocks become free, used ones stay with their holders."""
        self._free += self._cached
        self._cached.clear()
        self._keys.clear()
        self._registered.clear()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that the block tables account for every hold, and that every block is used, cached or free."""
        holds = Counter(block for table in tables for block in table)
        held = {block: count for block, count in enumerate(self._counts) if count}
        assert held == holds, f"blocks with holds {held} should have {dict(holds)}"
        states = sorted([*held, *self._cached, *self._free])
        assert states == list(range(self.num_blocks)), f"blocks used, cached and free are {states}: lost or doubled"
        assert {key: block for block, key in self._keys.items()} == self._registered, "keys and blocks disagree"
        assert self._cached.keys() <= self._keys.keys(), "a cached block has no key"
        assert not self._keys.keys() & set(self._free), "a free block has a key"

    def check_idle(self) -> None:
        """Assert that every block is free or cached, as it must be when no request lives."""
        self.check([])

    def _evict(self) -> int:
        block = next(iter(self._cached))
        del self._cached[block]
        del self._registered[self._keys.pop(block)]
        return block
