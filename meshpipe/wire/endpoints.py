"""Endpoints: reaching a stage, and being reached.

A link is two connections, which name the same `link` in their Hello. The caller opens the control connection
first, which is answered at once, then the data connection, whose Welcome says that all is ready. A return
stream is one connection.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import trio
from attrs import define, evolve, field, frozen

from meshpipe.errors import MeshpipeError, ProtocolError, StageLostError, UsageError
from meshpipe.messages import Hello, StageDescriptor, Welcome

from .connections import SocketConnection, tcp, tls
from .handshake import greet, receive_hello, refuse, welcome
from .security import OPEN, Security, check_listen

log = logging.getLogger("meshpipe.wire")

WARM_UP = 20.0
"""Seconds to connect while a pipeline starts."""
STEADY = 3.0
"""Seconds to connect once it runs: a healthy peer answers in milliseconds."""
UNFINISHED = 64
"""Handshakes at a time; further callers are turned away until one is over."""


@frozen
class Address:
    """A host and a TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """From "host:port" or "[v6]:port". Raises `UsageError`."""
        host, colon, port = text.rpartition(":")
        digits = len(port) <= 5 and port.isascii() and port.isdigit()  # `int` refuses to read thousands
        if not (colon and host and digits and int(port) < 65536):
            raise UsageError(f"expected an address like 127.0.0.1:7000 or [::1]:7000, got {text[:100]!r}")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


# ---- calling ------------------------------------------------------------------------------------------


async def connect(
    address: Address, hello: Hello, security: Security = OPEN, deadline: float = WARM_UP
) -> tuple[SocketConnection, Welcome]:
    """One connection, greeted, within `deadline` seconds (`WARM_UP` or `STEADY`).

    Raises `StageLostError` if nobody answers there, `HandshakeError` if the answerer refuses: for the stage that was
    called, or the one behind it that the answerer names. Nobody knows for which if a link's data connection was
    opened, and its Welcome, which waits for all stages behind, did not come in time.
    """
    connection: SocketConnection | None = None
    try:
        with trio.fail_after(deadline):
            connection = await _reach(address, security)
            return connection, await greet(connection, hello, security.key_for(hello.stage))
    except trio.TooSlowError:
        failure: MeshpipeError = StageLostError(f"{address} did not answer within {deadline:g} s")
        failure.stage = None if hello.role == "data" and connection is not None else hello.stage
    except (OSError, UnicodeError) as error:  # UnicodeError: it cannot be the name of a host
        failure = StageLostError(f"cannot reach {address}: {_innermost(error)}")
        failure.stage = hello.stage
    except MeshpipeError as error:
        failure = error
        failure.stage = hello.stage if error.stage is None else error.stage
    except BaseException:
        await _close(connection)
        raise
    await _close(connection)
    raise failure


async def connect_link(
    address: Address, hello: Hello, security: Security = OPEN, deadline: float = WARM_UP
) -> tuple[SocketConnection, SocketConnection, Welcome]:
    """The data and the control connection of a link, and the Welcome, within `deadline` seconds."""
    hello = evolve(hello, link=secrets.token_bytes(16), patience=deadline)
    end = trio.current_time() + deadline
    control, _ = await connect(address, evolve(hello, role="control"), security, deadline)
    try:
        data, answer = await connect(
            address, evolve(hello, role="data"), security, max(0.0, end - trio.current_time())
        )
    except BaseException:
        await _close(control)
        raise
    return data, control, answer


async def _reach(address: Address, security: Security) -> SocketConnection:
    stream = await trio.open_tcp_stream(address.host, address.port)
    if security.client is None:
        return tcp(stream, str(address))
    return await tls(stream, str(address), security.client, host=address.host)


def _innermost(error: BaseException) -> str:
    """The operating system's own words for why an address could not be reached."""
    while (cause := error.__cause__) is not None:
        error = getattr(cause, "exceptions", [cause])[0]  # one for each address that the host has
    code = error.errno if isinstance(error, OSError) and not isinstance(error, socket.gaierror) else None
    if code is not None and code in errno.errorcode:
        return os.strerror(code)  # without the address, which is said already
    return str(error)


async def _close(connection: SocketConnection | None) -> None:
    if connection is not None:
        with trio.CancelScope(shield=True):
            await connection.aclose()


# ---- answering ----------------------------------------------------------------------------------------


@frozen(eq=False)
class _Control:
    """A control connection whose data connection is to come; its task stays until the link is over."""

    connection: SocketConnection
    taken: trio.Event = field(factory=trio.Event)
    over: trio.Event = field(factory=trio.Event)


@define(eq=False)
class Call:
    """Somebody who has called and waits for `accept`. `control` is None on a return stream."""

    hello: Hello
    data: SocketConnection
    control: SocketConnection | None
    over: trio.Event = field(factory=trio.Event)
    answered: bool = field(default=False, init=False)

    async def accept(self, descriptors: tuple[StageDescriptor, ...] = ()) -> None:
        """Says Welcome; `descriptors` are this stage's and those after it."""
        self.answered = True
        await welcome(self.data, self.hello, descriptors)


