"""Communication hooks for data-parallel training: named, pluggable, measurable."""
