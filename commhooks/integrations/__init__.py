"""Integrations with other packages, which are only needed to import these modules.

Imports: adapters, errors, hook, reducer, runtime, state.
"""
