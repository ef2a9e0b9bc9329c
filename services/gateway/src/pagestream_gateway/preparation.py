"""Turn drafts into the records that the queue carries: render, tokenize, check against the model.

Drafts that arrive at the same time are rendered and tokenized together, in the pool's threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

from pagestream.v1.inference_pb2 import ON_DISCONNECT_CANCEL, ON_DISCONNECT_UNSPECIFIED, SamplingParams, TokenIds
from pagestream.v1.records_pb2 import API_FORM_GRPC, Adapter, Pooling, RequestSpec
from pagestream_streams.protocol.records import num_sequences
from pagestream_telemetry.tracing import NO_TRACE, TraceContext

from pagestream_gateway.errors import InvalidRequest, Overloaded, UnsupportedField
from pagestream_gateway.models import LoadedModel
from pagestream_gateway.output_formats.formats import may_call, shows_special_tokens
from pagestream_gateway.output_formats.grammar import with_calls
from pagestream_gateway.pooling import (
    check_inputs,
    is_cross_encoder,
    resolve_pooling,
    sampling_of_vectors,
)
from pagestream_gateway.request import ChatPrompt, Draft, TextPrompt, most_tokens
from pagestream_gateway.sampling import fit_context, resolve_sampling
from pagestream_gateway.settings import LimitSettings
from pagestream_gateway.text.encoder import PIECE_CHARS, Encoded, EncodingCache, EncodingJob, TextEncoder
from pagestream_gateway.text.prompts import begin, cut_prompts, echo_of, encoding_pairs, truncation_of, with_short_texts
from pagestream_gateway.text.tokenization import TokenizePool, error_of_work

_NEW_CONSTRAINTS = ("allowed_token_ids", "bad_words")
"""Parameters that engines would skip whose card has no `takes_output_constraints`."""
_MOST_SHOWN_IDS = 2**20  # of prompts in an answer: about 7 MB


@dataclass(frozen=True)
class PreparedRequest:
    """A draft with its prompts as token ids and its sampling parameters complete."""

    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    echo_texts: list[str]
    first_tokens: Sequence[str] = ()
    """Text of each prompt's first token, where log probabilities are echoed."""
    pooling: Pooling | None = None
    """How vectors are made of the prompts; None: they have outputs."""
    max_total_tokens: int = 0
    """Of a prompt and its output together, where prompts leave less than sampling.max_tokens; 0: none does."""


Preparation = Generator[list[EncodingJob], list[Encoded], PreparedRequest]


def prepare(draft: Draft, model: LoadedModel, limits: LimitSettings) -> PreparedRequest:
    """Do all that `preparing` does, and encode without a cache."""
    preparation = preparing(draft, model, limits, b"")
    jobs = next(preparation)
    try:
        preparation.send(model.encoder.encode_batch(jobs, EncodingCache(0)))
    except StopIteration as done:
        prepared: PreparedRequest = done.value
        return prepared
    raise RuntimeError("a preparation yields once")


def preparing(draft: Draft, model: LoadedModel, limits: LimitSettings, scope: bytes) -> Preparation:
    """Render a draft and check it against its model; yield once, the texts to encode, and get what came of them.

    `scope`: the request's cache salt, see EncodingJob. This is CPU work: the pool does it. Raises InvalidRequest.
    """
    if (asked := draft.pooling) is not None:
        pooling = resolve_pooling(asked, model.card)
        reads_pairs = is_cross_encoder(asked, model.card)
        draft.answer.vectors.num_queries = 0 if reads_pairs else asked.num_queries
        draft = with_short_texts(draft, asked, model)
        if reads_pairs:
            prompts = yield from encoding_pairs(draft, asked, model, limits, scope)
        else:
            prompts = cut_prompts(draft, (yield from _encoding(draft, model, limits, scope)), model)
        check_inputs(prompts, draft.prompt_field, pooling, draft.answer, limits)
        draft.answer.vectors.labels[:] = model.card.embedding.labels if asked.classifies else []
        return PreparedRequest(prompts, sampling_of_vectors(), [], pooling=pooling)
    sampling = _sampling_of(draft, model, limits)
    truncation_of(draft, model)  # refuses a wrong one before its prompts are encoded
    whole = yield from _encoding(draft, model, limits, scope)
    if draft.is_counted:
        return PreparedRequest(whole, sampling, [])
    prompts = cut_prompts(draft, whole, model)
    if draft.answer.api != API_FORM_GRPC and shows_special_tokens(draft.answer.output, model):
        sampling.skip_special_tokens = False
    _check_prompt_logprobs(sampling, sum(map(len, prompts)), limits)
    total = fit_context(
        sampling,
        is_given=draft.sampling.HasField("max_tokens"),
        prompt_lengths=[len(ids) for ids in prompts],
        max_model_len=model.max_model_len,
        default_model_len=model.card.default_model_len,
        default=draft.default_max_tokens,
        prompt_field=draft.prompt_field,
    )
    _check_shown_ids(draft, sampling, sum(map(len, prompts)))
    cuts = zip(draft.prompts, whole, prompts, strict=True)
    echo_texts = [echo_of(prompt, all_ids, ids, model) for prompt, all_ids, ids in cuts] if draft.echo else []
    firsts = [ids[0] for ids in prompts] if draft.answer.echo_logprobs else []
    first_tokens = [model.tokens.spelled(token_id).decode(errors="replace") for token_id in firsts]
    return PreparedRequest(prompts, sampling, echo_texts, first_tokens, max_total_tokens=total)


