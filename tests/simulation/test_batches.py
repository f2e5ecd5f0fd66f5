from hypothesis import given
from hypothesis import strategies as st

from rlkit.simulation.batches import FixedCount, TokenBudget
from rlkit.simulation.rollout import Sample


def sample(tokens: int) -> Sample:
    return Sample(0, 0, 0, tokens, 0.0)


def test_a_fixed_count_puts_the_longest_apart() -> None:
    planner = FixedCount(2, 2)
    assert [planner.add(sample(tokens)) for tokens in (10, 9, 2)] == [None] * 3
    rows = planner.add(sample(1))
    assert rows is not None
    assert sorted(row.tokens for row in rows) == [10, 12]


def test_a_budget_closes_before_the_sample_that_fits_nowhere() -> None:
    planner = TokenBudget(2, 10)
    assert [planner.add(sample(tokens)) for tokens in (7, 6, 3)] == [None] * 3
    rows = planner.add(sample(5))
    assert rows is not None
    assert [row.tokens for row in rows] == [7, 9]
    assert not planner.takes(sample(11))


@given(st.lists(st.integers(1, 100), max_size=200), st.integers(1, 4))
def test_rows_keep_to_the_budget_and_no_sample_is_lost(lengths: list[int], processes: int) -> None:
    planner, placed = TokenBudget(processes, 100), 0
    for tokens in lengths:
        rows = planner.add(sample(tokens))
        if rows is not None:
            assert len(rows) == processes
            assert all(row.tokens <= 100 for row in rows)
            placed += sum(len(row.samples) for row in rows)
    assert placed + sum(len(row.samples) for row in planner._rows) == len(lengths)
