"""Show import-linter the packages of the checkout: inside a package it takes none, inside a namespace it does."""

from importlinter.contracts.layers import LayersContract as LayersContract

import evener

assert evener.__spec__ is not None
evener.__spec__.has_location = False