async def listen(
    address: Address, security: Security = OPEN, insecure: bool = False
) -> list[trio.SocketListener]:
    """Listeners on an address; port 0 lets the kernel choose (see `local_address`).

    Raises `UsageError` if it cannot listen there, or if strangers could connect and `insecure` is false.
    """
    check_listen(address.host, security, insecure)
    try:
        listeners = await trio.open_tcp_listeners(address.port, host=address.host)
    except OSError as error:
        raise UsageError(f"cannot listen on {address}: {error}") from None
    if address.port == 0:  # several interfaces would get several ports
        for listener in listeners[1:]:
            await listener.aclose()
        return listeners[:1]
    return listeners


def local_address(listener: trio.SocketListener) -> Address:
    """Where a listener really listens."""
    host, port, *_ = listener.socket.getsockname()
    return Address(host, port)


async def serve(
    listeners: Sequence[trio.SocketListener],
    handler: Callable[[Call], Awaitable[None]],
    security: Security = OPEN,
    *,
    deadline: float = WARM_UP,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answers callers until cancelled; closes the listeners then.

    `handler` is run for each link or return stream whose handshake got as far as the Hello, within `deadline`
    seconds; it says `accept`, and owns the connections until it returns, when they are closed. A `MeshpipeError`
    that it raises is told to a caller who has no answer yet, and logged; the server goes on.
    """
    waiting: dict[bytes, _Control] = {}
    unfinished = 0

    async def answer(stream: trio.SocketStream) -> None:
        nonlocal unfinished
        if unfinished >= UNFINISHED:
            log.warning("turned a caller away: %d handshakes are unfinished", unfinished)
            await trio.aclose_forcefully(stream)
            return
        unfinished += 1
        try:
            call = await _answer(stream, security, deadline, waiting)
        finally:
            unfinished -= 1
        if isinstance(call, Call):
            await _handle(call, handler)
        elif call is not None:
            await call.over.wait()

    async with trio.open_nursery() as calls:
        await calls.start(partial(trio.serve_listeners, answer, list(listeners), handler_nursery=calls))
        task_status.started()


async def _answer(
    stream: trio.SocketStream,
    security: Security,
    deadline: float,
    waiting: dict[bytes, _Control],
) -> Call | _Control | None:
    """The handshake up to the Hello, and the pairing of a link's connections; None if it came to nothing."""
    connection: SocketConnection | None = None
    try:
        with trio.fail_after(deadline):
            connection = await _accept(stream, security)
            hello = await receive_hello(connection, security.key_for)
            if hello.role == "return":
                return Call(hello, connection, None)
            if hello.role == "data":
                control = waiting.pop(hello.link, None)
                if control is None:
                    await refuse(connection, "a link's control connection must be opened first")
                    raise ProtocolError(f"{connection.peer} opened a data connection without control")
                control.taken.set()
                return Call(hello, connection, control.connection, control.over)
            if hello.link in waiting:
                await refuse(connection, "this link has a control connection already")
                raise ProtocolError(f"{connection.peer} opened a control connection twice")
            control = waiting[hello.link] = _Control(connection)
            try:
                await welcome(connection, hello)
                await control.taken.wait()
            finally:
                if not control.taken.is_set():
                    del waiting[hello.link]
            return control
    except (MeshpipeError, trio.TooSlowError, OSError) as error:
        reason = f"no handshake within {deadline:g} s" if isinstance(error, trio.TooSlowError) else error
        log.warning("turned a caller away: %s", reason)
    except BaseException:
        await _close(connection)
        raise
    await _close(connection)
    return None


async def _accept(stream: trio.SocketStream, security: Security) -> SocketConnection:
    host, port, *_ = stream.socket.getpeername()
    peer = str(Address(host, port))
    if security.server is None:
        return tcp(stream, peer)
    return await tls(stream, peer, security.server)


async def _handle(call: Call, handler: Callable[[Call], Awaitable[None]]) -> None:
    try:
        await handler(call)
    except Exception as error:
        expected = _expected(error)
        if expected is None:
            raise
        log.warning("%s: %s", call.data.peer, expected)
        if not call.answered:
            await _tell(call, expected)
    else:
        if not call.answered:
            raise RuntimeError(f"the handler of {call.data.peer} returned without an answer")
    finally:
        call.over.set()
        await _close(call.data)
        await _close(call.control)


def _expected(error: BaseException) -> MeshpipeError | None:
    """The error, or the first of a nursery's group, if nothing but `MeshpipeError`s went wrong."""
    if isinstance(error, MeshpipeError):
        return error
    within = [_expected(one) for one in getattr(error, "exceptions", ())]
    return within[0] if within and None not in within else None


async def _tell(call: Call, error: MeshpipeError) -> None:
    try:
        with trio.move_on_after(STEADY):
            await refuse(call.data, str(error), error.stage, lost=isinstance(error, StageLostError))
    except MeshpipeError:
        pass  # whoever has gone needs no answer
