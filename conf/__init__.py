"""Hydra configuration groups, found as `pkg://evener.conf`."""
