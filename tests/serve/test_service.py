"""The bridge between the event loop and the engine thread, against a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetflow_core.sampling import SamplingParams
from jetflow_serve.errors import ApiError
from jetflow_serve.service import EngineService, Generation, GenerationError, Job
from serve.support import ScriptedEngine, wait_for


def job(text: str = "hi", **params: Any) -> Job:
    return Job([ord(char) for char in text], SamplingParams(**params))


def run(engine: ScriptedEngine, body: Callable[[EngineService], Awaitable[None]], max_requests: int = 8) -> None:
    """Run `body` with a started service, then stop it; the engine must be left idle."""

    async def whole() -> None:
        service = EngineService(engine, max_requests)  # type: ignore[arg-type]
        service.start()
        try:
            await asyncio.wait_for(body(service), 20)
        finally:
            service.stop()
            await service.join()

    asyncio.run(whole())
    engine.check_idle()


async def texts(generation: Generation) -> list[str]:
    parts = [""] * len(generation.jobs)
    async for index, output in generation:
        parts[index] += output.text
    return parts


def test_jobs_come_back_under_their_own_index() -> None:
    engine = ScriptedEngine(script=lambda prompt: [*prompt, 257])

    async def body(service: EngineService) -> None:
        generation = await service.submit([job("abc"), job("z"), job("much longer")])
        decode = engine.tokenizer.decode
        assert await texts(generation) == [decode([ord(c) for c in t]) for t in ("abc", "z", "much longer")]
        service.cancel(generation)
        assert service.open_requests == 0

    run(engine, body)


def test_refusal_of_one_job_withdraws_all() -> None:
    engine = ScriptedEngine(step_s=0.01)

    async def body(service: EngineService) -> None:
        with pytest.raises(ApiError, match="outside the vocabulary") as caught:
            await service.submit([job(), Job([9999], SamplingParams())])
        assert caught.value.status_code == 400
        assert service.open_requests == 0
        assert not engine.running

    run(engine, body)


def test_full_queue_is_429_and_frees_up() -> None:
    engine = ScriptedEngine(script=lambda _: [1] * 500, step_s=0.002)

    async def body(service: EngineService) -> None:
        first = await service.submit([job(), job()])
        with pytest.raises(ApiError, match="queue is full") as caught:
            await service.submit([job()])
        assert caught.value.status_code == 429
        assert int((caught.value.headers or {})["Retry-After"]) >= 1
        service.cancel(first)
        second = await service.submit([job(max_tokens=2)])
        await texts(second)
        service.cancel(second)

    run(engine, body, max_requests=2)


def test_more_sequences_than_the_queue_ever_holds_is_a_400() -> None:
    async def body(service: EngineService) -> None:
        with pytest.raises(ApiError, match="at most 8") as caught:
            await service.submit([job()] * 9)
        assert caught.value.status_code == 400

    run(ScriptedEngine(), body)


def test_cancel_frees_within_one_step() -> None:
    engine = ScriptedEngine(script=lambda _: [1] * 500, step_s=0.02)

    async def body(service: EngineService) -> None:
        gone, kept = await service.submit([job()]), await service.submit([job(max_tokens=12)])
        await anext(gone)
        before = engine.steps
        service.cancel(gone)
        service.cancel(gone)  # twice is once
        await asyncio.to_thread(wait_for, lambda: len(engine.running) == 1)
        assert engine.aborted[0] <= before + 1
        assert len((await texts(kept))[0]) > 0
        service.cancel(kept)

    run(engine, body)


def test_cancelled_submit_leaves_nothing() -> None:
    engine = ScriptedEngine(script=lambda _: [1] * 500, step_s=0.2)

    async def body(service: EngineService) -> None:
        first = await service.submit([job()])
        await anext(first)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(service.submit([job()]), 0.01)
        assert service.open_requests == 1
        service.cancel(first)
        await asyncio.to_thread(wait_for, lambda: not engine.running)

    run(engine, body)


def test_failed_step_fails_its_requests_and_the_next_one_works() -> None:
    def explode() -> None:
        if engine.steps == 3:
            raise RuntimeError("out of cheese")

    engine = ScriptedEngine(script=lambda _: [1] * 20, before_step=explode)

    async def body(service: EngineService) -> None:
        generation = await service.submit([job(), job()])
        with pytest.raises(GenerationError, match="RuntimeError: out of cheese"):
            await texts(generation)
        service.cancel(generation)
        assert not engine.running
        again = await service.submit([job()])
        assert len((await texts(again))[0]) == len(engine.tokenizer.decode([1] * 20))
        service.cancel(again)

    run(engine, body)


def test_an_engine_beyond_repair_fails_everyone_and_takes_no_more() -> None:
    def explode() -> None:
        if engine.steps == 3:
            engine.abort_all = lambda *_, **__: 1 // 0  # type: ignore[assignment]
            raise RuntimeError("first")

    engine = ScriptedEngine(script=lambda _: [1] * 20, before_step=explode)

    async def body(service: EngineService) -> None:
        generation = await service.submit([job()])
        with pytest.raises(GenerationError, match="the engine stopped"):
            await texts(generation)
        service.cancel(generation)
        await service.join()
        assert not service.ready
        assert not service.alive
        with pytest.raises(ApiError) as caught:
            await service.submit([job()])
        assert caught.value.status_code == 503
        engine.running.clear()

    run(engine, body)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6)), min_size=1, max_size=6), st.integers(1, 3))
def test_any_mix_of_readers_and_leavers(clients: list[tuple[int, int]], per_step: int) -> None:
    """Each client submits some jobs and leaves after some outputs (0: reads to the end)."""
    engine = ScriptedEngine(script=lambda prompt: [*prompt, 257], per_step=per_step)

    async def client(service: EngineService, number: int, jobs: int, leave_after: int) -> None:
        words = [f"client {number} job {index}" for index in range(jobs)]
        prompts = [engine.tokenizer.encode(word, allow_special=False) for word in words]
        generation = await service.submit([Job(prompt, SamplingParams()) for prompt in prompts])
        try:
            if leave_after:
                for _ in range(leave_after):
                    await anext(generation, None)
            else:
                assert await texts(generation) == words
        finally:
            service.cancel(generation)

    async def body(service: EngineService) -> None:
        await asyncio.gather(*(client(service, number, *entry) for number, entry in enumerate(clients)))
        assert service.open_requests == 0

    run(engine, body, max_requests=99)


def test_failed_request_reports_its_error_alone() -> None:
    engine = ScriptedEngine(script=lambda _: [1] * 20)
    engine.poison = "logits are not finite"

    async def body(service: EngineService) -> None:
        bad = await service.submit([job()])
        with pytest.raises(GenerationError, match="not finite"):
            await texts(bad)
        with pytest.raises(StopAsyncIteration):
            await anext(bad)
        service.cancel(bad)
        good = await service.submit([job()])
        assert await texts(good)
        service.cancel(good)

    run(engine, body)


def test_stop_fails_what_runs_and_refuses_what_comes() -> None:
    engine = ScriptedEngine(script=lambda _: [1] * 500, step_s=0.01)

    async def body(service: EngineService) -> None:
        generation = await service.submit([job()])
        await anext(generation)
        service.stop("closing time")
        with pytest.raises(GenerationError, match="closing time"):
            await texts(generation)
        service.cancel(generation)
        with pytest.raises(ApiError, match="shutting down") as caught:
            await service.submit([job()])
        assert caught.value.status_code == 503
        assert not service.ready

    run(engine, body)
