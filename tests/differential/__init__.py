"""A differential tester: the same drawn training under every strategy and on one device, which must agree."""
