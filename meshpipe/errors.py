"""The exceptions that meshpipe raises on purpose.

Every message says what was expected, what came and what to do about it. Everything here is a
`MeshpipeError`, so an embedding service can catch that one class; the command line turns it into one
line on standard error and exit code 2.
"""

from __future__ import annotations


class MeshpipeError(Exception):
    """Base class of all errors that meshpipe raises on purpose."""

    stage: int | None = None
    """Index of the stage on a route that it is about, where one is known."""


class ModelError(MeshpipeError):
    """A model file cannot be read, or cannot be used in the way that was asked for."""


class SplitError(MeshpipeError):
    """A layer range or a split does not add up to the model."""


class CapacityError(MeshpipeError):
    """Something does not fit: disk, memory, lanes, context."""


class OverloadedError(CapacityError):
    """So many requests wait already that one more is not taken: ask again later."""


class EngineError(MeshpipeError):
    """llama.cpp refused or failed a decode."""


class ProtocolError(MeshpipeError):
    """A peer (or a proposer) said something that cannot be true."""


class HandshakeError(ProtocolError):
    """Two ends of a connection do not agree; names what either side has."""


class StageLostError(MeshpipeError):
    """A stage or a link went away, or made no progress before a deadline."""


class UsageError(MeshpipeError):
    """An argument is wrong: names it, its value and what is allowed."""


class ActorGoneError(MeshpipeError):
    """The actor that a message is for has ended, crashed for good, or its link broke."""


class AskFailedError(MeshpipeError):
    """An actor that was asked something failed at it, or did not answer before the deadline."""
