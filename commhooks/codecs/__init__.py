"""Codecs, which turn numbers into few bits and back, and the check that numbers are finite."""
