from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import GaugeMetricFamily

from rlkit.admission.law import ReplicaState
from rlkit.admission.readings import PageReader
from rlkit.serving.proxy_stats import merged_page


def page(
    *,
    usage: object = 0.25,
    running: int = 12,
    waiting: int = 3,
    preemptions: int = 7,
    generated: int = 1000,
    capacity: object = 5088,
    engine: str = "0",
) -> str:
    """What vLLM 0.31 writes of this, of one engine."""
    own = f'engine="{engine}",model_name="m"'
    return f"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{own}}} {running}.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{{own}}} {waiting}.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{{{own},reason="capacity"}} {waiting}.0
vllm:num_requests_waiting_by_reason{{{own},reason="deferred"}} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{{own}}} {usage}
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{{own}}} {preemptions}.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{{own}}} {generated}.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",engine="{engine}",kv_cache_size_tokens="{capacity}",num_gpu_blocks="319"}} 1.0
"""


def merged(*pages: str | None) -> str:
    """What the proxy answers: a family of its own for every replica, and the pages of those it could read."""
    serves = GaugeMetricFamily("rlkit_proxy_in_service", "", labels=["replica"])
    for number, text in enumerate(pages):
        serves.add_metric([str(number)], text is not None)
    return merged_page([serves], pages).decode()


def only(states: Mapping[str, ReplicaState | None]) -> ReplicaState:
    """The state of the only replica, which is known."""
    [state] = states.values()
    assert state is not None
    return state


def test_a_servers_own_page() -> None:
    reader = PageReader()
    first = ReplicaState(
        usage=0.25, running=12, waiting=3, waiting_for_capacity=3, preemptions=None, capacity_tokens=5088
    )
    assert reader.read(page()) == {"0": first}
    assert only(reader.read(page(preemptions=9))).preemptions == 2
    assert only(reader.read(page(preemptions=9))).preemptions == 0


def test_the_proxys_page_by_replica() -> None:
    reader = PageReader()
    reader.read(merged(page(), page(capacity=2000, preemptions=1)))
    states = reader.read(merged(page(preemptions=8), page(usage=0.75, capacity=2000, preemptions=4)))
    assert {
        name: state and (state.usage, state.capacity_tokens, state.preemptions) for name, state in states.items()
    } == {
        "0": (0.25, 5088, 1),
        "1": (0.75, 2000, 3),
    }


def test_a_replica_that_the_proxy_cannot_read_is_unknown_from_the_first_page_on() -> None:
    assert PageReader().read(merged(None, None)) == {"0": None, "1": None}
    states = PageReader().read(merged(page(), None))
    assert states["0"] is not None
    assert states["1"] is None


def test_a_replica_that_goes_silent_stays_in_the_answer_and_is_counted_on_when_it_is_back() -> None:
    reader = PageReader()
    reader.read(merged(page(), page(preemptions=10)))
    assert reader.read(merged(page(), None))["1"] is None
    assert reader.read(None) == {"0": None, "1": None}
    back = reader.read(merged(page(), page(preemptions=15)))["1"]
    assert back is not None
    assert (back.preemptions, back.restarted) == (5, False)


def test_a_server_that_began_anew_has_no_count_this_time() -> None:
    reader = PageReader()
    reader.read(page(preemptions=10, generated=5000))
    anew = only(reader.read(page(preemptions=2, generated=40)))
    assert (anew.restarted, anew.preemptions) == (True, None)
    after = only(reader.read(page(preemptions=3, generated=60)))
    assert (after.restarted, after.preemptions) == (False, 1)


def test_a_restart_shows_although_nothing_had_been_preempted() -> None:
    reader = PageReader()
    reader.read(page(preemptions=0, generated=5000))
    anew = only(reader.read(page(preemptions=0, generated=10)))
    assert (anew.restarted, anew.preemptions) == (True, None)


def test_data_parallel_engines_are_one_replica_and_the_fullest_decides() -> None:
    page_of_two = page(usage=0.3) + page(usage=0.7, engine="1", running=5, preemptions=2)
    state = only(PageReader().read(page_of_two))
    assert (state.usage, state.running, state.waiting, state.capacity_tokens) == (0.7, 17, 6, 2 * 5088)
    assert state.engines == 2
    reader = PageReader()
    reader.read(page_of_two)
    assert only(reader.read(page_of_two)).preemptions == 0


def test_capacity_from_blocks_is_not_counted_once_per_engine() -> None:
    """num_gpu_blocks is the sum over all engines on each engine's row."""
    state = only(PageReader().read(page(capacity="None") + page(capacity="None", engine="1")))
    assert state.capacity_tokens == 319 * 16


def test_what_a_page_does_not_say_is_unknown() -> None:
    reader = PageReader()
    reader.read(page())
    nan = only(reader.read(page(usage="NaN", capacity="None").replace('num_gpu_blocks="319"', 'num_gpu_blocks="None"')))
    assert (nan.usage, nan.capacity_tokens, nan.running) == (None, None, 12)
    lines = page().splitlines(keepends=True)
    partial = only(reader.read("".join(line for line in lines if "preemptions" not in line and "waiting" not in line)))
    assert (partial.preemptions, partial.waiting, partial.waiting_for_capacity) == (None, None, None)
    assert not partial.restarted


def test_older_names() -> None:
    older = page().replace("kv_cache_usage_perc", "gpu_cache_usage_perc")
    older = "".join(line for line in older.splitlines(keepends=True) if "by_reason" not in line)
    state = only(PageReader().read(older))
    assert (state.usage, state.waiting, state.waiting_for_capacity) == (0.25, 3, None)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "<html><body>502 Bad Gateway</body></html>\n",
        page()[: page().index("# TYPE vllm:kv_cache") - 3],
        "# TYPE python_info gauge\npython_info 1.0\n",
    ],
)
def test_a_page_that_is_none_tells_nothing(text: str | None) -> None:
    assert PageReader().read(text) == {}
    reader = PageReader()
    reader.read(page(preemptions=7))
    assert reader.read(text) == {"0": None}
    assert only(reader.read(page(preemptions=8))).preemptions == 1


@given(st.integers(0, len(merged(page(), page())) - 2))
def test_no_cut_of_a_page_tells_what_is_not_on_it(cut: int) -> None:
    text = merged(page(), page())
    whole = PageReader().read(text)
    for name, state in PageReader().read(text[:cut]).items():
        known = {} if state is None else {field: value for field, value in asdict(state).items() if value is not None}
        assert known.items() <= asdict(only({name: whole[name]})).items()


@given(st.text())
def test_any_text_can_be_read(text: str) -> None:
    PageReader().read(text + "\n")
