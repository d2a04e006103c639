"""Every message that actors send each other, in one place.

All are frozen attrs classes made of plain data, so that the same object can travel over a memory channel
or, encoded by `meshpipe.wire`, between machines. Units: positions and widths in tokens, times in seconds.

Words: a *session* is one request's life on a *lane*; a *window* is tokens at consecutive positions
`[start, start + width)`, verified in one traversal; an *epoch* counts the session's divergences.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

Rows = npt.NDArray[np.float32]
"""Activations, float32, shape (rows, n_embd), C-contiguous."""


@frozen
class Sampling:
    """How the last stage picks a token. Temperature 0 is greedy, after the penalties if there are any.

    The random stream of a position is keyed by (seed, position) alone, so that a token depends only on the
    tokens before it and the seed, never on how the positions were grouped into windows.

    `logit_bias` are (token, what is added to its logit). `grammar` is GBNF, llama.cpp's grammar format, whose
    `root` the generated text has to match; "" for none. `logprobs` asks for the log-probability of every pick,
    and of that many of the most likely tokens less one: 0 for none at all, 1 for the pick's alone.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    logprobs: int = 0


@frozen
class OpenSession:
    """Opens a session on a lane, at every stage in turn; travels in order with the windows.

    `cached` positions of the lane's cache are kept from an earlier session that shared that prefix; `prefix` is
    the digest of their tokens (`prefix_digest`), which every stage compares with what its cache holds.
    `mtp`: the session's windows may ask for native MTP's drafts, so the last stage keeps what these need.
    `hidden_from`: the last stage sends the hidden rows of confirmed positions from there on with its Reply and
    Progress messages (for a proposer at the coordinator); None: it sends none.
    `prompt`: the number of tokens that were given; what comes after them is generated, and bound by the grammar.
    `alike` is a digest of what all stages of the route compute like: a stage that held this session on this lane
    before, on a route with the same, runs nothing again that its cache still holds. b"": it runs everything.
    `held`: of each stage that the message has passed, the positions that it need not run again, as far as it knows.
    """

    session: int
    lane: int
    sampling: Sampling = Sampling()
    cached: int = 0
    prefix: bytes = b""
    mtp: bool = False
    hidden_from: int | None = None
    prompt: int = 0
    alike: bytes = b""
    held: tuple[int, ...] = ()


@frozen
class SessionOpened:
    """The last stage's word that every stage has admitted the session; `held` as in OpenSession, of all stages."""

    session: int
    held: tuple[int, ...] = ()


@frozen
class CloseSession:
    """Ends a session and frees its lane; travels in order with the windows."""

    session: int


@frozen
class Timing:
    """What one stage spent on one window: seconds queued, seconds computing, rows in the decode it shared.

    `drafting` are the seconds that native MTP took besides.
    """

    stage: int
    queued: float
    service: float
    rows: int
    drafting: float = 0.0


@frozen
class Window:
    """Tokens at positions `[start, start + len(tokens))` of a session, to be run in one traversal.

    `number` counts the session's windows in dispatch order, over all epochs. `wanted` is how many of the last
    rows want a pick in the reply: the width for a verify window, 1 for the last prefill window, 0 for the
    other prefill windows (those get no reply at all). `rows` are the activations that enter the stage:
    None on the way to the first stage, float32 (width, n_embd) afterwards. `drafts` is how many tokens of
    native MTP the reply may carry; MTP is fed with the tokens up to this window's if it is not 0.
    """

    session: int
    epoch: int
    number: int
    start: int
    tokens: tuple[int, ...]
    wanted: int
    rows: Rows | None = field(default=None, eq=False, repr=False)
    timings: tuple[Timing, ...] = ()
    drafts: int = 0

    @property
    def width(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)

    def onward(self, rows: Rows, timings: tuple[Timing, ...]) -> Window:
        """The window as it leaves a stage that is not the last: with what it made of the rows."""
        session, epoch, number, start = self.session, self.epoch, self.number, self.start
        return Window(session, epoch, number, start, self.tokens, self.wanted, rows, timings, self.drafts)


TokenLogprobs = tuple[tuple[int, float], ...]
"""(token, log-probability) of a pick, then of the most likely tokens at its position, best first."""


