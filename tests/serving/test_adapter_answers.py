from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.serving.adapter_answers import (
    REASON_LENGTH,
    ROUTE_OFF,
    Answer,
    Meaning,
    adapter_paths,
    done_or_gone_meaning,
    load_meaning,
    load_reason,
    message_of,
    push_meaning,
    pushed_path,
    reset_meaning,
)
from rlkit.serving.emulated_engine import EmulatedEngine, LoadRefused

NAME = "trl-policy-v3"


def vllm_error(code: int, message: str, kind: str = "BadRequestError") -> Answer:
    return Answer(code, json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}))


def in_worker(reason: str) -> Answer:
    """What a server whose engine has worker processes says."""
    text = f"Worker failed with error '{reason}', please check the stack trace above for the root cause"
    return vllm_error(500, f"Call to add_lora method failed: {text}")


@pytest.mark.parametrize(
    ("answer", "meaning"),
    [
        (Answer(200, f"Success: LoRA adapter '{NAME}' added successfully."), Meaning.DONE),
        (Answer(404, '{"detail":"Not Found"}'), Meaning.FINAL),
        (vllm_error(400, "Both 'lora_name' and 'lora_path' must be provided."), Meaning.FINAL),
        (vllm_error(400, f"The lora adapter '{NAME}' conflicts with a served base model."), Meaning.FINAL),
        (
            vllm_error(
                400,
                f"The lora adapter '{NAME}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
            ),
            Meaning.REPLACE,
        ),
        (vllm_error(404, f"Loading lora {NAME} failed: No adapter found for /lora/x", "NotFoundError"), Meaning.RETRY),
        (vllm_error(404, f"Loading lora {NAME} failed: No adapter found for <path>", "NotFoundError"), Meaning.RETRY),
        (vllm_error(404, "Loading lora other failed: No adapter found for <path>", "NotFoundError"), Meaning.FINAL),
        (
            vllm_error(500, "Call to add_lora method failed: LoRA rank 16 is greater than max_lora_rank 8."),
            Meaning.FINAL,
        ),
        (vllm_error(500, "Call to add_lora method failed: <path> doesn't contain tensors"), Meaning.RETRY),
        (vllm_error(500, "Call to add_lora method failed: Expecting value: line 1 column 1 (char 0)"), Meaning.RETRY),
        (
            vllm_error(500, "Error while deserializing header: incomplete metadata, file not fully covered"),
            Meaning.RETRY,
        ),
        (in_worker("<path> doesn't contain tensors"), Meaning.RETRY),
        (in_worker("Unterminated string starting at: line 32 column 3 (char 837)"), Meaning.RETRY),
        (in_worker("Error while deserializing header: incomplete metadata, file not fully covered"), Meaning.RETRY),
        (in_worker("LoRA rank 16 is greater than max_lora_rank 8."), Meaning.FINAL),
        (vllm_error(500, "vLLM does not yet support DoRA."), Meaning.FINAL),
        (vllm_error(500, "Call to add_lora method failed: out of memory"), Meaning.FINAL),
        (vllm_error(500, "EngineCore encountered an issue. See stack trace"), Meaning.RETRY),
        (Answer(500, ""), Meaning.FINAL),
        (Answer(502, "<html>bad gateway</html>"), Meaning.RETRY),
        (Answer(504, ""), Meaning.RETRY),
        (Answer(401, '{"error":"Unauthorized"}'), Meaning.FINAL),
        (Answer(429, "slow down"), Meaning.RETRY),
        (Answer(503, "<html>starting</html>"), Meaning.RETRY),
        (Answer(None, "ClientConnectorError: refused"), Meaning.RETRY),
    ],
)
def test_what_an_answer_to_a_load_means(answer: Answer, meaning: Meaning) -> None:
    assert load_meaning(answer, NAME) is meaning


