"""Compiles every CUDA kernel without a GPU, for `make cuda`."""