@frozen
class Reply:
    """The last stage's picks for a window: `tokens[i]` is its choice for position `start + i + 1`.

    `start` is the position of the first row that was wanted. May be shorter than `wanted` if its last token is
    the first that differs from the window (picking goes no further). `logprobs`, if the session asked for them,
    has one entry for each token.

    `drafts` are (token, probability) that native MTP expects after the last of `tokens`: `drafts[i]` is for
    position `start + len(tokens) + 1 + i`. `hidden`, if the session asked for it: the trunk's rows before its
    final norm, float32 (rows, n_embd), of confirmed positions up to the last pick's,
    `start + len(tokens) - 1`; it may begin before `start` (the rows of a prefill window that wanted no pick).
    """

    session: int
    epoch: int
    number: int
    start: int
    tokens: tuple[int, ...]
    timings: tuple[Timing, ...] = ()
    drafts: tuple[tuple[int, float], ...] = ()
    hidden: Rows | None = field(default=None, eq=False, repr=False)
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def stop(self) -> int:
        """The position after the last pick's row: that of the token which the last pick is."""
        return self.start + len(self.tokens)

    @property
    def hidden_start(self) -> int:
        """The position of the first row of `hidden`."""
        return self.stop - (0 if self.hidden is None else len(self.hidden))


@frozen
class Progress:
    """The last stage has run a window that wants no reply (prefill); paces the prefill windows that follow.

    `stop` is the position after the window's last; `hidden` as in Reply, ending there.
    """

    session: int
    number: int
    stop: int = 0
    hidden: Rows | None = field(default=None, eq=False, repr=False)

    @property
    def hidden_start(self) -> int:
        """The position of the first row of `hidden`."""
        return self.stop - (0 if self.hidden is None else len(self.hidden))


@frozen
class Discard:
    """A hint that windows of the session with an epoch below `epoch` are stale; overtakes queued windows."""

    session: int
    epoch: int


@frozen
class OpenReturn:
    """Asks the last stage to open a return stream to `address` (host:port) by itself; travels along the route."""

    address: str


@frozen
class SessionFailed:
    """A stage could not go on with a session; the others are not touched. `session` is None for all of them.

    `refused`: the stage did not open it, because the lane is another coordinator's or does not hold the prefix:
    another lane, or no prefix, may do. `wrong`: what was asked for is at fault, not the stage.
    """

    session: int | None
    stage: int
    reason: str
    refused: bool = False
    wrong: bool = False


@frozen
class Echo:
    """Travels the route to the last stage, past all windows, and comes back the way that replies do."""

    session: int


@frozen
class Proposal:
    """Tokens that a proposer expects at positions `start`, `start + 1`, … of epoch `epoch`.

    `source` names the proposer, for its own acceptance. `probabilities` are the proposer's own, one for each
    token, if it has any. A proposer that runs ahead says with `line` which of the session's lines it continues
    (see Follow), and with `seconds` what it has computed since its last proposal.
    """

    session: int
    epoch: int
    start: int
    tokens: tuple[int, ...]
    source: str = "ngram"
    probabilities: tuple[float, ...] = ()
    line: int = 0
    seconds: float = 0.0


@frozen
class Follow:
    """Tells a proposer that runs ahead how a session's line of tokens goes, and how far to continue it.

    From position `start` on it is `tokens`, up to there as it was told or has proposed before. If these differ
    from what was proposed, all from the first difference on is wrong. `line` counts how often the session has
    cut its line off: with a new number it ends with `tokens`, and proposals for the line before are of no more
    use. The proposer may propose for positions below `limit`; its proposals carry `epoch` and `line`.
    """

    session: int
    epoch: int
    line: int
    start: int
    tokens: tuple[int, ...]
    limit: int


@frozen
class Hidden:
    """Tells a proposer the trunk's hidden rows, float32 (n, n_embd), of positions from `start` on of its line."""

    session: int
    start: int
    rows: Rows = field(eq=False, repr=False)


@frozen
class Ping:
    """Asks a peer whether it lives; `sent` is the sender's monotonic clock in seconds."""

    nonce: int
    sent: float


@frozen
class Pong:
    """Answers a Ping: its nonce and `sent`, and the answering side's monotonic clock in seconds.

    `taken` frames have come on the data connection so far; `idle`: seconds for which that one has been waited at since
    and nothing came, 0 while nobody waits.
    """

    nonce: int
    sent: float
    clock: float
    taken: int = 0
    idle: float = 0.0


@frozen
class Record:
    """Asks every stage of a route to record spans from now on, or, with `on` false, to stop and send what it has.

    Travels down the route; each stage answers either with Spans, up the links.
    """

    on: bool


