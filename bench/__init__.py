"""Benchmarks. README.md explains the commands and the columns."""
