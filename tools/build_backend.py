"""The PEP 517 backend: setuptools, with the torch that is installed where the build was started.

pip runs a build in an environment of its own, in which the packages of the Python that runs it are hidden. But the
library must be built against the torch that will load it, and no requirement can say "that one". pip's environment has
the same interpreter, so the hidden packages lie where that interpreter keeps them, and `show_installed` puts their
folders behind the build's own. Tools that make a whole Python of their own (uv, build) leave no way back: for them the
error says what to type.
"""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import build_sdist, get_requires_for_build_sdist

sys.path.insert(0, str(Path(__file__).resolve().parent))

import toolchain

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def installed_folders() -> list[str]:
    """Where the interpreter that runs keeps installed packages, hidden or not."""
    folders = site.getsitepackages()
    if sys.prefix == sys.base_prefix:  # in no virtual environment
        folders.append(site.getusersitepackages())
    return [folder for folder in folders if os.path.isdir(folder)]


def show_installed() -> None:
    """Makes torch importable, where a build without its own packages would find it."""
    sys.path.extend(folder for folder in installed_folders() if folder not in sys.path)


def missing_requirements() -> list[str]:
    """The missing requirements of a build with CUDA: CUTLASS's headers."""
    show_installed()
    try:
        cutlass = toolchain.needs_cutlass(toolchain.import_torch())
    except toolchain.BuildError:
        return []  # the build says it, with the remedy
    return [toolchain.CUTLASS_REQUIREMENT] if cutlass else []


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + missing_requirements()


def get_requires_for_build_editable(config_settings=None):
    return build_meta.get_requires_for_build_editable(config_settings) + missing_requirements()


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    show_installed()
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    show_installed()
    return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    show_installed()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    show_installed()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
