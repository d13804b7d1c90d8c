"""Page accounting: nothing lost, nothing given out twice."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jetflow_core.block_pool import BlockPool


@pytest.mark.parametrize(("blocks", "page"), [(0, 16), (4, 0), (-1, 1)])
def test_sizes_below_one_are_refused(blocks: int, page: int) -> None:
    with pytest.raises(ValueError, match=f"{blocks} and {page}"):
        BlockPool(blocks, page)


def test_allocating_more_than_free_fails_and_takes_nothing() -> None:
    pool = BlockPool(3, 16)
    pool.allocate(1)
    assert not pool.can_allocate(3)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 of 3 free"):
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


class PoolMachine(RuleBasedStateMachine):
    """A pool against a plain list of holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7, 4)
        self.holds: list[int] = []

    @rule(n=st.integers(0, 8))
    def allocate(self, n: int) -> None:
        if self.pool.can_allocate(n):
            blocks = self.pool.allocate(n)
            assert len(set(blocks)) == n
            assert not set(blocks) & set(self.holds)
            self.holds += blocks

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.holds))
        self.pool.share([block])
        self.holds.append(block)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.holds))
        self.pool.release([block])
        self.holds.remove(block)

    @invariant()
    def free_is_what_nobody_holds(self) -> None:
        assert self.pool.free == 7 - len(Counter(self.holds))

    def teardown(self) -> None:
        self.pool.release(self.holds)
        self.pool.check_idle()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