def check_parameters(draft: Draft, model: LoadedModel, limits: LimitSettings) -> None:
    """Check what a draft asks for, but not whether its prompts fit the model. Raises InvalidRequest."""
    truncation_of(draft, model)
    if draft.pooling is not None:
        resolve_pooling(draft.pooling, model.card)
    else:
        _sampling_of(draft, model, limits)


def _sampling_of(draft: Draft, model: LoadedModel, limits: LimitSettings) -> SamplingParams:
    given = _constrained(draft, model)
    for name in _NEW_CONSTRAINTS:
        if getattr(given, name) and not model.card.takes_output_constraints:
            raise UnsupportedField(name, f"the engines of model {model.name} are of an earlier version")
    sampling = resolve_sampling(given, model.default_sampling, limits=limits, vocab_size=model.card.vocab_size)
    if draft.chosen_seed is not None:
        sampling.seed = draft.chosen_seed
    num_choices = len(draft.prompts) * num_sequences(sampling)
    if num_choices > limits.max_choices:
        field = next((name for name in ("beam_width", "best_of") if getattr(sampling, name) > sampling.n), "n")
        raise InvalidRequest(
            field, f"prompts times {field} is {num_choices}, at most {limits.max_choices} are served at once"
        )
    return sampling


def _constrained(draft: Draft, model: LoadedModel) -> SamplingParams:
    """Return what the caller asks for; where a form is asked for beside tools that may be called, a grammar of both."""
    for prompt in draft.prompts:
        has_form = draft.sampling.HasField("structured_outputs")
        if has_form and isinstance(prompt, ChatPrompt) and may_call(prompt, model):
            both = with_calls(draft.sampling.structured_outputs, prompt.tools, model, "structured_outputs")
            given = SamplingParams()
            given.CopyFrom(draft.sampling)
            given.structured_outputs.CopyFrom(both)
            return given
    return draft.sampling


def _encoding(
    draft: Draft, model: LoadedModel, limits: LimitSettings, scope: bytes
) -> Generator[list[EncodingJob], list[Encoded], list[Sequence[int]]]:
    """Yield the texts to encode, get what came of them, and return the prompts' token ids."""
    most = most_tokens(draft, model.max_model_len, limits)
    begun = [begin(prompt, draft, model, scope, most) for prompt in draft.prompts]
    found = iter((yield [each for each in begun if isinstance(each, EncodingJob)]))
    prompts = [model.ids_of(each, next(found)) if isinstance(each, EncodingJob) else each for each in begun]
    if not all(prompts) and not draft.is_counted:
        raise InvalidRequest(draft.prompt_field, "has no token")
    return prompts


def build_spec(
    draft: Draft,
    prepared: PreparedRequest,
    *,
    request_id: str,
    model: str,
    adapter: Adapter | None = None,
    tenant: str,
    credential: str = "",
    grace_ms: int,
    priority: int = 0,
    cache_salt: bytes = b"",
    trace: TraceContext = NO_TRACE,
) -> RequestSpec:
    """Return the record that the queue carries.

    `adapter`: that its tokens are computed with; `credential`: the name of its caller's; `priority`: the class that
    it gets, whatever the draft asks for; `trace`: that of the call that it belongs to.
    """
    spec = RequestSpec(
        request_id=request_id,
        model=model,
        adapter=adapter,
        tenant=tenant,
        credential=" ".join(credential.split()),
        prompts=[TokenIds(ids=ids) for ids in prepared.prompts],
        sampling=prepared.sampling,
        max_total_tokens=prepared.max_total_tokens,
        reasoning=draft.marks if draft.marks.HasField("end") else None,
        pooling=prepared.pooling,
        priority=priority,
        deadline_ms=draft.deadline_ms,
        on_disconnect=ON_DISCONNECT_CANCEL if draft.on_disconnect == ON_DISCONNECT_UNSPECIFIED else draft.on_disconnect,
        disconnect_grace_ms=grace_ms,
        answer=draft.answer,
        client_request_id=draft.client_request_id,
        idempotency_key=draft.idempotency_key,
        cache_salt=cache_salt,
        traceparent=trace.traceparent,
        tracestate=trace.tracestate,
        ends_when_accepted=draft.is_prompt_alone,
        seed_for_each_prompt=len(prepared.prompts) > 1 and not draft.sampling.HasField("seed"),
    )
    spec.answer.echo_texts.extend(prepared.echo_texts)
    spec.answer.first_tokens.extend(prepared.first_tokens)
    if draft.idempotency_key and not draft.sampling.HasField("seed"):
        spec.sampling.seed = _seed_of_key(draft, tenant)
    return spec


