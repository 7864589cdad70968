"""Provide example LightningModules and data modules on real data."""

from ..strategies.core.lightning_names import unify

unify()  # before the examples import Lightning