def test_files_cut_anywhere_are_asked_for_again(adapter: Callable[..., str]) -> None:
    """A mount may show the beginning of a file before its end: the emulated engine reads them as vLLM does."""
    folder = Path(adapter(NAME))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        file = folder / name
        if name.endswith("json"):
            config = json.loads(file.read_text()) | {
                "base_model_name_or_path": "é€😀",
                "bias": "none",
                "x": [1.5e3, None],
            }
            file.write_text(json.dumps(config, ensure_ascii=False, indent=2))
        whole = file.read_bytes()
        for end in range(len(whole)):
            file.write_bytes(whole[:end])
            with pytest.raises(LoadRefused) as refused:
                EmulatedEngine().load(NAME, str(folder))
            answer = vllm_error(refused.value.status, refused.value.message, refused.value.kind)
            assert load_meaning(answer, NAME) is Meaning.RETRY, (name, end, answer.text)
        file.write_bytes(whole)
    EmulatedEngine().load(NAME, str(folder))


def test_what_an_answer_to_a_push_means() -> None:
    assert push_meaning(Answer(200, '{"path": "/here"}')) is Meaning.DONE
    assert pushed_path(Answer(200, '{"path": "/here"}')) == "/here"
    assert push_meaning(Answer(200, "<html>")) is Meaning.FINAL
    assert push_meaning(Answer(200, '{"path": ""}')) is Meaning.FINAL
    assert push_meaning(Answer(507, "no room")) is Meaning.FINAL
    assert push_meaning(Answer(503, "busy")) is Meaning.RETRY
    assert push_meaning(Answer(None, "refused")) is Meaning.RETRY


def test_a_missing_route_is_told_with_the_way_out() -> None:
    assert load_reason(Answer(404, '{"detail":"Not Found"}')) == ROUTE_OFF
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in ROUTE_OFF
    assert load_reason(vllm_error(404, "Loading lora a failed: No adapter found for <path>")).startswith("Loading")


def test_unload_and_reset() -> None:
    assert done_or_gone_meaning(Answer(200, "Success")) is Meaning.DONE
    assert done_or_gone_meaning(vllm_error(404, f"The lora adapter '{NAME}' cannot be found.")) is Meaning.DONE
    assert done_or_gone_meaning(Answer(500)) is Meaning.RETRY
    assert done_or_gone_meaning(Answer(None)) is Meaning.RETRY
    assert reset_meaning(Answer(200, '{"success":true}')) is Meaning.DONE
    assert reset_meaning(Answer(200, '{"success":false}')) is Meaning.RETRY
    assert reset_meaning(Answer(404, '{"detail":"Not Found"}')) is Meaning.UNAVAILABLE
    assert reset_meaning(Answer(None)) is Meaning.RETRY


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (vllm_error(400, "one\n two"), "one two"),
        (Answer(404, '{"detail":"Not Found"}'), "Not Found"),
        (Answer(401, '{"error":"Unauthorized"}'), "Unauthorized"),
        (Answer(502, "<html>bad gateway</html>"), "<html>bad gateway</html>"),
        (Answer(500, ""), "HTTP 500"),
        (Answer(None, ""), "no answer"),
        (Answer(None, "refused"), "refused"),
    ],
)
def test_messages_are_one_line(answer: Answer, message: str) -> None:
    assert message_of(answer) == message


@given(st.one_of(st.none(), st.integers(100, 599)), st.text())
def test_any_answer_can_be_read(status: int | None, text: str) -> None:
    answer = Answer(status, text)
    message = message_of(answer)
    assert 0 < len(message) <= REASON_LENGTH
    assert len(message.splitlines()) == 1
    load_meaning(answer, NAME)
    reset_meaning(answer)
    adapter_paths(answer)


def test_adapters_are_the_models_with_a_parent() -> None:
    cards = [
        {"id": "base", "root": "base", "parent": None},
        {"id": NAME, "root": "/lora/3", "parent": "base"},
    ]
    assert adapter_paths(Answer(200, json.dumps({"object": "list", "data": cards}))) == {NAME: "/lora/3"}
    assert adapter_paths(Answer(200, '{"data": null}')) is None
    assert adapter_paths(Answer(401, '{"error":"Unauthorized"}')) is None
