"""Models that are made here to measure with."""
