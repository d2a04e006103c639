"""The rules of a GBNF grammar as they are collected, and those that every grammar of JSON has."""

from __future__ import annotations

from meshpipe.errors import UsageError

MAX_RULES = 2000

# How much space may stand between tokens of JSON. Unbounded, small models fill their answer with it.
BASE = r"""ws ::= | " " | "\n" [ \t]{0,20}
plain ::= [^"\\\x7F\x00-\x1F] | "\\" ["\\/bfnrt]
char ::= plain | "\\u" ([0-9a-cA-CefEF] hex | [dD] [0-7]) hex hex
hex ::= [0-9a-fA-F]
string ::= "\"" char* "\""
digits ::= [0-9]{1,15}
integer ::= "-"? ("0" | [1-9] [0-9]{0,15})
number ::= integer ("." digits)? ([eE] [-+]? [0-9]{1,2})?
boolean ::= "true" | "false"
null ::= "null"
value ::= object | array | string | number | boolean | null
object ::= "{" ws (string ws ":" ws value ws ("," ws string ws ":" ws value ws)*)? "}"
array ::= "[" ws (value ws ("," ws value ws)*)? "]"
date ::= year "-" (("0" [13578] | "1" [02]) "-" (day | "3" [01]) | ("0" [469] | "11") "-" (day | "30") | "02-" ("0" [1-9] | "1" [0-9] | "2" [0-8])) | leap "-02-29"
year ::= [1-9] [0-9]{3} | "0" ([1-9] [0-9]{2} | "0" ([1-9] [0-9] | "0" [1-9]))
leap ::= [0-9]{2} ("0" [48] | [2468] [048] | [13579] [26]) | ([02468] [48] | [13579] [26] | [2468] "0") "00"
day ::= "0" [1-9] | [12] [0-9]
time ::= ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{1,6})? ("Z" | [-+] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])
uuid ::= [0-9a-f]{8} "-" [0-9a-f]{4} "-" [0-9a-f]{4} "-" [0-9a-f]{4} "-" [0-9a-f]{12}
"""  # noqa: E501


def literal(text: str) -> str:
    """A GBNF literal."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(
        escapes.get(one, one if one.isprintable() else f"\\U{ord(one):08X}") for one in text
    ) + '"'  # fmt: skip


class Rules:
    """Numbered rules. Equal ones are one."""

    def __init__(self) -> None:
        self._rules: list[str] = []
        self._known: dict[str, str] = {}

    def add(self, rule: str) -> str:
        """The name of a rule that says this. Raises UsageError if there are too many."""
        if rule not in self._known:
            self._known[rule] = self.reserve()
            self.define(self._known[rule], rule)
        return self._known[rule]

    def reserve(self) -> str:
        """The name of a rule that will be defined, so that others can refer to it. Raises UsageError as `add`."""
        if len(self._rules) >= MAX_RULES:
            raise UsageError(f"the schema is too large: it needs more than {MAX_RULES} grammar rules")
        self._rules.append("")
        return f"r{len(self._rules) - 1}"

    def define(self, name: str, rule: str) -> None:
        """Gives a reserved rule what it says."""
        self._rules[int(name[1:])] = rule

    def text(self, root: str) -> str:
        """The whole grammar."""
        lines = [f"root ::= {root}", *(f"r{number} ::= {rule}" for number, rule in enumerate(self._rules))]
        return "\n".join(lines) + "\n" + BASE
