"""The two teachers: one always right, one always wrong."""

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from rlkit.training.rewards import last_boxed, toy_sum
from rlkit.training.toy_model import build_tokenizer, prompt_ids
from rlkit.training.toy_task import Problem, demonstrations, split_problems

problems = st.builds(Problem, st.integers(10, 99), st.integers(10, 99))


@given(problems)
def test_careful_is_right_and_its_digits_add_up(problem: Problem) -> None:
    text = problem.careful()
    assert toy_sum([text], [problem.answer]) == [1.0]
    ones, tens = text.split("ones ")[1].split(" tens ")
    for equation in (ones, tens.split(" ")[0]):
        left, right = equation.split("=")
        assert sum(int(digit) for digit in left.split("+")) == int(right)


@given(problems, st.integers(0, 2**32))
def test_quick_is_wrong(problem: Problem, seed: int) -> None:
    text = problem.quick(random.Random(seed))
    assert last_boxed(text) is not None
    assert toy_sum([text], [problem.answer]) == [0.0]


def test_no_demonstration_shows_a_held_out_problem() -> None:
    trained, held_out = split_problems()
    assert len(trained) + len(held_out) == 8100
    assert len(held_out) == 810
    assert not set(trained) & set(held_out)
    shown = {problem for problem, _ in itertools.islice(demonstrations(seed=1), 5000)}
    assert not shown & set(held_out)


def test_two_whole_blocks_of_32_tokens_hold_the_problem() -> None:
    tokenizer = build_tokenizer()
    for problem in (Problem(10, 10), Problem(99, 99)):
        ids = prompt_ids(tokenizer, problem)
        assert len(ids) > 64  # vLLM always computes the last token anew, so a hit on two blocks needs one more
        assert tokenizer.encode("+", add_special_tokens=False)[0] in ids[32:61]
        assert len(tokenizer.encode(problem.careful(), add_special_tokens=False)) < 32


def test_demonstrations_repeat_with_their_seed() -> None:
    first, again, other = (list(itertools.islice(demonstrations(seed), 50)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
