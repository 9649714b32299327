"""One plain stream: its first and last chunks are vLLM's, those in between are written here.

vLLM's stream generator asks for the request's results here instead of at ``AsyncLLM.generate``. It gets those of which
it must make a chunk; the program runs in its task, and the other outputs never leave this class.

Relies on ``AsyncLLM.add_request`` validating a request, registering it with the ``OutputProcessor`` and giving it to
the engine-core client; on ``process_outputs`` putting what it makes of an output into the request's queue at once; on
``RequestState`` having ``detokenizer`` and ``stats``; and on stream generators counting the ``token_ids`` they see.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, aclosing
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreOutput, FinishReason

from tercet.protocol import EngineError, Output
from tercet.router.context import held
from tercet.router.program_outputs import ProgramOutputs
from tercet.router.streaming.connection import Connection
from tercet.router.streaming.pieces import Pieces, look_up
from tercet.router.streaming.stats import StreamStats
from tercet.router.streaming.template import Template, template_of

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import OutputProcessor


class PlainStream:
    """A stream whose chunks are written to ``connection`` from a template, once vLLM has written one of them.

    ``finished`` once vLLM has the last result.
    """

    def __init__(
        self, connection: Connection, processor: OutputProcessor, stats: StreamStats, pieces: Pieces | None
    ) -> None:
        self.connection = connection
        self._processor = processor
        self._stats = stats
        self._pieces = pieces
        # Gives the text of the next token where the detokenizer does nothing else with it.
        self._decode_next: Callable[[int], str] | None = None
        self._template: Template | None = None
        self._outputs: ProgramOutputs | None = None
        self._state: Any = None
        # Tokens that vLLM's stream generator has not counted yet.
        self._uncounted: list[int] = []
        self._results: AsyncGenerator[RequestOutput, None] | None = None
        self.finished = False
        # What the program has brought vLLM, and vLLM has not asked for yet.
        self._waiting: EngineCoreOutput | Exception | None = None

    # ---- what vLLM's stream generator sees -------------------------------------------------------------------

    def generate(self, add_request: Callable[[], Awaitable[Any]]) -> AsyncGenerator[RequestOutput, None]:
        """The results of the request that ``add_request`` adds; in place of ``AsyncLLM.generate``."""
        self._results = self._run(add_request)
        return self._results

    def begin(self, outputs: ProgramOutputs) -> None:
        """The engine-core client got the request, whose ``outputs`` these are; called while it is being added."""
        self._state = self._processor.request_states[outputs.seq_id]
        self._outputs = outputs
        outputs.stream.callback = self.take
        detokenizer = self._state.detokenizer
        decode_next = look_up(detokenizer, self._pieces, self._state.prompt_token_ids or ())
        if decode_next is not None and not detokenizer.stop:
            self._decode_next = decode_next

    def learn(self, chunk: str) -> None:
        """A chunk of vLLM's is on the socket."""
        if self._template is None and self.connection.is_chunked:
            self._template = template_of(chunk)

    async def close(self) -> None:
        """End the program, if it still runs."""
        if self._results is not None:
            await self._results.aclose()

    async def _run(self, add_request: Callable[[], Awaitable[Any]]) -> AsyncGenerator[RequestOutput, None]:
        queue = await add_request()
        outputs = self._outputs
        if outputs is None:
            raise RuntimeError("vLLM added a request without telling its engine-core client")
        try:
            with outputs.failures():
                async with aclosing(outputs.stream):
                    while not self.finished:
                        result = self._process(await self._next_for_vllm(), queue)
                        if result is None:
                            continue
                        self.finished = result.finished
                        # The client has it before the program goes on to what the next one needs.
                        yield result
        finally:
            self._processor.abort_requests((self._state.request_id,), internal=True)
            queue.close()

    async def _next_for_vllm(self) -> EngineCoreOutput:
        await self.pump()
        found, self._waiting = self._waiting, None
        if isinstance(found, EngineCoreOutput):
            return found
        raise found or EngineError("the program ended before its sequence did")

    def _process(self, output: EngineCoreOutput, queue: Any) -> RequestOutput | None:
        """What vLLM makes of an output, with the tokens counted in that it did not see."""
        self._processor.process_outputs([output], time.monotonic(), self._stats.iteration())
        result = queue.get_nowait()
        if result is not None and self._uncounted:
            completion = result.outputs[0]
            completion.token_ids = [*self._uncounted, *completion.token_ids]
            self._uncounted = []
        return result

    # ---- the short way ---------------------------------------------------------------------------------------

    @property
    def writes(self) -> bool:
        """Whether it knows how: vLLM has made a chunk of all that it was given, and chunks look alike from now on."""
        return self._template is not None

    async def pump(self) -> None:
        """Run the program and write its outputs, until there is one, or an error, that is vLLM's to handle.

        vLLM's stream generator would do it by asking for its next result. Done before, the program's outputs do not
        wake up all the generators between. Most do not even wake up this task: see :meth:`take`.
        """
        outputs = self._outputs
        if outputs is None or self._waiting is not None or self.finished:
            return
        try:
            while (output := await anext(outputs.stream, None)) is not None:
                if self._waiting is not None:  # from this output, by :meth:`take`
                    return
                self._waiting = self.write(output) if self._takes(output) else outputs.to_core_output(output)
                if self._waiting is not None:
                    return
                self.connection.flush()
                if self.connection.is_full:
                    await self.connection.has_room()
        except Exception as error:  # raised where vLLM asks for its next result
            self._waiting = error

    def take(self, output: Output) -> bool:
        """Write an output as soon as it arrives, while :meth:`pump` waits for it; as its callback does.

        One that :meth:`pump` has to act on is left to it: where the text ends here, where writing failed, and while the
        client does not read.
        """
        if self.connection.is_full or not self._takes(output):
            return False
        try:
            self._waiting = self.write(output)
        except Exception as error:
            self._waiting = error
        return self._waiting is None

    def _takes(self, output: Output) -> bool:
        return (
            self._template is not None
            and output.finish_reason is None
            and output.logprobs is None
            and bool(output.token_ids)
        )

    def write(self, output: Output) -> EngineCoreOutput | None:
        """Send the text of its tokens; returns the end of the stream instead, if they complete a stop string.

        The text before a stop string is not sent: it belongs to the last chunk, which is vLLM's.
        """
        template, num_tokens = self._template, len(output.token_ids)
        if template is None:
            raise RuntimeError("the stream has no template to write by")
        stop, text = self._detokenize(output.token_ids)
        if stop is not None:
            self._stats.count(self._state.stats, num_tokens)
            return EngineCoreOutput(
                request_id=self._state.request_id, new_token_ids=[], finish_reason=FinishReason.STOP, stop_reason=stop
            )
        self._stats.observe(self._state.stats, num_tokens)
        self.connection.write(template.frame(text))
        return None

    def _detokenize(self, token_ids: Sequence[int]) -> tuple[str | None, str]:
        """The stop string that these tokens complete, if any, and their text."""
        detokenizer = self._state.detokenizer
        if self._decode_next is not None:
            # As vLLM does it, but for keeping the text: what is sent is not asked for again.
            detokenizer.token_ids.extend(token_ids)
            self._uncounted.extend(token_ids)
            return None, "".join(map(self._decode_next, token_ids))
        before = detokenizer.num_output_tokens()
        stop = detokenizer.update(list(token_ids), False)
        # A stop string inside several tokens of one step drops those behind it.
        self._uncounted += token_ids[: detokenizer.num_output_tokens() - before]
        return stop, "" if stop is not None else detokenizer.get_next_output_text(False, True)


_current: ContextVar[PlainStream | None] = ContextVar("tercet_stream", default=None)


def current_stream() -> PlainStream | None:
    """The plain stream being served, if the request is one."""
    return _current.get()


def serving(stream: PlainStream) -> AbstractContextManager[None]:
    """While entered, the current task serves this stream."""
    return held(_current, stream)
