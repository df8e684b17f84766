"""The books of pages and slots: what is free, what is shared, what could be had back."""

import pytest

from stoker.engine.pages import Pool


def test_numbers_go_out_from_the_lowest_and_come_back() -> None:
    pool = Pool(4)
    assert pool.take(3) == [0, 1, 2]
    pool.give_back([1])
    assert pool.take(2) == [1, 3]
    assert pool.free == 0
    with pytest.raises(ValueError, match="1 wanted, 0 of 4 free"):
        pool.take()


def test_a_shared_number_is_free_when_its_last_owner_lets_go() -> None:
    pool = Pool(2)
    pool.take(1)
    pool.share([0])
    pool.give_back([0])
    assert pool.free == 1
    pool.give_back([0])
    assert pool.free == 2
    with pytest.raises(ValueError, match="0 is free already"):
        pool.give_back([0])
    with pytest.raises(ValueError, match="0 is free and cannot be shared"):
        pool.share([0])


def test_what_only_pins_hold_can_be_had_back() -> None:
    pool = Pool(4)
    pages = pool.take(2)
    pool.share(pages, pin=True)
    pool.share(pages[:1], pin=True)
    assert pool.reclaimable == 0  # a request holds them too
    pool.give_back(pages)
    assert pool.reclaimable == 2
    assert [pool.pinned_alone(page) for page in pages] == [False, True]  # dropping one pin frees only the second
    pool.share(pages[1:])
    assert pool.reclaimable == 1
    pool.check_integrity(pages[1:], [*pages, pages[0]])
    pool.give_back(pages[1:])
    pool.give_back(pages, pin=True)
    assert (pool.free, pool.reclaimable) == (3, 1)


@pytest.mark.parametrize(("held", "pinned"), [([0], [0, 1]), ([0, 1], []), ([0, 1, 1], [1]), ([0], [1])])
def test_books_that_do_not_agree_are_noticed(held: list[int], pinned: list[int]) -> None:
    pool = Pool(3)
    pool.take(2)
    pool.share([1], pin=True)
    pool.check_integrity([0, 1], [1])
    with pytest.raises(AssertionError):
        pool.check_integrity(held, pinned)
