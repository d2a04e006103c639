"""Faults at random moments, against real processes; see `tests.chaos.harness`."""