def _seed_of_key(draft: Draft, tenant: str) -> int:
    """Return the same seed for each try with an idempotency key: one that runs again after a loss has the same tokens.

    A try may run under an earlier one's id after Redis has lost or dropped its record.
    """
    text = f"{len(tenant)}:{tenant}{len(draft.idempotency_key)}:{draft.idempotency_key}{draft.body_digest}"
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


def _check_shown_ids(draft: Draft, sampling: SamplingParams, num_tokens: int) -> None:
    """Refuse more token ids of prompts than an answer may show; each choice repeats them. Raises InvalidRequest."""
    shown = num_tokens * max(1, sampling.n)
    if draft.answer.token_ids and shown > _MOST_SHOWN_IDS:
        raise InvalidRequest(
            "return_token_ids", f"choices would show {shown} ids of prompts, at most {_MOST_SHOWN_IDS} are shown"
        )


def _check_prompt_logprobs(sampling: SamplingParams, num_tokens: int, limits: LimitSettings) -> None:
    """Refuse more log probabilities of prompts than a log may have. Raises InvalidRequest."""
    if not sampling.HasField("prompt_logprobs"):
        return
    wanted = num_tokens * (1 + sampling.prompt_logprobs)
    if wanted > limits.max_prompt_logprobs:
        raise InvalidRequest(
            "prompt_logprobs",
            f"{num_tokens} tokens of prompts and {sampling.prompt_logprobs} likeliest ones at each are {wanted} log "
            f"probabilities, at most {limits.max_prompt_logprobs} are given at once",
        )


logger = logging.getLogger(__name__)

_MOST_REQUESTS = 32  # of a batch: the first one waits for the rendering of the last one
_MOST_CHARS = 4 * PIECE_CHARS  # of a batch


class _Work:
    """One draft on its way through a thread."""

    def __init__(self, preparation: Preparation, encoder: TextEncoder, *, cuts_long_texts: bool) -> None:
        self.encoder = encoder
        self.cuts_long_texts = cuts_long_texts
        self.jobs: list[EncodingJob] = []
        self.done: asyncio.Future[PreparedRequest] = asyncio.get_running_loop().create_future()
        self._preparation = preparation
        self._outcome: PreparedRequest | Exception | None = None

    def render(self) -> bool:
        """Render the texts; return whether that succeeded."""
        try:
            self.jobs = next(self._preparation)
        except BaseException as error:  # noqa: BLE001  it is raised where the draft is waited for
            self._outcome = error_of_work(error)
        return self._outcome is None

    def encode(self, cache: EncodingCache) -> None:
        """Encode the texts alone, one after the other."""
        try:
            found = [self.encoder.encode_batch([job], cache)[0] for job in self.jobs]
        except BaseException as error:  # noqa: BLE001  it is raised where the draft is waited for
            self._outcome = error_of_work(error)
        else:
            self.finish(iter(found))

    def finish(self, found: Iterator[Encoded]) -> None:
        """Take what came of the texts."""
        try:
            self._preparation.send([next(found) for _ in self.jobs])
        except StopIteration as done:
            self._outcome = done.value
        except BaseException as error:  # noqa: BLE001  it is raised where the draft is waited for
            self._outcome = error_of_work(error)

    def deliver(self) -> None:
        """Give the outcome to who waits for it; called by the event loop."""
        if self.done.done():
            return
        if isinstance(self._outcome, PreparedRequest):
            self.done.set_result(self._outcome)
        else:
            self.done.set_exception(self._outcome or RuntimeError("the draft was not prepared"))


