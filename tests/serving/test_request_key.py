from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.serving.prefix_index import prefix_chain
from rlkit.serving.prompt_blocks import routing_key
from rlkit.serving.request_key import RequestKey, RequestKeys

IDS = list(range(100, 140))


def plainly(body: bytes, block_size: int = 16) -> RequestKey:
    """The key of a body that is read as a whole."""
    try:
        key = routing_key(json.loads(body), block_size)
    except (ValueError, RecursionError):
        key = routing_key(None, block_size)
    return RequestKey(key.model, prefix_chain(key.model, key.blocks), key.sequences)


def of(fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_a_group_is_read_once() -> None:
    keys = RequestKeys(16)
    group = [of({"model": "m", "prompt": IDS, "n": 2, "seed": seed}) for seed in range(8)]
    read = [keys.read(body) for body in group]
    assert read == [plainly(group[0])] * 8
    assert len({id(key.chain) for key in read}) == 1
    assert len(keys._chains) == 1
    assert keys.read(of({"model": "other", "prompt": IDS})).chain != read[0].chain


def test_the_number_of_sequences_is_each_requests_own() -> None:
    keys = RequestKeys(16)
    assert [keys.read(of({"model": "m", "prompt": IDS, "n": n})).sequences for n in (1, 4, True, "8", 0)] == [
        1,
        4,
        1,
        1,
        1,
    ]


@pytest.mark.parametrize(
    "body",
    [
        of({"model": "m", "prompt": [IDS, IDS]}),
        of({"model": "m", "prompt": ["a" * 100, "b"]}),
        of({"model": "m", "prompt": ["a]b" * 30]}),
        of({"model": "m", "prompt": "text with [1, 2] in it" * 9}),
        of({"model": "m", "prompt": "x" * 99, "stop": [1, 2]}),
        of({"model": "m", "stop": ["]"], "prompt": IDS}),
        of({"model": "m", "note": '"prompt": [1, 2]', "prompt": IDS}),
        of({"model": "m", "extra": {"prompt": [1] * 40}, "prompt": IDS}),
        of({"model": "m", "extra": {"prompt": [1] * 40}}),
        of({"model": "m", "prompt": IDS, "messages": [{"role": "user", "content": "x" * 99}]}),
        of({"model": "m", "prompt": []}),
        of({"model": "m", "prompt": [True] * 20}),
        of({"model": "m", "prompt": [1.5] * 20}),
        of({"model": "m", "prompt": [1] * 20 + ["a"]}),
        of({"model": "m", "prompt": [2**40] * 20}),
        of({"model": "m", "prompt": None, "other": [1]}),
        of({"model": 3, "prompt": IDS}),
        of({"model": "\ud800", "prompt": IDS}),
        of({"prompt": IDS}),
        of([{"prompt": IDS}]),
        of("prompt"),
        b'{"model": "m", "prompt": [1, 2', b'{"model": "m", "prompt": [1,, 2]}', b'{"model": "m", "prompt": [01]}',
        b'{"model": "m", "prompt": [1, 2]]}', b'{"model": "m" "prompt": [1, 2]}', b'{"model": "m", "prompt" [1, 2]}',
        b'{"prompt": [1], "prompt": [2], "model": "m"}',
        b'{"prompt": [1, 1], "prompt": "x", "model": "m"}',
        b"", b"[", b"\xff\xfe", b'"prompt"[]', b"\xef\xbb\xbf" + of({"model": "m", "prompt": IDS}),
        of({"model": "m", "prompt": IDS}).decode().encode("utf-16"),
        b'{"model": "m\xff", "prompt": [1, 2]}',
        b'{"a":' * 2000 + b"1" + b"}" * 2000 + b'"prompt": [1]',
        of({"model": "m", "prompt": "\ud800" * 99}),
    ],
)  # fmt: skip
def test_no_shortcut_changes_a_key(body: bytes) -> None:
    keys = RequestKeys(16)
    assert keys.read(body) == plainly(body)
    assert keys.read(body) == plainly(body)


@pytest.mark.parametrize("field", ["messages", "tools"])
def test_a_conversation_nested_too_deep_has_no_blocks(field: str) -> None:
    """orjson reads a few levels more than json writes."""
    body = b'{"model": "m", "messages": 0, "%b": %b}' % (field.encode(), b"[" * 1000 + b"]" * 1000)
    assert RequestKeys(16).read(body) == RequestKey("m", b"", 1)


values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2**33) | st.text(max_size=5) | st.just('"prompt": [1, 2]'),
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.sampled_from(["prompt", "a"]), inner, max_size=2),
    max_leaves=30,
)
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=40)
fields = st.fixed_dictionaries({}, optional={"model": values | st.just("m"), "prompt": values | tokens, "n": values,
                                             "messages": values, "stop": values})  # fmt: skip


@given(st.lists(fields, min_size=1, max_size=5), st.sampled_from([1, 4, 16]), st.sampled_from([None, 2]))
def test_keys_are_those_of_bodies_read_as_a_whole(
    bodies: list[dict[str, Any]], block_size: int, indent: int | None
) -> None:
    keys = RequestKeys(block_size)
    for body in bodies:
        encoded = json.dumps(body, indent=indent).encode()
        assert keys.read(encoded) == plainly(encoded, block_size)


@given(st.text(), st.text())
def test_any_text_can_be_read(one: str, other: str) -> None:
    body = (one + '"prompt": [1, 2' + other).encode("utf-8", "surrogatepass")
    assert RequestKeys(1).read(body) == plainly(body, 1)


def test_another_block_size_forgets_what_was_read() -> None:
    keys = RequestKeys(16)
    body = of({"model": "m", "prompt": IDS})
    keys.read(body)
    keys.block_size = 8
    assert keys.read(body) == plainly(body, 8)
    assert keys.block_size == 8


def test_what_is_kept_is_bounded() -> None:
    keys = RequestKeys(16, kept_bytes=10_000)
    for number in range(200):
        keys.read(of({"model": "m", "prompt": [number] * 100}))
    assert 0 < keys._bytes <= 10_000
    assert keys._bytes == sum(len(text) + len(chain) + 300 for (_, text), chain in keys._chains.items())
    before = dict(keys._chains)
    huge = of({"model": "m", "prompt": [1] * 10_000})
    assert keys.read(huge) == plainly(huge)
    assert keys._chains == before
