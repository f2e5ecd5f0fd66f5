from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.serving.vllm_metrics import ReplicaReading, read_page

# In the form prometheus_client writes, with the metrics that vLLM 0.31 registers; one engine.
PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="toy"} 12.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="toy"} 3.0
# HELP vllm:num_requests_waiting_by_reason Number of waiting requests by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="toy",reason="capacity"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="toy",reason="deferred"} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="toy"} 0.25
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="toy"} 7.0
# HELP vllm:num_preemptions_created Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="toy"} 1.7897e+09
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="toy"} 123456.0
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="toy"} 654321.0
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="toy"} 1000.0
# HELP vllm:prefix_cache_hits_total Prefix cache hits, in terms of number of cached tokens.
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="toy"} 864.0
# HELP vllm:request_success_total Count of successfully processed requests.
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="toy"} 40.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="toy"} 2.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",engine="0",kv_cache_size_tokens="5088",num_gpu_blocks="160"} 1.0
"""

EMPTY = ReplicaReading()


def test_reads_a_page() -> None:
    reading = read_page(PAGE)
    assert reading == ReplicaReading(
        running=12,
        waiting=3,
        kv_usage=0.25,
        preemptions_total=7,
        prompt_tokens_total=123456,
        generation_tokens_total=654321,
        prefix_queries_total=1000,
        prefix_hits_total=864,
        request_success_total=42,
        block_size=32,
        kv_cache_size_tokens=5088,
        num_gpu_blocks=160,
        waiting_for_capacity=3,
        worst_kv_usage=0.25,
        engines=1,
    )
    assert reading.capacity_tokens == 5088
    assert not reading.is_empty


def test_sums_over_the_engines_of_a_data_parallel_server() -> None:
    """num_gpu_blocks is already the sum over the engines on every row, kv_cache_size_tokens is each engine's own."""
    page = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 5.0
vllm:num_requests_running{engine="1",model_name="m"} 6.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="SIZE0",num_gpu_blocks="2000"} 1.0
vllm:cache_config_info{block_size="16",engine="1",kv_cache_size_tokens="SIZE1",num_gpu_blocks="2000"} 1.0
"""
    both = read_page(page.replace("SIZE0", "15984").replace("SIZE1", "15984"))
    assert (both.running, both.kv_usage, both.num_gpu_blocks) == (11, 0.375, 2000)
    assert (both.worst_kv_usage, both.engines) == (0.5, 2)
    assert both.kv_cache_size_tokens == both.capacity_tokens == 31968
    for one, other in (("15984", "None"), ("None", "None")):
        partly = read_page(page.replace("SIZE0", one).replace("SIZE1", other))
        assert partly.kv_cache_size_tokens is None
        assert partly.capacity_tokens == 2000 * 16


def test_one_engine_described_twice_is_one_cache() -> None:
    row = 'vllm:cache_config_info{block_size="32",engine="0",kv_cache_size_tokens="5088",num_gpu_blocks="160"} 1.0\n'
    assert row in PAGE
    again = row.replace('engine="0"', 'engine="0",pid="7"')
    assert read_page(PAGE + again).capacity_tokens == 5088


def test_only_those_that_wait_for_capacity_wait_for_capacity() -> None:
    page = PAGE.replace('reason="deferred"} 0.0', 'reason="deferred"} 4.0')
    assert read_page(page).waiting_for_capacity == 3
    older = "".join(line for line in PAGE.splitlines(keepends=True) if "by_reason" not in line)
    assert read_page(older).waiting_for_capacity is None
    assert read_page(older).waiting == 3


def test_older_names() -> None:
    page = PAGE.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    page = page.replace("vllm:prefix_cache_", "vllm:gpu_prefix_cache_")
    assert read_page(page) == read_page(PAGE)


def test_unknown_is_none_not_zero() -> None:
    without_size = read_page(PAGE.replace('kv_cache_size_tokens="5088",', ""))
    assert without_size.kv_cache_size_tokens is None
    assert without_size.capacity_tokens == 160 * 32
    none = read_page(PAGE.replace('"160"', '"None"').replace('"5088"', '"None"').replace('"32"', '"None"'))
    assert (none.num_gpu_blocks, none.kv_cache_size_tokens, none.block_size, none.capacity_tokens) == (None,) * 4
    nan = read_page(PAGE.replace("0.25", "NaN").replace(" 12.0", " +Inf"))
    assert (nan.kv_usage, nan.worst_kv_usage, nan.running, nan.waiting) == (None, None, None, 3)
    assert read_page("# HELP nothing here\n") == EMPTY


@pytest.mark.parametrize(
    "page",
    [
        "",
        "<!DOCTYPE html><html><body>502 Bad Gateway</body></html>\n",
        '{"error": {"message": "Not Found"}}\n',
        PAGE[: PAGE.index("6.0\n# HELP vllm:generation")],  # 123456.0 cut to 12345
        PAGE[: PAGE.index('"5088"')] + "\n",  # cut inside a label, with a newline of the proxy's
    ],
)
def test_not_a_complete_page_says_nothing(page: str) -> None:
    reading = read_page(page)
    assert reading == EMPTY
    assert reading.is_empty


@given(st.integers(0, len(PAGE) - 2))
def test_no_cut_of_a_page_gives_a_number_that_is_not_on_it(cut: int) -> None:
    whole, part = read_page(PAGE).to_dict(), read_page(PAGE[:cut]).to_dict()
    for name, value in part.items():
        assert value is None or value == whole[name] or name == "request_success_total"


@given(st.text())
def test_any_text_can_be_read(text: str) -> None:
    read_page(text + "\n")
