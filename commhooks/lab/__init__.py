"""Tools to choose a hook: comparison, simulation, models to measure with, and the doctor."""
