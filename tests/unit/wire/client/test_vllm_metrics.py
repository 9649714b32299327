"""What is read from a page as vLLM writes it."""

from __future__ import annotations

import pytest

from tercet_gateway.scraped_engine import VllmMetrics, parsed

PAGE = """# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 9141.0
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.76e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="org/a \\"b\\", c"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="org/a"} 7.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="org/a",reason="capacity"} 100.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="org/a"} 0.25
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="org/a"} 1.0e+06
"""


def test_a_page() -> None:
    assert parsed(PAGE) == VllmMetrics(7, 3, 0.25, "org/a", 16, 1000, "1.76e+09")


def test_data_parallel_ranks_are_one_engine() -> None:
    more = PAGE + PAGE.replace('engine="0"', 'engine="1"').replace("} 0.25", "} 0.75").replace("} 7.0", "} 1.0")
    assert parsed(more) == VllmMetrics(8, 6, 0.5, "org/a", 16, 2000, "1.76e+09")


def test_an_older_page() -> None:
    old = PAGE.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    assert parsed("\n".join(line for line in old.splitlines() if "config_info" not in line)).kv_usage == 0.25


@pytest.mark.parametrize(
    "page",
    [
        "",
        "hello",
        PAGE.replace("num_requests_waiting{", "queue{"),
        PAGE.replace("} 0.25", "} NaN"),
        PAGE.encode().hex(),
    ],
)
def test_what_is_none_of_vllms(page: str) -> None:
    with pytest.raises(ValueError, match="lacks"):
        parsed(page)
