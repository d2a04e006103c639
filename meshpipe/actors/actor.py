"""Actors: one task, the state that it owns, and a handler for each type of message it accepts."""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Generic, TypeVar, Union, get_args, get_origin

from .mailbox import Ask, M, Mailbox

A = TypeVar("A")
T = TypeVar("T")
R = TypeVar("R")


def handles(
    kind: type[T],
) -> Callable[[Callable[[A, T], Awaitable[R]]], Callable[[A, T], Awaitable[R]]]:
    """Marks a method as the handler of messages of type `kind`; what it returns answers an `ask`."""

    def mark(method: Callable[[A, T], Awaitable[R]]) -> Callable[[A, T], Awaitable[R]]:
        method._handles = kind  # type: ignore[attr-defined]
        return method

    return mark


class Actor(Generic[M]):
    """Base of all actors. `M` is the union of the messages that the actor accepts:

        class Counter(Actor[Add | Total]):
            @handles(Add)
            async def add(self, message: Add) -> None: ...

    A subclass that names a message in `M` and has no handler for it, or two, is refused when it is defined.
    """

    handlers: ClassVar[dict[type, Callable[[Any, Any], Awaitable[object]]]] = {}

    def __init__(self, mailbox: Mailbox[M]) -> None:
        self.mailbox = mailbox
        self.handling: M | None = None
        """The message at hand; after a crash, the one that caused it."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        handlers = dict(cls.handlers)
        own: set[type] = set()
        for method in vars(cls).values():
            kind = getattr(method, "_handles", None)
            if kind is None:
                continue
            if kind in own:
                raise TypeError(f"{cls.__name__} has two handlers for {kind.__name__}; give it one")
            own.add(kind)
            handlers[kind] = method
        cls.handlers = handlers
        missing = [kind.__name__ for kind in _accepted(cls) if kind not in handlers]
        if missing:
            raise TypeError(f"{cls.__name__} accepts {', '.join(missing)} but has no handler for it")

    async def run(self) -> None:
        """Handles messages in turn until the mailbox is closed and empty. Override it to look ahead."""
        async for message in self.mailbox:
            await self.dispatch(message)

    async def dispatch(self, message: M | Ask[M]) -> None:
        """Calls the handler for the message and, if it was asked, gives the answer.

        An exception of the handler propagates (and fails the ask): the supervisor decides what it means.
        """
        ask = message if isinstance(message, Ask) else None
        self.handling = content = message.message if isinstance(message, Ask) else message
        try:
            handler = self.handlers.get(type(content))
            if handler is None:
                raise TypeError(f"{type(self).__name__} does not accept {type(content).__name__}")
            answer = await handler(self, content)
        except BaseException as error:
            if ask is not None:
                ask.fail(f"{type(self).__name__} failed at {type(content).__name__}: {error!r}")
            raise
        self.handling = None
        if ask is not None:
            ask.answer(answer)


def _accepted(cls: type) -> tuple[type, ...]:
    """The message types that the class names as `Actor[...]`; none if it names no concrete type."""
    for base in getattr(cls, "__orig_bases__", ()):
        if isinstance(get_origin(base), type) and issubclass(get_origin(base), Actor):
            (accepted,) = get_args(base)
            union = get_origin(accepted) in (Union, types.UnionType)
            kinds = get_args(accepted) if union else (accepted,)
            return tuple(kind for kind in kinds if isinstance(kind, type))
    return ()
