"""What connects hooks to other packages, which are needed only by who imports these modules.

Imports: adapters, runtime.
"""
