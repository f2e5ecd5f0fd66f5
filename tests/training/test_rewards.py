"""Rewards: what counts as a right answer, and that no text breaks them."""

import functools
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.errors import BadInput
from rlkit.training.rewards import boxed_math, digit_share, last_boxed, load_reward, same_answer, toy_sum


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{1}, no: \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{3} and an unfinished \boxed{4", "3"),
        (r"\boxed {7}", "7"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{1 \\} and \boxed{\\{x}}", r"\\{x}"),
        (r"\boxed{1 \\}", r"1 \\"),
        (r"\boxed{}", ""),
        ("no box", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("candidate", "gold"),
    [
        ("12", "12"),
        ("0.5", r"\frac{1}{2}"),
        (r"\dfrac12", r"\frac{1}{2}"),
        ("1+x", "x+1"),
        ("1,000", "1000"),
        (r"30^\circ", "30"),
        (r"50\%", "50"),
        (r"\text{east}", "east"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        (r"2\sqrt{2}", r"\sqrt{8}"),
    ],
)
def test_equal_answers(candidate: str, gold: str) -> None:
    assert same_answer(candidate, gold)


@pytest.mark.parametrize(("candidate", "gold"), [("3", "4"), ("x", "y"), ("", "1"), ("}{", "1"), ("1.1", "1.01")])
def test_different_answers(candidate: str, gold: str) -> None:
    assert not same_answer(candidate, gold)


def test_a_completion_at_the_limit_scores_nothing() -> None:
    texts, golds = [r"\boxed{2}", r"\boxed{2}"], ["2", "2"]
    assert boxed_math(texts, golds, completion_ids=[[1] * 9, [1] * 10], max_completion_length=10) == [1.0, 0.0]
    assert boxed_math(texts, golds) == [1.0, 1.0]


def test_conversations_are_read_like_text() -> None:
    assert toy_sum([[{"role": "assistant", "content": r"\boxed{82}"}]], ["82"]) == [1.0]
    assert toy_sum([[{"role": "assistant", "content": None}]], ["82"]) == [0.0]


def test_a_short_completions_share_of_digits_is_no_luck() -> None:
    assert digit_share(["1" * 64 + "a" * 64, "1" * 100 + "a" * 100]) == [0.5, 0.5]
    assert digit_share(["7", "", "²"]) == [1 / 128, 0.0, 0.0]
    assert digit_share([[{"role": "assistant", "content": "12" * 128}]], answer=["82"]) == [1.0]


def test_scoring_outside_the_main_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(boxed_math, [r"\boxed{0.50}"], [r"\frac12"]).result() == [1.0]


pieces = st.sampled_from([*r"\{}()[]^_+-*/=<>,.0123456789xyz% $", r"\frac", r"\sqrt", r"\boxed{", r"\text{"])
latex = st.lists(pieces, max_size=20).map("".join)


@settings(deadline=None, max_examples=60)
@given(latex, latex)
def test_no_answer_raises(text: str, gold: str) -> None:
    assert boxed_math([text, rf"\boxed{{{text}}}"], [gold, gold])[0] in (0.0, 1.0)


def test_load_binds_the_completion_limit_and_pickles() -> None:
    reward = load_reward("rlkit.training.rewards:boxed_math", 10)
    assert isinstance(reward, functools.partial)
    assert pickle.loads(pickle.dumps(reward))([r"\boxed{2}"], ["2"], completion_ids=[[1] * 10]) == [0.0]
    assert load_reward("rlkit.training.rewards:toy_sum", 10) is toy_sum


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no.such.module:f", "No module named"),
        ("rlkit.training.rewards:absent", "absent"),
        ("rlkit.training.toy_task:DATA_NAME", "is a str, not a function"),
    ],
)
def test_a_reward_that_does_not_import_is_one_line(name: str, words: str) -> None:
    with pytest.raises(BadInput, match=words) as error:
        load_reward(name, 10)
    assert str(error.value).startswith("reward: ")
    assert "\n" not in str(error.value)
