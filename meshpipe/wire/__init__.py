"""The wire: how messages travel between machines, and in memory as if they did.

`codec` turns messages into headers and payloads, `frames` into frames; `connections` carry frames over memory,
TCP and TLS; `handshake` and `security` say who may connect and what they agree on; `endpoints` connect and
listen; a `Link` joins two mailboxes; `conditions` and `proxy` make a wire as bad as a real one.
"""

from .codec import ENCODINGS, decode, encode
from .conditions import Conditions
from .connections import Connection, MemoryConnection, SocketConnection, memory_pair
from .endpoints import STEADY, WARM_UP, Address, Call, connect, connect_link, listen, local_address, serve
from .frames import Frame, Kind, Limits
from .handshake import check_hello
from .link import BOUNDS, Heartbeat, Link, Traffic, send_room
from .security import OPEN, Security, check_listen, client_context, is_loopback, server_context, shared_key

__all__ = [
    "BOUNDS",
    "ENCODINGS",
    "OPEN",
    "STEADY",
    "WARM_UP",
    "Address",
    "Call",
    "Conditions",
    "Connection",
    "Frame",
    "Heartbeat",
    "Kind",
    "Limits",
    "Link",
    "MemoryConnection",
    "Security",
    "SocketConnection",
    "Traffic",
    "check_hello",
    "check_listen",
    "client_context",
    "connect",
    "connect_link",
    "decode",
    "encode",
    "is_loopback",
    "listen",
    "local_address",
    "memory_pair",
    "send_room",
    "serve",
    "server_context",
    "shared_key",
]
