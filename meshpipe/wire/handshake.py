"""The handshake that every connection begins with.

    caller                                   answerer
    Hello (who, what for, expectations) ->
                                          <- Challenge (nonce)         only with a shared key
    Proof                               ->
                                          <- Proof
                                          <- Welcome (descriptors)     or Refusal (reason), at any point

Until it is over, frames are small and carry no payload. The answerer learns the Hello only after the caller has
proven that it knows the key. A side that has a key never goes on without the other's proof.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

import trio
from attrs import evolve

from meshpipe.errors import HandshakeError, StageLostError
from meshpipe.messages import (
    PROTOCOL_VERSION,
    Challenge,
    Hello,
    Proof,
    Refusal,
    StageDescriptor,
    Welcome,
)

from .codec import ENCODINGS, encode
from .connections import Connection
from .frames import Frame, Limits
from .security import NONCE_SIZE, nonce, proof

ROLES = ("data", "control", "return")


async def greet(connection: Connection, hello: Hello, key: bytes | None = None) -> Welcome:
    """The caller's side; fills in the Hello's nonce and protocol version. Returns the answerer's Welcome.

    Afterwards rows are sent in the Hello's activation type and frames of the usual size are accepted. Raises
    `HandshakeError` if the answerer refuses or does not know the key, `StageLostError` (also if the answerer did not
    reach a stage behind it), `ProtocolError`.
    """
    hello = evolve(hello, protocol=PROTOCOL_VERSION, nonce=nonce())
    asked = trio.current_time()
    await connection.send(Frame(hello))
    answer = await _receive(connection)
    if key is not None:
        if not isinstance(answer, Challenge):
            raise HandshakeError(
                f"{connection.peer} has no shared key, this side has one; give it to both or none"
            )
        said, _ = encode(hello)
        asked = trio.current_time()
        await connection.send(Frame(Proof(proof(key, "caller", said, answer.nonce))))
        theirs = await _receive(connection)
        if not isinstance(theirs, Proof) or not hmac.compare_digest(
            theirs.digest, proof(key, "answerer", said, answer.nonce)
        ):
            raise HandshakeError(f"{connection.peer} does not know the shared key that this side has")
        answer = await _receive(connection)
    if isinstance(answer, Challenge):
        raise HandshakeError(
            f"{connection.peer} asks for a shared key, this side has none; give it the same key"
        )
    if not isinstance(answer, Welcome):
        raise HandshakeError(f"{connection.peer} answered a Hello with {type(answer).__name__}")
    connection.clocks = (asked, answer.clock, trio.current_time())
    connection.agree(hello.activation, Limits(columns=hello.n_embd))
    return answer


async def receive_hello(connection: Connection, key_for: Callable[[int], bytes | None]) -> Hello:
    """The answerer's side, up to the point where it has to say `welcome` or `refuse`.

    `key_for` gives the shared key, if there is one, by the stage that the caller calls for.

    Raises `HandshakeError`, after telling the caller, if the caller speaks another version, asks for what does
    not exist or does not know the key.
    """
    hello = await _receive(connection)
    if not isinstance(hello, Hello):
        raise HandshakeError(f"{connection.peer} began with {type(hello).__name__}, not with Hello")
    try:
        if hello.protocol != PROTOCOL_VERSION:
            raise HandshakeError(
                f"protocol version: the caller has {hello.protocol}, this side {PROTOCOL_VERSION}; "
                "run the same meshpipe on both"
            )
        if hello.role not in ROLES:
            raise HandshakeError(f"role: the caller has {hello.role!r}, this side knows {', '.join(ROLES)}")
        if hello.activation not in ENCODINGS:
            raise HandshakeError(
                f"activation type: the caller has {hello.activation!r}, this side knows {', '.join(ENCODINGS)}"
            )
        if (key := key_for(hello.stage)) is not None:
            await _prove(connection, hello, key)
    except HandshakeError as error:
        await refuse(connection, str(error))
        raise
    return hello


async def _prove(connection: Connection, hello: Hello, key: bytes) -> None:
    if len(hello.nonce) != NONCE_SIZE:
        raise HandshakeError(f"nonce: the caller has {len(hello.nonce)} bytes, this side needs {NONCE_SIZE}")
    challenge = Challenge(nonce())
    said, _ = encode(hello)
    await connection.send(Frame(challenge))
    theirs = await _receive(connection)
    expected = proof(key, "caller", said, challenge.nonce)
    if not isinstance(theirs, Proof) or not hmac.compare_digest(theirs.digest, expected):
        raise HandshakeError("the caller does not know the shared key that this side has")
    await connection.send(Frame(Proof(proof(key, "answerer", said, challenge.nonce))))


async def welcome(
    connection: Connection, hello: Hello, descriptors: tuple[StageDescriptor, ...] = ()
) -> None:
    """Accepts; `descriptors` are this stage's and those after it. From now on frames of the usual size pass."""
    await connection.send(Frame(Welcome(PROTOCOL_VERSION, descriptors, trio.current_time())))
    columns = descriptors[0].n_embd if descriptors else hello.n_embd
    connection.agree(hello.activation, Limits(columns=columns))


async def refuse(
    connection: Connection, reason: str, stage: int | None = None, *, lost: bool = False
) -> None:
    """Declines, with the reason, the stage that it is about, and whether that could not be reached.

    The connection is of no more use.
    """
    await connection.send(Frame(Refusal(reason, stage, lost)))


def check_hello(hello: Hello, descriptor: StageDescriptor) -> None:
    """Whether this stage is what the caller expects. Raises `HandshakeError` naming all that differs."""
    differences: list[str] = []

    def compare(what: str, theirs: object, ours: object, agree: bool, remedy: str = "") -> None:
        if not agree:
            differences.append(f"{what}: the caller has {theirs}, stage {hello.stage} has {ours}{remedy}")

    digest, layers = hello.model_digest, hello.layers
    compare("model digest", digest, descriptor.model_digest, digest in (None, descriptor.model_digest))
    if layers is not None:
        same = layers[0] == descriptor.layers[0] and layers[1] in (None, descriptor.layers[1])
        theirs = f"{layers[0]}:{'' if layers[1] is None else layers[1]}"
        compare("layers", theirs, f"{descriptor.layers[0]}:{descriptor.layers[1]}", same)
    compare("row width", hello.n_embd, descriptor.n_embd, hello.n_embd in (None, descriptor.n_embd))
    for what, flag, least, most in (
        ("lanes", "--lanes", hello.lanes, descriptor.lanes),
        ("context per lane", "--context", hello.context, descriptor.context),
    ):
        compare(what, least, most, least <= most, f" (start it with {flag} {least}, or ask for less)")
    if differences:
        raise HandshakeError("; ".join(differences))


async def _receive(connection: Connection) -> object:
    message = (await connection.receive()).message
    if isinstance(message, Refusal):
        kind = StageLostError if message.lost else HandshakeError
        error = kind(f"{connection.peer} refused: {message.reason}")
        error.stage = message.stage
        raise error
    return message
