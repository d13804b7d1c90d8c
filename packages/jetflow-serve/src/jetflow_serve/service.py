"""The bridge between an asyncio server and the engine, which runs in one thread of its own.

The event loop talks to the thread through a queue of commands; the thread answers by scheduling callbacks on the loop, one
a step. Nothing else is shared: only the thread touches the engine, only the loop touches generations and metrics.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from jetflow_core.request import Output
from jetflow_core.sampling import SamplingParams
from jetflow_serve.errors import ApiError, bad_request, overloaded, unavailable
from jetflow_serve.logs import current_request
from jetflow_serve.metrics import Metrics, Progress

if TYPE_CHECKING:
    from jetflow_core.engine import Engine

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # in a row; from then on the server says that it is not ready
LONGEST_RETRY_S = 60
SHUTTING_DOWN = "the server is shutting down"


@dataclass(frozen=True)
class Job:
    """One sequence to generate: the engine's request."""

    prompt_ids: list[int]
    params: SamplingParams


class GenerationError(ApiError):
    """A generation ended before its time; the message is fit for the client, `code` says why in a word."""

    def __init__(self, message: str, status: int = 500, code: str = "generation_failed") -> None:
        super().__init__(status, message, code=code, headers={"Retry-After": "5"} if status == 503 else None)


class Generation:
    """The jobs of one HTTP request: an async iterator of (job index, output) that ends when all jobs have.

    Raises `GenerationError` when a job fails or `deadline`, a time of the event loop, passes. The owner calls
    `EngineService.cancel` when it stops reading.
    """

    def __init__(self, jobs: Sequence[Job], timeout_s: float | None = None) -> None:
        self.jobs = list(jobs)
        loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[None] = loop.create_future()
        self.timeout_s = timeout_s
        self.deadline = None if timeout_s is None else loop.time() + timeout_s
        started = time.perf_counter()
        self.progress = [Progress(started) for _ in self.jobs]
        self.failure: ApiError | None = None
        self._events: asyncio.Queue[tuple[int, Output] | GenerationError] = asyncio.Queue()
        self._open = len(self.jobs)

    def __aiter__(self) -> Generation:
        """Itself."""
        return self

    async def __anext__(self) -> tuple[int, Output]:
        """The next output of any job."""
        if self._open == 0:
            raise StopAsyncIteration
        try:
            async with asyncio.timeout_at(self.deadline):
                event = await self._events.get()
        except TimeoutError:
            event = self.timed_out()
        if not isinstance(event, GenerationError) and event[1].error is not None:
            event = GenerationError(event[1].error)
        if isinstance(event, GenerationError):
            self._open = 0
            self.failure = event
            raise event
        self._open -= event[1].finish_reason is not None
        return event

    def post(self, event: tuple[int, Output] | GenerationError) -> None:
        """Hand an event to the reader."""
        self._events.put_nowait(event)

    def answer(self, error: Exception | None) -> None:
        """Say whether the engine took the jobs."""
        if self.accepted.done():  # the reader has gone
            return
        if error is None:
            self.accepted.set_result(None)
        else:
            self.accepted.set_exception(error)

    def timed_out(self) -> GenerationError:
        """The failure that the passed deadline is."""
        return GenerationError(f"the request took longer than {self.timeout_s:g} s", 504, "request_timeout")

    def summary(self) -> dict[str, Any]:
        """What a log line says of it: counts, times in seconds from the request on, τ, and how each sequence ended."""
        steps = sum(part.target_steps for part in self.progress)
        tokens = sum(part.completion_tokens for part in self.progress)
        started = [part for part in self.progress if part.first]
        fields: dict[str, Any] = {
            "prompt_tokens": sum(part.prompt_tokens for part in self.progress),
            "completion_tokens": tokens,
            "finish": ",".join(part.finish or "none" for part in self.progress),
        }
        if started:
            fields["ttft_s"] = round(min(part.first - part.started for part in started), 4)
            fields["acceptance_length"] = round(tokens / max(1, steps), 2)
        if self.failure is not None:
            fields["error"] = str(self.failure.detail)
        return fields


