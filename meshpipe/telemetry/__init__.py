"""Seeing it work: spans of what each stage, link and session did when, their analysis, pictures and metrics."""
