"""Reward functions: module-level, picklable, and called as TRL calls them (lists in, list of floats or None out).

TRL scores in threads of a spawned child, so nothing here uses signals or keeps state. A function that takes
`max_completion_length` is given the recipe's by the trainer entry.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from rlkit.errors import BadInput

RewardFunction = Callable[..., list[float | None]]

# Longer answers are compared as text only: a symbolic comparison has no time limit outside the main thread.
MAX_SYMBOLIC_CHARACTERS = 200


def load_reward(name: str, max_completion_length: int) -> RewardFunction:
    """Import `module:function` and bind the recipe's completion limit if the function asks for it. Raises BadInput."""
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"reward: cannot import {name!r}: {error}") from None
    if not callable(function):
        raise BadInput(f"reward: {name!r} is a {type(function).__name__}, not a function")
    if "max_completion_length" in inspect.signature(function).parameters:
        return functools.partial(function, max_completion_length=max_completion_length)
    return function  # type: ignore[no-any-return]  # whatever the user's module holds; TRL checks its answers


def toy_sum(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float | None]:
    """1 where the last `\\boxed{}` is the right sum, else 0."""
    return [float(last_boxed(_text(completion)) == gold) for completion, gold in zip(completions, answer, strict=True)]


# Characters; of fewer, a share is luck, and would drown what the longer answers say.
SHARE_OF_AT_LEAST = 128


def digit_share(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """The share of digits among a completion's characters; a short one counts as if it had 128 of them.

    For a model that knows nothing yet: it is learnt in a few steps, and grows completions longer as it is.
    """
    texts = [_text(completion) for completion in completions]
    counts = [sum(character in "0123456789" for character in text) for text in texts]
    return [count / max(len(text), SHARE_OF_AT_LEAST) for count, text in zip(counts, texts, strict=True)]


def boxed_math(
    completions: Sequence[Any],
    answer: Sequence[str],
    completion_ids: Sequence[Sequence[int]] | None = None,
    max_completion_length: int | None = None,
    **_: Any,
) -> list[float | None]:
    """1 where the last `\\boxed{}` equals the gold answer, as LaTeX text or symbolically, else 0.

    A completion that reached `max_completion_length` tokens scores 0: whatever it boxed, it did not finish.
    """
    lengths = [len(ids) for ids in completion_ids] if completion_ids is not None else [0] * len(completions)
    scores: list[float | None] = []
    for completion, gold, length in zip(completions, answer, lengths, strict=True):
        truncated = max_completion_length is not None and length >= max_completion_length
        boxed = None if truncated else last_boxed(_text(completion))
        scores.append(float(boxed is not None and same_answer(boxed, gold)))
    return scores


def last_boxed(text: str) -> str | None:
    """The content of the last complete `\\boxed{...}`, braces balanced, or None."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        # An escaped character is no brace, and the second of two backslashes escapes nothing.
        for match in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
            depth += {"{": 1, "}": -1}.get(match[0], 0)
            if depth == 0:
                return text[start : start + match.start()]
    return None


def same_answer(candidate: str, gold: str) -> bool:
    """Whether two LaTeX answers are equal: as normalised text, else symbolically with math-verify."""
    candidate, gold = normalise_latex(candidate), normalise_latex(gold)
    if candidate == gold:
        return True
    if max(len(candidate), len(gold)) > MAX_SYMBOLIC_CHARACTERS:
        return False
    return _symbolically_equal(candidate, gold)


# Spellings of one thing in LaTeX answers, applied in this order.
_SPELLINGS = [
    (re.compile(r"\\(?:left|right|displaystyle|!|,|;|:|quad|qquad)(?![a-zA-Z])"), ""),
    (re.compile(r"\\[dt]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree"), ""),
    (re.compile(r"\\%|%|\\\$|\$"), ""),
    (re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), ""),
    (re.compile(r"\s+"), ""),
]


def normalise_latex(text: str) -> str:
    """One spelling for answers that differ in spacing, sizing, units of degree or percent, or thousands separators."""
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return text.rstrip(".")


def _symbolically_equal(candidate: str, gold: str) -> bool:
    from math_verify import parse, verify

    # It warns at every call that its timeouts are off; they are, on purpose.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Timeouts off: math-verify's use SIGALRM, which only works in a main thread. Parsing raises many kinds of error on
    # text that is not mathematics, and each of them means "not shown to be equal".
    with contextlib.suppress(Exception):
        parsed = [parse(f"${text}$", parsing_timeout=None, raise_on_error=False) for text in (gold, candidate)]
        return all(parsed) and bool(verify(parsed[0], parsed[1], timeout_seconds=None, raise_on_error=False))
    return False


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"] or "")
