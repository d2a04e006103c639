"""The actor runtime: mailboxes, references, actors and their supervision. It knows no message and no model.

mailbox = Mailbox({"control": 64, "windows": 16}, sort=queue_of)
nursery.start_soon(supervise, mailbox, Stage, Restarts(limit=3))
await mailbox.ref.send(Window(...))
"""

from .actor import Actor, handles
from .mailbox import Ask, Mailbox, Ref
from .supervisor import NEVER, Crash, Restarts, log_crash, supervise

__all__ = [
    "NEVER",
    "Actor",
    "Ask",
    "Crash",
    "Mailbox",
    "Ref",
    "Restarts",
    "handles",
    "log_crash",
    "supervise",
]
