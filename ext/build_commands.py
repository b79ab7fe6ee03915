"""The build command and the wheel of the compiled libraries, as setuptools wants them; `build_native` does the work."""

from __future__ import annotations

from pathlib import Path

from build_native import build_wanted
from setuptools import Extension
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class BuildNative(build_ext):
    """Puts the libraries where setuptools expects extension modules."""

    def get_ext_filename(self, fullname: str) -> str:
        *package, part = fullname.split(".")
        return str(Path(*package, f"libmoe_ckpt_{part}.so"))  # no suffix of a Python version: these are no modules

    def build_extensions(self) -> None:
        for reason in build_wanted(Path(self.get_ext_fullpath(self.extensions[0].name)).parent):
            self.warn(f"{reason}\nThe functions of this part will run in Python.")

    def copy_extensions_to_source(self) -> None:
        self.extensions = [extension for extension in self.extensions if self._built(extension)]
        super().copy_extensions_to_source()

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {built: path for built, path in super().get_output_mapping().items() if Path(built).exists()}

    def _built(self, extension: Extension) -> bool:
        name = self.get_ext_filename(self.get_ext_fullname(extension.name))
        return (Path(self.build_lib) / name).exists()


class BdistWheel(bdist_wheel):
    """One wheel of a platform for all versions of Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]
