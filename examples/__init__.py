"""LightningModules and data modules on real data."""
