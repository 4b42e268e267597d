"""Choosing hooks while training goes on."""
