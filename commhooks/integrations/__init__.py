"""Integrations with other packages, which are only needed to import these modules."""
