"""Mailboxes, actors and supervisors: a runtime that knows no model."""
