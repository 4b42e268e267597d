"""Hooks under which models differ between ranks or nodes, and are averaged."""
