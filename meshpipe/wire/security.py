"""Who may connect: TLS, mutual TLS, or a shared key; and where a stage may listen without any of them.

The shared key is the light option: both sides prove that they know it (HMAC-SHA-256 over fresh nonces of
either side and the caller's Hello) before anything else is said. It keeps strangers out; it hides nothing from
whoever can read the network, and does not stop whoever can change what passes. TLS does both.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import ssl
from pathlib import Path

from attrs import frozen

from meshpipe.errors import HandshakeError, UsageError

NONCE_SIZE = 32
KEY_SIZE = 16
"""Bytes of a shared key, at least: whoever records a handshake can try keys at leisure."""


@frozen(repr=False)
class Security:
    """How connections are secured. `server` and `client` are used for accepting and for connecting.

    Who may open sessions, if not everybody that may connect: with `coordinator_key`, who knows that key (the first
    and the last stage have to know it too, the others need not); with `coordinators`, who shows a certificate for
    one of these names.
    """

    key: bytes | None = None
    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None
    coordinator_key: bytes | None = None
    coordinators: frozenset[str] | None = None

    def key_for(self, stage: int) -> bytes | None:
        """The key of a handshake in which a coordinator (who calls for stage 0) or another stage calls."""
        return self.coordinator_key if stage == 0 and self.coordinator_key is not None else self.key

    def check_coordinator(self, names: frozenset[str]) -> None:
        """Whether a caller whose certificate has these names may open sessions. Raises HandshakeError."""
        if self.coordinators is not None and not names & self.coordinators:
            raise HandshakeError(
                f"the caller's certificate is for {', '.join(sorted(names)) or 'nobody'}, which may not open sessions"
            )


OPEN = Security()


def shared_key(path: str | Path) -> bytes:
    """The key in a file, without white space around it. Raises `UsageError` if it is missing or short."""
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise UsageError(f"cannot read the key file {path}: {error.strerror}") from None
    if len(key) < KEY_SIZE:
        raise UsageError(f"the key in {path} has {len(key)} bytes; expected at least {KEY_SIZE} random ones")
    return key


def server_context(
    certificate: str | Path, key: str | Path, authorities: str | Path | None = None
) -> ssl.SSLContext:
    """TLS 1.3 for accepting, from PEM files. With `authorities`, callers need a certificate signed by them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load(context, certificate, key, authorities)
    if authorities is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(
    authorities: str | Path, certificate: str | Path | None = None, key: str | Path | None = None
) -> ssl.SSLContext:
    """TLS 1.3 for connecting: the peer's certificate must be signed by `authorities` and name its host."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load(context, certificate, key, authorities)
    return context


def _load(
    context: ssl.SSLContext,
    certificate: str | Path | None,
    key: str | Path | None,
    authorities: str | Path | None,
) -> None:
    try:
        if certificate is not None:
            context.load_cert_chain(certificate, key)
        if authorities is not None:
            context.load_verify_locations(authorities)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"cannot load TLS files (certificate {certificate}, key {key}, authorities {authorities}): {error}"
        ) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a socket that is bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_listen(host: str, security: Security, insecure: bool = False) -> None:
    """Refuses to listen where strangers could connect. Raises `UsageError`."""
    mutual = security.server is not None and security.server.verify_mode == ssl.CERT_REQUIRED
    if not (insecure or is_loopback(host) or security.key is not None or mutual):
        raise UsageError(
            f"refusing to listen on {host or 'all interfaces'} with neither mutual TLS nor a shared key: anyone who"
            " reaches the port could use this machine; ask callers for a certificate (--tls-cert, --tls-key and "
            "--tls-ca), give a key, listen on loopback, or insist (--insecure)"
        )


def nonce() -> bytes:
    """Random bytes that are used once."""
    return secrets.token_bytes(NONCE_SIZE)


def proof(key: bytes, side: str, hello: bytes, challenge: bytes) -> bytes:
    """What `side` ("caller" or "answerer") says to prove that it knows the key, 32 bytes.

    `hello` is the encoded Hello, which holds the caller's nonce; `challenge` is the answerer's nonce.
    """
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in (b"meshpipe", side.encode(), hello, challenge):
        digest.update(len(part).to_bytes(4, "big") + part)
    return digest.digest()
