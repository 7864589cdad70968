"""Find the packages, and install them in the package `evener`.

`trainer`, `strategies`, `conf` and `examples` are too generic to be top-level names in a user's environment. Everything
else about the distribution is in pyproject.toml, which has no way to prefix the packages that it finds.
"""

from setuptools import find_namespace_packages, setup

FOLDERS = ("trainer", "strategies", "conf", "examples")
found = [name for folder in FOLDERS for name in (folder, *(f"{folder}.{p}" for p in find_namespace_packages(folder)))]

setup(
    packages=["evener", *(f"evener.{name}" for name in found)],
    package_dir={"evener": "evener", **{f"evener.{folder}": folder for folder in FOLDERS}},
)
