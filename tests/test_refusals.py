from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rlkit.refusals import SHOWN_CHARACTERS, refusals, shown


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    size: Annotated[int, Field(gt=0)] = 1
    share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    limit: Annotated[float, Field(gt=0, le=2)] | None = None
    many: Annotated[int, Field(le=1_000_000)] = 1


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: Annotated[str, Field(pattern="^[a-z]+$", description="small letters")] = "a"
    kind: Literal["near", "far"] = "near"
    maybe: Literal["yes"] | None = None
    inner: Inner = Inner()
    again: Inner | None = None
    words: list[str] = []
    either: str | list[str] = ""
    values: dict[str, int] = {}
    flag: bool = False
    filled: Annotated[str, Field(min_length=1)] = "x"
    some: Annotated[list[int], Field(min_length=1)] = [1]

    @field_validator("words")
    @classmethod
    def _few(cls, words: list[str]) -> list[str]:
        if len(words) > 2:
            raise ValueError("two are enough")
        return words


def refused(data: Any, model: type[BaseModel] | None = Outer) -> list[tuple[str, str]]:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(data)
    return refusals(caught.value, model)


@pytest.mark.parametrize(
    ("data", "field", "words"),
    [
        ({"name": "A"}, "name", "expected small letters, got 'A'"),
        ({"name": 3}, "name", "expected small letters, got 3"),
        ({"kind": "there"}, "kind", "expected near or far, got 'there'"),
        ({"maybe": "no"}, "maybe", "expected yes or null, got 'no'"),
        ({"inner": 3}, "inner", "expected a section (size, share, limit, many), got 3"),
        ({"again": [1]}, "again", "expected a section (size, share, limit, many) or null, got [1]"),
        ({"inner": {"size": "9"}}, "inner.size", "expected a whole number above 0, got '9'"),
        ({"inner": {"size": 2.5}}, "inner.size", "expected a whole number above 0, got 2.5"),
        ({"inner": {"size": True}}, "inner.size", "expected a whole number above 0, got true"),
        ({"inner": {"size": None}}, "inner.size", "expected a whole number above 0, got null"),
        ({"inner": {"share": 1}}, "inner.share", "expected a number of at least 0 and below 1, got 1"),
        ({"inner": {"limit": 3}}, "inner.limit", "expected a number above 0 and at most 2 or null, got 3"),
        ({"inner": {"many": 10**7}}, "inner.many", "expected a whole number at most 1000000, got 10000000"),
        ({"inner": {"share": float("nan")}}, "inner.share", "expected a finite number, got nan"),
        ({"inner": {"share": float("-inf")}}, "inner.share", "expected a finite number, got -inf"),
        ({"again": {"size": 0}}, "again.size", "expected a whole number above 0, got 0"),
        ({"words": "a"}, "words", "expected a list, each item text, got 'a'"),
        ({"words": ["a", 1]}, "words.1", "expected text, got 1"),
        ({"words": ["a", "b", "c"]}, "words", "two are enough"),
        ({"either": 3}, "either", "expected text or a list, each item text, got 3"),
        ({"either": ["a", 1]}, "either", "expected text or a list, each item text, got ['a', 1]"),
        ({"values": 3}, "values", "expected a mapping, each value a whole number, got 3"),
        ({"values": {"a": "x"}}, "values.a", "expected a whole number, got 'x'"),
        ({"values": {1: 1}}, "values", "expected text as a name, got 1"),
        ({"flag": 1}, "flag", "expected true or false, got 1"),
        ({"filled": ""}, "filled", "expected text that is not empty, got ''"),
        ({"some": []}, "some", "expected a list of at least 1, each item a whole number, got []"),
        ({"knd": "near"}, "knd", "unknown field, did you mean kind?"),
        ({"share": 0.5}, "share", "unknown field, did you mean inner.share?"),
        ({"inner": {"nothing": 1}}, "inner.nothing", "unknown field, there are size, share, limit, many"),
        ({"nothing": 1}, "nothing", "unknown field, there are name, kind, maybe, inner, again, words, ..."),
        (3, "", "expected a section (name, kind, maybe, inner, again, words, ...), got 3"),
    ],
)
def test_a_refusal_names_the_field_what_is_allowed_and_what_was_given(data: Any, field: str, words: str) -> None:
    assert refused(data) == [(field, words)]


def test_all_are_told_each_field_once() -> None:
    assert [field for field, _ in refused({"kind": 1, "either": 2, "inner": {"size": 0, "share": -1}})] == [
        "kind",
        "inner.size",
        "inner.share",
        "either",
    ]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"inner": {"size": "x"}}, "expected a whole number, got 'x'"),
        ({"kind": "x"}, "expected near or far, got 'x'"),
        ({"inner": {"size": 0}}, "expected a number above 0, got 0"),
        ({"flag": 2}, "expected true or false, got 2"),
    ],
)
def test_without_a_model_the_kind_of_value_is_told(data: Any, words: str) -> None:
    assert [what for _, what in refused(data, None)] == [words]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
)


@given(data=st.dictionaries(st.sampled_from([*Outer.model_fields, "other"]), anything, max_size=4))
def test_pydantics_own_words_are_never_shown(data: dict[str, Any]) -> None:
    try:
        Outer.model_validate(data)
    except ValidationError as error:
        for field, what in refusals(error, Outer):
            assert what.startswith(("expected ", "unknown field", "two are enough")), (field, what)
            assert "something else" not in what
            assert "\n" not in what


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), (1, "1"), (1.0, "1.0"), ("a\nb", r"'a\nb'"), ([None], "[None]")],
)
def test_a_value_is_shown_as_it_was_written(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_long_value_is_cut() -> None:
    assert len(shown("x" * 1000)) == SHOWN_CHARACTERS
