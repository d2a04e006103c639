"""Benchmarks: `python -m bench NAME`. Each is a module here with `main(arguments)`."""