class EncoderPool:
    """One for a gateway: threads that take what waits in batches, and a cache of parts of prompts."""

    def __init__(self, pool: TokenizePool, limits: LimitSettings) -> None:
        """`pool`: the threads, which also parse; its bound and its limit count for each draft."""
        self._pool = pool
        self._limits = limits
        self._waiting: deque[_Work] = deque()
        self._lock = Lock()
        self._num_draining = 0
        self._num_pending = 0
        self.cache = EncodingCache(limits.encoding_cache_bytes)

    async def prepare(self, draft: Draft, model: LoadedModel, scope: bytes) -> PreparedRequest:
        """Return what a draft is turned into; see `preparing`. Raises InvalidRequest, Overloaded."""
        limits = self._limits
        if self._num_pending >= limits.tokenize_queue:
            raise Overloaded(
                f"too many requests wait for the tokenizer, at most {limits.tokenize_queue}", retry_after_s=1.0
            )
        work = _Work(preparing(draft, model, limits, scope), model.encoder, cuts_long_texts=_cuts_long_texts(draft))
        self._num_pending += 1
        with self._lock:
            self._waiting.append(work)
            is_enough = self._num_draining >= limits.tokenize_workers
            self._num_draining += not is_enough
        if not is_enough:
            loop = asyncio.get_running_loop()
            self._pool.start(lambda: self._drain(loop))
        try:
            async with asyncio.timeout(limits.tokenize_limit_s):
                return await work.done
        except TimeoutError as error:
            raise Overloaded(f"tokenizing took longer than {limits.tokenize_limit_s:g} s", retry_after_s=5.0) from error

    def _drain(self, loop: asyncio.AbstractEventLoop) -> None:
        """Prepare what waits, batch after batch, until nothing does; runs in a thread."""
        while batch := self._take():
            try:
                self._prepare(batch, loop)
            except BaseException:
                logger.exception("a batch of prompts failed")
            _call(loop, _deliver, batch)  # those that failed with it
            _call(loop, self._release, len(batch))

    def _take(self) -> list[_Work]:
        with self._lock:
            batch = [self._waiting.popleft() for _ in range(min(_MOST_REQUESTS, len(self._waiting)))]
            self._num_draining -= not batch
        return batch

    def _prepare(self, batch: list[_Work], loop: asyncio.AbstractEventLoop) -> None:
        """Encode short texts together; then, one after the other, what is long, for which no other one waits."""
        cutting = [work for work in batch if work.cuts_long_texts]
        rendered = [work for work in batch if work not in cutting and work.render()]
        long = [work for work in rendered if sum(len(job.text) for job in work.jobs) > PIECE_CHARS]
        for group in _groups([work for work in rendered if work not in long]):
            self._encode_together(group)
        _call(loop, _deliver, [work for work in batch if work not in long and work not in cutting])
        for work in (*long, *cutting):
            if work in long or work.render():
                work.encode(self.cache)
            _call(loop, _deliver, [work])

    def _encode_together(self, group: list[_Work]) -> None:
        """Encode the texts of works with one encoder; alone where a defect of one text would fail all of them."""
        try:
            found = iter(group[0].encoder.encode_batch([job for work in group for job in work.jobs], self.cache))
        except BaseException:  # noqa: BLE001  it is raised again for the text that causes it
            for work in group:
                work.encode(self.cache)
            return
        for work in group:
            work.finish(found)

    def _release(self, count: int) -> None:
        self._num_pending -= count


def _cuts_long_texts(draft: Draft) -> bool:
    """Whether texts are encoded already while they are rendered, to be cut, and long ones."""
    asked = draft.pooling
    if asked is None or not (asked.num_query_tokens or asked.num_doc_tokens):
        return False
    return sum(len(prompt.text) for prompt in draft.prompts if isinstance(prompt, TextPrompt)) > PIECE_CHARS


def _groups(works: list[_Work]) -> Iterator[list[_Work]]:
    """Yield the works with the same encoder, in groups of a bounded number of characters."""
    by_encoder: defaultdict[int, list[_Work]] = defaultdict(list)
    for work in works:
        by_encoder[id(work.encoder)].append(work)
    for same in by_encoder.values():
        group, num_chars = list[_Work](), 0
        for work in same:
            size = sum(len(job.text) for job in work.jobs)
            if group and num_chars + size > _MOST_CHARS:
                yield group
                group, num_chars = [], 0
            group.append(work)
            num_chars += size
        yield group


def _deliver(works: list[_Work]) -> None:
    for work in works:
        work.deliver()


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], argument: object) -> None:
    """Call from a thread in the event loop, unless that is closed."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, argument)
