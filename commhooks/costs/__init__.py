"""What a step costs on a network: pure arithmetic, without processes.

Imports: comm, errors.
"""
