from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.serving.prompt_blocks import MAX_REPEATS, routing_key, text_blocks, token_blocks

IDS = list(range(100, 140))


def test_token_prompts_are_cut_into_whole_blocks() -> None:
    key = routing_key({"model": "trl-policy-v1", "prompt": IDS}, 16)
    assert key.model == "trl-policy-v1"
    assert key.blocks == (token_blocks(IDS[:16], 16)[0], token_blocks(IDS[16:32], 16)[0])
    assert key.sequences == 1
    assert routing_key({"prompt": IDS[:15]}, 16).blocks == ()


def test_text_is_cut_into_blocks_of_about_as_many_tokens() -> None:
    assert text_blocks("a" * 63, 16) == ()
    assert text_blocks("a" * 64 + "b" * 70, 16) == (b"a" * 64, b"b" * 64)
    assert routing_key({"prompt": "a" * 64}, 16).blocks == (b"a" * 64,)


def test_a_conversation_shares_its_beginning_with_its_continuation() -> None:
    first = [{"role": "user", "content": "x" * 300}]
    second = [*first, {"role": "assistant", "content": "y" * 300}]
    one, two = (routing_key({"model": "m", "messages": messages}, 16).blocks for messages in (first, second))
    assert len(two) > len(one) >= 4
    assert two[: len(one)] == one
    other = routing_key({"messages": [{"role": "user", "content": "z" * 300}]}, 16).blocks
    assert other[-1] != one[-1]


def test_tools_come_before_the_conversation() -> None:
    messages = [{"role": "user", "content": "x" * 300}]
    with_tools = routing_key({"messages": messages, "tools": [{"type": "function"}]}, 16).blocks
    assert with_tools[0] != routing_key({"messages": messages}, 16).blocks[0]


@pytest.mark.parametrize(
    ("body", "sequences"),
    [
        ({"prompt": [IDS, IDS[::-1]]}, 2),
        ({"prompt": [IDS, IDS], "n": 4}, 8),
        ({"prompt": IDS, "n": 8}, 8),
        ({"prompt": IDS, "n": 0}, 1),
        ({"prompt": IDS, "n": True}, 1),
        ({"prompt": IDS, "n": "8"}, 1),
        ({"prompt": IDS, "n": MAX_REPEATS}, MAX_REPEATS),
        ({"prompt": IDS, "n": int("9" * 4299)}, 1),  # vLLM refuses it, and it would stay the highest number in flight
    ],
)
def test_a_batch_goes_where_its_first_prompt_goes_and_weighs_as_much_as_it_is(
    body: dict[str, Any], sequences: int
) -> None:
    key = routing_key(body, 16)
    assert key.blocks == token_blocks(IDS, 16)
    assert key.sequences == sequences


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        "text",
        {},
        {"prompt": None},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [-1] * 16},
        {"prompt": [2**40] * 16},
        {"prompt": [1.5] * 16},
        {"prompt": [None] * 16},
        {"prompt": {"a": 1}},
        {"model": 3, "prompt": "short"},
    ],
)
def test_what_cannot_be_cut_has_no_blocks(body: object) -> None:
    key = routing_key(body, 16)
    assert (key.model, key.blocks) == ("", ())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["model", "prompt", "messages", "tools", "n"]), json_values), st.integers(1, 64))
def test_any_json_has_a_key(body: dict[str, Any], block_size: int) -> None:
    key = routing_key(body, block_size)
    assert key.sequences >= 1
    assert len({len(block) for block in key.blocks}) <= 1


@given(st.text())
def test_lone_surrogates_do_not_break_it(text: str) -> None:
    routing_key({"prompt": "\ud800" + text}, 1)
