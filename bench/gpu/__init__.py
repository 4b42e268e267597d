"""Benchmarks on a CUDA device; `make gpu-check` runs them."""
