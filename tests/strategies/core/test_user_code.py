import os
import sysconfig

import pytest
import torch

from evener.strategies.core import files
from evener.strategies.core.files import is_library


@pytest.mark.parametrize(
    "filename",
    [
        "/somewhere/else/lib/python3.11/site-packages/torch/nn/modules/module.py",
        "/usr/lib/python3/dist-packages/yaml/__init__.py",
        "<frozen runpy>",
        torch.__file__,
        os.__file__,
        files.__file__,
    ],
)
def test_packages_of_any_environment_are_libraries(filename: str) -> None:
    # Only the interpreter's own site-packages were: in an environment on top of another, torch's frames were named
    # instead of the user's line.
    assert is_library(filename)


@pytest.mark.parametrize("filename", ["/home/me/project/train.py", "/home/me/site-packages.py", __file__])
def test_a_project_is_no_library(filename: str) -> None:
    assert not is_library(filename)


def test_a_project_below_an_environment_is_no_library() -> None:
    assert not is_library(os.path.join(sysconfig.get_path("data"), "project", "model.py"))
