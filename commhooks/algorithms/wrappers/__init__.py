"""Hooks around other hooks."""
