"""Declares the packages, the compiled libraries, and what depends on where a release lives; all else is in pyproject.toml."""

import os
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "ext"))

from build_commands import BdistWheel, BuildNative  # noqa: E402
from build_metadata import REPOSITORY, long_description, project_urls  # noqa: E402
from build_native import sources  # noqa: E402

setup(
    # A source archive has the folder of `callbacks` once, without the link to it that a checkout has within the package.
    packages=sorted(
        {"lightning_moe_ckpt.callbacks", *find_packages(include=["lightning_moe_ckpt", "lightning_moe_ckpt.*"])}
    ),
    ext_modules=[
        Extension(f"lightning_moe_ckpt.native.{part}", sources(part), optional=True) for part in ("cuda", "cpu")
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": BdistWheel},
    long_description=long_description((ROOT / "README.md").read_text("utf-8"), os.environ.get(REPOSITORY)),
    long_description_content_type="text/markdown",
    project_urls=project_urls(os.environ.get(REPOSITORY)),
)
