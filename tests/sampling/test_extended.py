"""Two lists read as one."""

from hypothesis import given
from hypothesis import strategies as st

from stoker.sampling.extended import Extended

NUMBERS = st.lists(st.integers(0, 9), max_size=6)
EDGES = st.one_of(st.none(), st.integers(-14, 14))


@given(NUMBERS, NUMBERS, EDGES, EDGES, st.sampled_from([None, 1, 2, -1]))
def test_it_reads_like_the_list_of_both(
    text: list[int], more: list[int], start: int | None, stop: int | None, stride: int | None
) -> None:
    both, view = [*text, *more], Extended(text, more)
    assert list(view) == both
    assert len(view) == len(both)
    assert view[start:stop:stride] == both[start:stop:stride]
    for index in range(-len(both) - 1, len(both) + 1):
        try:
            expected = both[index]
        except IndexError:
            continue
        assert view[index] == expected


def test_it_grows_with_its_parts_and_ends_where_they_end() -> None:
    text: list[int] = [1]
    view = Extended(text, [3])
    text.append(2)
    assert list(view) == [1, 2, 3]
    for index in (3, -4):
        try:
            view[index]
        except IndexError:
            continue
        raise AssertionError(f"{index} is outside")
