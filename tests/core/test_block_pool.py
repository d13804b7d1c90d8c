"""Page accounting: nothing lost, nothing given out twice, content found where it is, the right page evicted."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jetflow_core.block_pool import BlockPool, page_key, root_key


@pytest.mark.parametrize(("blocks", "page"), [(0, 16), (4, 0), (-1, 1)])
def test_sizes_below_one_are_refused(blocks: int, page: int) -> None:
    with pytest.raises(ValueError, match=f"{blocks} and {page}"):
        BlockPool(blocks, page)


def test_allocating_more_than_free_fails_and_takes_nothing() -> None:
    pool = BlockPool(3, 16)
    pool.allocate(1)
    assert not pool.can_allocate(3)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 of 3 available"):
        pool.allocate(3)
    assert pool.free == 2


def test_double_free_fails() -> None:
    pool = BlockPool(2, 16)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_sharing_a_free_block_fails() -> None:
    with pytest.raises(AssertionError, match="free"):
        BlockPool(2, 16).share([0])


def test_check_idle_names_the_held_blocks() -> None:
    pool = BlockPool(2, 16)
    held = pool.allocate(1)
    with pytest.raises(AssertionError, match=str(held[0])):
        pool.check_idle()


@pytest.mark.parametrize(("slots", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for(slots: int, blocks: int) -> None:
    assert BlockPool(1, 16).blocks_for(slots) == blocks


# --- content ---


def keys_of(*pages: tuple[int, ...]) -> list[bytes]:
    keys = [root_key("")]
    for page in pages:
        keys.append(page_key(keys[-1], page))
    return keys[1:]


def hold_chain(pool: BlockPool, keys: list[bytes]) -> list[int]:
    """What a request does with a text of these pages: share what is known, compute and register the rest."""
    blocks = pool.match(keys)
    pool.share(blocks)
    for key in keys[len(blocks) :]:
        blocks.append(pool.register(pool.allocate(1)[0], key))
    return blocks


def test_a_key_stands_for_all_tokens_up_to_its_page() -> None:
    (a, ab), (b,), (_, cb) = keys_of((1, 2), (3, 4)), keys_of((3, 4)), keys_of((1, 3), (3, 4))
    assert len({a, ab, b, cb}) == 4
    assert keys_of((1, 2), (3, 4)) == [a, ab]
    assert page_key(root_key("tenant"), (1, 2)) != a


def test_released_content_is_cached_and_can_be_shared_again() -> None:
    pool = BlockPool(4, 2)
    keys = keys_of((1, 2), (3, 4))
    blocks = hold_chain(pool, keys)
    assert (pool.used, pool.cached, pool.free) == (2, 0, 2)
    pool.release(blocks)
    assert (pool.used, pool.cached, pool.free) == (0, 2, 2)
    pool.check_idle()
    assert pool.match([*keys, b"unknown"]) == blocks
    assert pool.match([b"unknown", *keys]) == []
    pool.share(blocks)
    pool.check([blocks])
    assert pool.cached == 0


def test_free_blocks_are_used_before_cached_ones() -> None:
    pool = BlockPool(3, 2)
    cached = hold_chain(pool, keys_of((1, 2)))
    pool.release(cached)
    assert cached[0] not in pool.allocate(2)
    assert pool.match(keys_of((1, 2))) == cached
    assert pool.allocate(1) == cached
    assert pool.match(keys_of((1, 2))) == []


def test_the_least_recently_used_page_goes_first_and_a_chain_from_its_end() -> None:
    pool = BlockPool(5, 2)
    old, new = keys_of((1, 1), (2, 2)), keys_of((1, 1), (3, 3), (4, 4))
    first = hold_chain(pool, old)
    pool.release(first)
    second = hold_chain(pool, new)  # shares the page (1, 1)
    pool.release(second)
    pool.allocate(1)  # the one free block
    evicted = [pool.allocate(1)[0] for _ in range(4)]
    assert evicted == [first[1], second[2], second[1], second[0]]


def test_equal_content_is_kept_once() -> None:
    pool = BlockPool(3, 2)
    (key,) = keys_of((1, 2))
    a, b = pool.allocate(2)
    assert pool.register(a, key) == a
    assert pool.register(b, key) == a
    assert (pool.used, pool.free) == (1, 2)
    pool.check([[a], [a]])


def test_only_private_blocks_are_registered() -> None:
    pool = BlockPool(3, 2)
    (a,), (key, other) = pool.allocate(1), keys_of((1, 2), (3, 4))
    pool.share([a])
    with pytest.raises(AssertionError, match="shared or free"):
        pool.register(a, key)
    pool.release([a])
    assert pool.is_private(a)
    pool.register(a, key)
    assert not pool.is_private(a)
    with pytest.raises(AssertionError, match="shared or free"):
        pool.register(a, other)


def test_blocks_about_to_be_shared_do_not_count_as_available() -> None:
    pool = BlockPool(3, 2)
    blocks = hold_chain(pool, keys_of((1, 1), (2, 2)))
    assert pool.can_allocate(1, beside=blocks)
    pool.release(blocks[1:])
    assert pool.can_allocate(2)
    assert not pool.can_allocate(2, beside=blocks)
    pool.release(blocks[:1])
    assert pool.can_allocate(1, beside=blocks)
    assert not pool.can_allocate(2, beside=blocks)


def test_forgetting_frees_what_nobody_holds() -> None:
    pool = BlockPool(3, 2)
    keys = keys_of((1, 1), (2, 2))
    blocks = hold_chain(pool, keys)
    pool.release(blocks[1:])
    pool.forget()
    assert (pool.used, pool.cached, pool.free) == (1, 0, 2)
    assert pool.match(keys) == []
    pool.check([blocks[:1]])
    pool.release(blocks[:1])
    assert pool.free == 3


def test_check_finds_a_hold_too_many() -> None:
    pool = BlockPool(3, 2)
    blocks = pool.allocate(2)
    pool.check([blocks[:1], blocks[1:]])
    with pytest.raises(AssertionError, match="holds"):
        pool.check([blocks, blocks[:1]])


class PoolMachine(RuleBasedStateMachine):
    """Holders of texts over a small pool: what every block holds is written down and compared with what is found.

    Texts have pages of one token out of two, so that they share beginnings often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7, 1)
        self.holders: list[tuple[list[int], list[int]]] = []  # block table, text; the last block may be still empty
        self.content: dict[int, list[int]] = {}  # block → all tokens up to its own
        self.clock = 0
        self.last_use: dict[int, int] = {}  # block → time of its last release or hold

    def keys(self, text: list[int]) -> list[bytes]:
        return keys_of(*((token,) for token in text))

    @rule(text=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def start(self, text: list[int]) -> None:
        """A new holder takes the known beginning of `text` and one empty block."""
        blocks = self.pool.match(self.keys(text))
        for i, block in enumerate(blocks):
            assert self.content[block] == text[: i + 1], "a hit on other content"
        if self.pool.can_allocate(1, beside=blocks):
            self.pool.share(blocks)
            self.holders.append((blocks, text[: len(blocks)]))
            blocks += self.take()

    def take(self) -> list[int]:
        """Allocate one block: a free one, or else the cached one that is least recently used, which no other continues."""
        cached = {b for b in self.content if not any(b in blocks for blocks, _ in self.holders)}
        found = {b: self.content[b] for b in cached if self.known(b)}
        free = self.pool.free
        (block,) = self.pool.allocate(1)
        assert not any(block in blocks for blocks, _ in self.holders), "a held block is given out"
        if free:
            assert block not in found
        else:
            text = found[block]
            assert not any(t != text and t[: len(text)] == text for t in found.values()), "a page before its children"
            assert self.last_use[block] == min(self.last_use[b] for b in found), "not the least recently used"
            del self.content[block]
        return [block]

    def known(self, block: int) -> bool:
        return self.pool.match(self.keys(self.content[block]))[-1:] == [block]

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), token=st.integers(0, 1))
    def fill(self, data: st.DataObject, token: int) -> None:
        """A holder writes to its last block and registers it, then takes another."""
        blocks, text = data.draw(st.sampled_from(self.holders))
        if len(blocks) == len(text):
            return
        assert self.pool.is_private(blocks[-1])
        assert all(blocks[-1] not in other for other, _ in self.holders if other is not blocks)
        text.append(token)
        own = blocks[-1]
        blocks[-1] = self.pool.register(own, self.keys(text)[-1])
        if blocks[-1] == own:
            self.content[own] = list(text)
        assert self.content[blocks[-1]] == text
        if self.pool.can_allocate(1):
            blocks += self.take()

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        blocks, _ = self.holders.pop(index)
        self.pool.release(blocks)
        self.clock += 1
        for block in blocks:
            self.last_use[block] = self.clock

    @rule()
    def forget(self) -> None:
        if not self.holders:
            self.pool.forget()
            self.content.clear()

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.pool.check(blocks for blocks, _ in self.holders)
        held = {block for blocks, _ in self.holders for block in blocks}
        assert self.pool.used == len(held)
        assert self.pool.used + self.pool.cached + self.pool.free == 7
        assert self.pool.cached == len(self.content.keys() - held)

    def teardown(self) -> None:
        for blocks, _ in self.holders:
            self.pool.release(blocks)
        self.pool.check_idle()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
