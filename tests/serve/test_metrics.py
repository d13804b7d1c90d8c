"""What `/metrics` shows is what happened."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.request import Output, Usage
from jetflow_serve.metrics import Metrics, Progress
from serve.support import END, Running, ScriptedEngine, byte_tokenizer, serving
from tiny import tiny_head, tiny_model

TEXT = "/v1/completions"


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by its name and labels."""
    return {
        (sample.name.removeprefix("jetflow:"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(running: Running) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with running.client() as client:
        response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    return samples(response.text)


def test_counts_and_timings_of_requests() -> None:
    engine = ScriptedEngine(script=lambda _: [1] * 9 + [END], per_step=3)
    with serving(engine) as running:
        with running.client() as client:
            for stream in (False, True):
                body = {"prompt": ["abc", "de"], "max_tokens": 50, "stream": stream}
                assert client.post(TEXT, json=body).status_code == 200
            assert client.post(TEXT, json={"prompt": "abcd", "max_tokens": 1}).status_code == 200
            assert client.post(TEXT, json={"nonsense": 1}).status_code == 400
            assert client.get("/nowhere/at/all").status_code == 404
        running.wait_idle()
        found = scrape(running)
    assert found["request_finished_total", (("reason", "stop"),)] == 4
    assert found["request_finished_total", (("reason", "length"),)] == 1
    assert found["prompt_tokens_total", ()] == 2 * (3 + 2) + 4
    assert found["generation_tokens_total", ()] == 4 * 10 + 1
    assert found["accepted_draft_tokens_total", ()] == 4 * (10 - 4)  # 10 tokens in 4 steps
    assert found["time_to_first_token_seconds_count", ()] == 5
    assert found["e2e_request_latency_seconds_count", ()] == 5
    assert found["inter_token_latency_seconds_count", ()] == 4 * 3
    assert found["request_time_per_output_token_seconds_count", ()] == 4  # one had a single token
    assert found["acceptance_length_count", ()] == 4 * 3
    assert found["acceptance_length_sum", ()] == 4 * 7
    assert found["acceptance_length_bucket", (("le", "1.0"),)] == 4  # the step of the last token
    assert found["step_seconds_count", ()] == engine.steps
    assert found["http_requests_total", (("path", TEXT), ("status", "200"))] == 3
    assert found["http_requests_total", (("path", TEXT), ("status", "400"))] == 1
    assert found["http_requests_total", (("path", "unknown"), ("status", "404"))] == 1
    assert found["engine_failures_total", ()] == 0


def test_the_engine_as_it_is_now() -> None:
    engine = ScriptedEngine(script=lambda _: [1] * 200, step_s=0.05)
    body = {"prompt": "a", "n": 2, "max_tokens": 200, "stream": True}
    with serving(engine) as running:
        with running.client() as client, client.stream("POST", TEXT, json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            found = scrape(running)
            assert found["num_requests_running", ()] == 2
            assert found["num_requests_waiting", ()] == 0
            assert found["kv_pages", (("state", "used"),)] == 2
            assert found["kv_pages", (("state", "free"),)] == 97
        running.wait_idle()
        found = scrape(running)
        assert found["num_requests_running", ()] == 0
        assert found["request_finished_total", (("reason", "cancelled"),)] == 2


def test_failures_are_counted_by_reason() -> None:
    def explode() -> None:
        if engine.steps == 2:
            raise RuntimeError("broken kernel")

    engine = ScriptedEngine(before_step=explode)
    with serving(engine, max_requests=2) as running:
        with running.client() as client:
            assert client.post(TEXT, json={"prompt": "a"}).status_code == 500
            engine.poison = "logits are not finite"
            assert client.post(TEXT, json={"prompt": "a"}).status_code == 500
            assert client.post(TEXT, json={"prompt": [9999]}).status_code == 400
        running.wait_idle()
        found = scrape(running)
    assert found["engine_failures_total", ()] == 1
    assert found["request_finished_total", (("reason", "generation_failed"),)] == 2


def test_every_server_has_its_own_registry() -> None:
    with serving(ScriptedEngine()) as one, serving(ScriptedEngine()) as other:
        with one.client() as client:
            client.post(TEXT, json={"prompt": "a"})
        assert scrape(one)["e2e_request_latency_seconds_count", ()] == 1
        assert scrape(other)["e2e_request_latency_seconds_count", ()] == 0


def test_no_label_can_grow_without_bound() -> None:
    """Labels come from routes, statuses and reasons; nothing a client writes ends up in one."""
    with serving(ScriptedEngine()) as running, running.client() as client:
        for number in range(20):
            client.get(f"/v1/models/m{number}")
            client.get(f"/path{number}")
            client.post(TEXT, json={"prompt": "a", "model": f"m{number}"}, headers={"x-request-id": f"r{number}"})
        before = len(scrape(running))
        for number in range(20, 40):
            client.get(f"/v1/models/m{number}")
            client.get(f"/path{number}")
            client.post(TEXT, json={"prompt": "a", "model": f"m{number}"}, headers={"x-request-id": f"r{number}"})
        assert len(scrape(running)) <= before + 2  # the scrapes' own


def test_drafts_of_a_real_engine_are_counted() -> None:
    """Mean budget: nodes over decoding passes of sequences."""
    model = tiny_model(vocab_size=258)
    head = tiny_head(model)
    head.pack()
    engine = Engine(model, byte_tokenizer(), head, EngineConfig(budget=4, page_size=4, num_pages=40, max_model_len=64))
    with serving(engine) as running:
        with running.client() as client:
            for _ in range(2):
                body = {"prompt": "a prompt of some length", "max_tokens": 20, "ignore_eos": True}
                assert client.post(TEXT, json=body).status_code == 200
        running.wait_idle()
        found = scrape(running)
    rounds = found["acceptance_length_count", ()]
    assert 3 <= found["draft_nodes_total", ()] / rounds <= 4
    assert found["drafted_steps_total", ()] <= rounds
    assert found["prefix_cache_hit_tokens_total", ()] >= 16
    assert found["kv_pages", (("state", "used"),)] == 0
    assert found["kv_pages", (("state", "cached"),)] > 0


@pytest.mark.parametrize("finish", ["stop", None])
def test_times_of_one_sequence(finish: str | None) -> None:
    """Without a server: exact numbers for a given clock."""
    metrics = Metrics()
    progress = Progress(started=10.0)
    for now, tokens, accepted, reason in ((10.5, 1, 0, None), (11.5, 4, 2, None), (12.5, 5, 2, finish)):
        usage = Usage(7, tokens, accepted, 1)
        metrics.output(progress, Output("r", [], "", reason, None, usage), now)
    metrics.end(progress, "cancelled")
    found = samples(metrics.render().decode())
    assert found["time_to_first_token_seconds_sum", ()] == 0.5
    assert found["inter_token_latency_seconds_sum", ()] == 2.0
    assert found["acceptance_length_sum", ()] == 4
    assert found["request_finished_total", (("reason", finish or "cancelled"),)] == 1
    assert found["e2e_request_latency_seconds_count", ()] == (1 if finish else 0)
    assert found["request_time_per_output_token_seconds_sum", ()] == (0.5 if finish else 0)
    assert progress.finish == (finish or "cancelled")
