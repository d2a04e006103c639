"""Ledger, proposers and policies: pure, no clock, no channel, no model."""
