"""Arguments for TLS and the shared key."""

from __future__ import annotations

import argparse

from meshpipe.errors import UsageError
from meshpipe.wire.security import Security, client_context, server_context, shared_key


def add_security(parser: argparse.ArgumentParser) -> None:
    """`--tls-…` and `--key-file`."""
    group = parser.add_argument_group("security")
    group.add_argument("--tls-cert", metavar="PEM", help="this side's certificate")
    group.add_argument("--tls-key", metavar="PEM", help="its private key")
    group.add_argument("--tls-ca", metavar="PEM", help="who may sign the other side's certificate")
    group.add_argument(
        "--key-file", metavar="FILE", help="a key that both sides share, 16 random bytes or more"
    )


def security_of(options: argparse.Namespace) -> Security:
    """What the arguments say. With all three TLS files both sides prove who they are."""
    if (options.tls_cert is None) != (options.tls_key is None):
        raise UsageError("--tls-cert and --tls-key go together")
    server = client = None
    if options.tls_cert is not None:
        server = server_context(options.tls_cert, options.tls_key, options.tls_ca)
    if options.tls_ca is not None:
        client = client_context(options.tls_ca, options.tls_cert, options.tls_key)
    return Security(
        key=shared_key(options.key_file) if options.key_file is not None else None,
        server=server,
        client=client,
    )