@dataclass(frozen=True)
class _Add:
    generation: Generation


@dataclass(frozen=True)
class _Cancel:
    generation: Generation


@dataclass(frozen=True)
class _Stop:
    reason: str


class EngineService:
    """Runs `engine` in a thread and serves at most `max_requests` sequences at a time, waiting ones included.

    A request may take `request_timeout_s` seconds, waiting included; None: as long as it likes.
    """

    def __init__(self, engine: Engine, max_requests: int = 256, request_timeout_s: float | None = None) -> None:
        self.engine = engine
        self.max_requests = max_requests
        self.request_timeout_s = request_timeout_s
        self.open_requests = 0
        self.metrics = Metrics()
        self.metrics.watch(engine)
        self._commands: SimpleQueue[_Add | _Cancel | _Stop] = SimpleQueue()
        self._owners: dict[str, tuple[Generation, int]] = {}  # engine request id → its reader; the thread's own
        self._counted: set[Generation] = set()  # generations in `open_requests`; the loop's own
        self._mean_s = 1.0  # how long a generation stays, over the last ones
        self._failed_steps = 0
        self._refusal: str | None = None  # why no more requests are taken
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="jetflow-engine", daemon=True)

    # --- the event loop's side ---

    def start(self) -> None:
        """Start the engine thread; its outputs come on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the engine thread runs."""
        return self._thread.is_alive()

    @property
    def accepting(self) -> bool:
        """Whether requests are taken."""
        return self.alive and self._refusal is None

    @property
    def ready(self) -> bool:
        """Whether requests should be sent here: they are taken, and the last steps of the engine did not all fail.

        A server that is not ready for its failures still tries what it is sent; one step that works makes it ready again.
        """
        return self.accepting and self._failed_steps < MAX_FAILED_STEPS

    async def submit(self, jobs: Sequence[Job]) -> Generation:
        """Queue `jobs`, all or none. The caller must `cancel` the result when it stops reading, finished or not.

        Raises `ApiError`: 400 when the engine refuses a job, 429 when the queue is full, 503 when stopping, 504 in time.
        """
        self._check_room(len(jobs))
        generation = Generation(jobs, self.request_timeout_s)
        if (record := current_request.get()) is not None:
            record.generation = generation
        self._counted.add(generation)
        self.open_requests += len(jobs)
        self._commands.put(_Add(generation))
        try:
            await self._accepted(generation)
        except BaseException as error:
            generation.failure = error if isinstance(error, ApiError) else None
            self.cancel(generation)
            raise
        return generation

    async def _accepted(self, generation: Generation) -> None:
        try:
            if self._refusal is not None:  # since the check
                raise unavailable(self._refusal)
            async with asyncio.timeout_at(generation.deadline):
                await generation.accepted
        except TimeoutError as error:
            raise generation.timed_out() from error
        except ValueError as error:
            raise bad_request(str(error)) from error

    def cancel(self, generation: Generation) -> None:
        """Free whatever `generation` still holds; harmless when it has ended or was cancelled before."""
        if generation not in self._counted:
            return
        self._counted.remove(generation)
        self.open_requests -= len(generation.jobs)
        self._mean_s += (time.perf_counter() - generation.progress[0].started - self._mean_s) / 8
        reason = "cancelled" if generation.failure is None else generation.failure.body.error.code or "refused"
        for part in generation.progress:
            self.metrics.end(part, reason)
        self._commands.put(_Cancel(generation))

    def drain(self) -> None:
        """Take no more requests; the running ones go on."""
        self._refusal = SHUTTING_DOWN

    def stop(self, reason: str = SHUTTING_DOWN) -> None:
        """Take no more requests and fail the running ones with `reason`."""
        self._refusal = SHUTTING_DOWN
        self._commands.put(_Stop(reason))

    async def join(self) -> None:
        """Wait for the engine thread to end."""
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def _check_room(self, count: int) -> None:
        if not self.accepting:
            raise unavailable(self._refusal or "the engine is not running")
        if count > self.max_requests:
            raise bad_request(f"{count} sequences in one request; this server takes at most {self.max_requests}", "n")
        if self.open_requests + count > self.max_requests:
            # places come free as fast as generations end
            retry_s = math.ceil(count * self._mean_s / self.open_requests)
            message = f"the queue is full ({self.open_requests} of {self.max_requests} sequences)"
            raise overloaded(message, min(max(1, retry_s), LONGEST_RETRY_S))

    def _deliver(self, outputs: Sequence[tuple[Generation, int, Output]], now: float, seconds: float | None) -> None:
        """Hand what a step gave to the readers and count it; `seconds` None: the step failed."""
        read = [each for each in outputs if each[0] in self._counted]
        for generation, index, output in read:  # first of all: nobody may wait for ever because a counter failed
            generation.post((index, output))
        if seconds is None:
            self._failed_steps += 1
            self.metrics.failures.inc()
        else:
            self._failed_steps = 0
            self.metrics.step.observe(seconds)
        for generation, index, output in read:
            self.metrics.output(generation.progress[index], output, now)

    def _fail(self, failed: Sequence[Generation], error: GenerationError) -> None:
        for generation in failed:
            generation.post(error)

    # --- the engine thread's side ---

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run `function` on the event loop."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        try:
            while self._obey():
                if self.engine.has_work:
                    self._step()
        except Exception as error:  # not even aborting works: no request can be served any more
            log.exception("the engine thread ended")
            reason = f"the engine stopped: {_named(error)}"
            self._refusal = reason  # before the last look at the commands: `submit` checks it after adding one
            failure = GenerationError(reason, 503, "unavailable")
            self._call(self._fail, self._readers(), failure)
            self._refuse_waiting(failure)

    def _obey(self) -> bool:
        """Carry out waiting commands, blocking while the engine is idle. False: the thread ends."""
        block = not self.engine.has_work
        while True:
            try:
                command = self._commands.get(block=block)
            except Empty:
                return True
            block = False
            if isinstance(command, _Stop):
                failure = GenerationError(command.reason, 503, "shutting_down")
                self._fail_all(failure)
                self._refuse_waiting(failure)
                return False
            if isinstance(command, _Add):
                self._add(command.generation)
            else:
                self._abort(command.generation)

    def _add(self, generation: Generation) -> None:
        try:
            for index, job in enumerate(generation.jobs):
                request_id = self.engine.add(job.prompt_ids, job.params)
                self._owners[request_id] = (generation, index)
        except Exception as error:
            answer = error
            if not isinstance(error, ValueError):
                log.exception("the engine failed to take a request")
                answer = GenerationError(f"the engine failed to take the request: {_named(error)}")
            try:
                self._abort(generation)
            finally:
                self._call(generation.answer, answer)
        else:
            self._call(generation.answer, None)

    def _abort(self, generation: Generation) -> None:
        for request_id in [key for key, owner in self._owners.items() if owner[0] is generation]:
            del self._owners[request_id]
            self.engine.abort(request_id)

    def _step(self) -> None:
        """One step; one that fails ends the requests that took part in it, those that wait go on."""
        started = time.perf_counter()
        failed = False
        try:
            outputs = self.engine.step()
        except Exception as error:
            log.exception("a step of the engine failed")
            failed = True
            outputs = self.engine.abort_all(f"the engine failed while generating: {_named(error)}", waiting=False)
        now = time.perf_counter()
        owned: list[tuple[Generation, int, Output]] = []
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is None:  # cancelled since
                continue
            if output.finish_reason is not None or output.error is not None:
                del self._owners[output.request_id]
            owned.append((*owner, output))
        self._call(self._deliver, owned, now, None if failed else now - started)

    def _fail_all(self, failure: GenerationError) -> None:
        failed = self._readers()
        self._call(self._fail, failed, failure)  # all are told before the engine is touched again
        for generation in failed:
            self._abort(generation)

    def _readers(self) -> list[Generation]:
        return list({owner[0]: None for owner in self._owners.values()})

    def _refuse_waiting(self, failure: GenerationError) -> None:
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Add):
                self._call(command.generation.answer, failure)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
