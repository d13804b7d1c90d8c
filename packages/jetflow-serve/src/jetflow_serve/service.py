"""The bridge between an asyncio server and the engine, which runs in one thread of its own.

The event loop talks to the thread through a queue of commands; the thread answers by scheduling callbacks on the loop.
Nothing else is shared: only the thread touches the engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from jetflow_core.request import Output
from jetflow_core.sampling import SamplingParams
from jetflow_serve.errors import bad_request, overloaded, unavailable

if TYPE_CHECKING:
    from jetflow_core.engine import Engine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One sequence to generate: the engine's request."""

    prompt_ids: list[int]
    params: SamplingParams


class GenerationError(Exception):
    """The engine could not finish a request; the message is fit for the client."""


class Generation:
    """The jobs of one HTTP request: an async iterator of (job index, output) that ends when all jobs have.

    Raises `GenerationError` when a job fails. The owner calls `EngineService.cancel` when it stops reading.
    """

    def __init__(self, jobs: Sequence[Job], loop: asyncio.AbstractEventLoop) -> None:
        self.jobs = list(jobs)
        self.accepted: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._events: asyncio.Queue[tuple[int, Output] | GenerationError] = asyncio.Queue()
        self._open = len(self.jobs)

    def __aiter__(self) -> Generation:
        """Itself."""
        return self

    async def __anext__(self) -> tuple[int, Output]:
        """The next output of any job."""
        if self._open == 0:
            raise StopAsyncIteration
        event = await self._events.get()
        if isinstance(event, GenerationError):
            self._open = 0
            raise event
        if event[1].error is not None:
            self._open = 0
            raise GenerationError(event[1].error)
        self._open -= event[1].finish_reason is not None
        return event

    def post(self, event: tuple[int, Output] | GenerationError) -> None:
        """Hand an event to the reader (called by the engine thread)."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def answer(self, error: Exception | None) -> None:
        """Say whether the engine took the jobs (called by the engine thread)."""
        self._loop.call_soon_threadsafe(self._answer, error)

    def _answer(self, error: Exception | None) -> None:
        if self.accepted.done():  # the reader has gone
            return
        if error is None:
            self.accepted.set_result(None)
        else:
            self.accepted.set_exception(error)


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
    """Runs `engine` in a thread and serves at most `max_requests` sequences at a time, waiting ones included."""

    def __init__(self, engine: Engine, max_requests: int = 256) -> None:
        self.engine = engine
        self.max_requests = max_requests
        self.open_requests = 0
        self._commands: SimpleQueue[_Add | _Cancel | _Stop] = SimpleQueue()
        self._owners: dict[str, tuple[Generation, int]] = {}  # engine request id → its reader; the thread's own
        self._counted: set[Generation] = set()  # generations in `open_requests`; the loop's own
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="jetflow-engine", daemon=True)

    # --- the event loop's side ---

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and not self._stopping

    async def submit(self, jobs: Sequence[Job]) -> Generation:
        """Queue `jobs`, all or none. The caller must `cancel` the result when it stops reading, finished or not.

        Raises `ApiError`: 400 when the engine refuses a job, 429 when the queue is full, 503 when stopping.
        """
        self._check_room(len(jobs))
        generation = Generation(jobs, asyncio.get_running_loop())
        self._counted.add(generation)
        self.open_requests += len(jobs)
        self._commands.put(_Add(generation))
        try:
            if self._stopping:
                raise GenerationError("the engine stopped")
            await generation.accepted
        except BaseException as error:
            self.cancel(generation)
            if isinstance(error, ValueError):
                raise bad_request(str(error)) from error
            if isinstance(error, GenerationError):
                raise unavailable(str(error)) from error
            raise
        return generation

    def cancel(self, generation: Generation) -> None:
        """Free whatever `generation` still holds; harmless when it has ended or was cancelled before."""
        if generation in self._counted:
            self._counted.remove(generation)
            self.open_requests -= len(generation.jobs)
            self._commands.put(_Cancel(generation))

    def stop(self, reason: str = "the server is shutting down") -> None:
        """Take no more requests and fail the running ones with `reason`."""
        self._stopping = True
        self._commands.put(_Stop(reason))

    async def join(self) -> None:
        """Wait for the engine thread to end."""
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def _check_room(self, count: int) -> None:
        if not self.ready:
            raise unavailable("the server is shutting down" if self._stopping else "the engine is not running")
        if count > self.max_requests:
            raise bad_request(f"{count} sequences in one request; this server takes at most {self.max_requests}", "n")
        if self.open_requests + count > self.max_requests:
            raise overloaded(f"the queue is full ({self.open_requests} of {self.max_requests} sequences)")

    # --- the engine thread's side ---

    def _run(self) -> None:
        try:
            while self._obey():
                if self.engine.has_work:
                    self._step()
        except Exception as error:  # not even aborting works: no request can be served any more
            log.exception("the engine thread ended")
            self._stopping = True  # before the last look at the commands: `submit` checks it after adding one
            reason = f"the engine stopped: {type(error).__name__}: {error}"
            for generation in self._readers():
                generation.post(GenerationError(reason))
            self._refuse_waiting(reason)

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
                self._fail_all(command.reason)
                self._refuse_waiting(command.reason)
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
                answer = GenerationError(f"the engine failed to take the request: {type(error).__name__}: {error}")
            try:
                self._abort(generation)
            finally:
                generation.answer(answer)
        else:
            generation.answer(None)

    def _abort(self, generation: Generation) -> None:
        for request_id in [key for key, owner in self._owners.items() if owner[0] is generation]:
            del self._owners[request_id]
            self.engine.abort(request_id)

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:
            log.exception("a step of the engine failed")
            self._fail_all(f"the engine failed while generating: {type(error).__name__}: {error}")
            return
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is None:  # cancelled since
                continue
            if output.finish_reason is not None or output.error is not None:
                del self._owners[output.request_id]
            owner[0].post((owner[1], output))

    def _fail_all(self, reason: str) -> None:
        failed = self._readers()
        for generation in failed:  # all are told before the engine is touched again
            generation.post(GenerationError(reason))
        for generation in failed:
            self._abort(generation)

    def _readers(self) -> list[Generation]:
        return list({owner[0]: None for owner in self._owners.values()})

    def _refuse_waiting(self, reason: str) -> None:
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Add):
                command.generation.answer(GenerationError(reason))
