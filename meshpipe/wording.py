"""How numbers are put into sentences for people."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`1 lane`, `4 lanes`: for nouns that take an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
