"""The options of a hook: fields of its dataclass, checked against their annotations.

Imports: errors.
"""