@frozen
class Spans:
    """Some of a stage's spans as bytes (`telemetry.spans.pack_spans`); `last` with the last of them.

    `full`: the recorder's ring has come round. `next_ahead` and `next_give_or_take`: the clock of the stage after
    this one against this one's, in seconds (`telemetry.clocks.Offset`); None if not known, or there is none.
    """

    stage: int
    data: bytes = b""
    last: bool = True
    full: bool = False
    next_ahead: float | None = None
    next_give_or_take: float | None = None


@frozen
class StageDescriptor:
    """What a stage is and admits: what a session, a split and a handshake are checked against.

    `layers` is the half-open range [start, stop) of `layer_count`; `context` is tokens per lane; `cost` is the
    measured seconds of one decode by number of rows, ascending in rows; `exact` says that a row's bits were
    seen not to depend on the rows it shares a decode with; `most_rows` bounds the rows of one decode. `mtp`
    counts the NextN heads with which a last stage drafts, 0: it does not; `draft_cost` are its seconds a draft.
    `fingerprint` is a digest of the bits that fixed rows gave at load: stages of the same layers that agree in it
    compute alike. `instance` names the process: after a restart it is another one, and the caches are empty.
    `version` is meshpipe's there. `vocabulary` is that of its file's `Header`, if it has one.
    """

    model_digest: str
    layers: tuple[int, int]
    layer_count: int
    n_embd: int
    n_vocab: int
    lanes: int
    context: int
    cost: tuple[tuple[int, float], ...] = ()
    exact: bool = True
    most_rows: int = 63
    mtp: int = 0
    draft_cost: float = 0.0
    fingerprint: str = ""
    instance: str = ""
    version: str = ""
    vocabulary: str = ""


PROTOCOL_VERSION = 5
"""Rises with every change to the frames or messages that an older peer would misread."""


@frozen
class Hello:
    """The first message on every connection: who calls, for what, and what it expects of the other side.

    `role` is "data" or "control" (the two connections of a link) or "return" (a return stream). `pipeline`
    names the pipeline, `link` the link whose two connections have to find each other. `stage` is the index of the
    stage called; `route` are the addresses (host:port) of the stages after it, the next first. The rest are
    expectations, None where the caller has none: the model's digest, the half-open layer range (`layers[1]`
    None: any end), the row width, lanes and tokens per lane at least; `activation` is the encoding of rows.
    `patience` is how long the caller waits for its Welcome, in seconds. `incarnation` counts how often the pipeline
    was formed: a route of an earlier one ends when a later one comes.
    """

    pipeline: str
    role: str = "data"
    protocol: int = PROTOCOL_VERSION
    nonce: bytes = b""
    link: bytes = b""
    stage: int = 0
    route: tuple[str, ...] = ()
    model_digest: str | None = None
    layers: tuple[int, int | None] | None = None
    n_embd: int | None = None
    lanes: int = 0
    context: int = 0
    activation: str = "float32"
    patience: float = field(default=20.0, converter=float)
    incarnation: int = 0


@frozen
class Challenge:
    """Asks the caller to prove that it knows the shared key."""

    nonce: bytes


@frozen
class Proof:
    """A keyed digest (HMAC-SHA-256) of the handshake so far."""

    digest: bytes


@frozen
class Welcome:
    """Accepts a Hello. `descriptors`: the answering stage's and, where it opened a route, the later ones'.

    `clock` is the answering side's monotonic clock in seconds.
    """

    protocol: int
    descriptors: tuple[StageDescriptor, ...] = ()
    clock: float = 0.0


@frozen
class Refusal:
    """Declines a Hello (or fails a question asked over a link) with the reason, in words.

    `stage` is the index of the stage on the route that could not be reached or did not agree, if it is known;
    `lost` if it could not be reached, so that the same call may succeed later.
    """

    reason: str
    stage: int | None = None
    lost: bool = False


CONTROL, REPLIES, WINDOWS = "control", "replies", "windows"
"""The queues of every mailbox, most urgent first: none of them waits behind a later one."""


def queue_of(message: object) -> str:
    """The queue that a message waits in. Opening and closing a session travel in order with its windows."""
    if isinstance(message, (Window, OpenSession, CloseSession)):
        return WINDOWS
    if isinstance(message, (Reply, Progress, SessionOpened)):
        return REPLIES
    return CONTROL
