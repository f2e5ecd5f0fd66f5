from hypothesis import given
from hypothesis import strategies as st

from rlkit.simulation.batches import FixedCount, Row, Sharing, TokenBudget
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


SHARING = Sharing(template_tokens=4, completion_share=0.5)


def rollout(group: int, completion_tokens: int = 10) -> Sample:
    return Sample(group, 0, 6, completion_tokens, 0.0)


def test_a_tree_forwards_once_what_its_samples_begin_with() -> None:
    row = Row(SHARING)
    for group in (1, 1, 2):
        row.add(rollout(group))
    # All of the first; half an answer of the second; of another prompt all but the template.
    assert row.tokens == 16 + 5 + 12
    assert row.trained == 30
    assert row.load == 16**2 + (16**2 - 11**2) + (16**2 - 4**2)


def test_what_is_trained_on_closes_a_row_that_shares_everything() -> None:
    planner = TokenBudget(1, 30, Sharing(4, 1.0))
    assert [planner.add(rollout(1)) for _ in range(3)] == [None] * 3
    rows = planner.add(rollout(1))
    assert rows is not None
    assert (rows[0].tokens, rows[0].trained) == (16, 30)


def test_a_group_stays_in_its_row_until_that_is_full() -> None:
    planner = TokenBudget(2, 32, SHARING)
    groups = [planner.add(rollout(group)) for group in (1, 2, 1, 2, 1)]
    assert groups == [None] * 5
    rows = planner.add(rollout(1))  # its row holds 30 trained tokens; in the other one it would begin anew
    assert rows is not None
    assert [sorted(one.groups) for one in rows] == [[1], [2]]


def test_a_fixed_count_halves_a_group_so_that_every_rank_has_one() -> None:
    planner = FixedCount(2, 2, SHARING)
    for _ in range(3):
        assert planner.add(rollout(1)) is None
    rows = planner.add(rollout(1))
    assert rows is not None
    assert [len(row.samples) for row in rows] == [2, 2]
    assert [row.tokens for row in rows] == [21, 21]
