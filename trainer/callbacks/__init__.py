"""Callbacks that every run may use."""
