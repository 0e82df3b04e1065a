"""Compiles the C extension into the wheel, or beside its source for an editable install; does without where it can't be."""

import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

ROOM = "trio_rollout/sglang/_wire"
NAME = "_triples"


class CompileHook(BuildHookInterface[Any]):
    """Hatchling asks it before it packs a wheel."""

    _scratch: TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile. A compiler that is missing or fails is told, and leaves a wheel of Python only."""
        beside = Path(self.root, ROOM, f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}")
        self._scratch = TemporaryDirectory()
        try:
            compiled = self._compile(self._scratch.name)
        except (Exception, SystemExit) as error:  # noqa: BLE001  the pure decoder gives the same results
            self.app.display_warning(f"{NAME}.c was not compiled, so answers are decoded without it: {error!r}")
            if version == "editable":
                beside.unlink(missing_ok=True)  # it was made from what the source is no more
            return
        if version == "editable":
            new = beside.with_suffix(".new")
            new.write_bytes(compiled.read_bytes())
            new.replace(beside)  # a process that runs on the old one keeps it
        else:
            build_data["force_include"][str(compiled)] = f"{ROOM}/{beside.name}"
            build_data |= {"pure_python": False, "infer_tag": True}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Clean up."""
        if self._scratch is not None:
            self._scratch.cleanup()

    def _compile(self, scratch: str) -> Path:
        source = Path(self.root, ROOM, f"{NAME}.c")
        command = build_ext(Distribution({"ext_modules": [Extension(NAME, [str(source)])]}))
        command.build_lib = command.build_temp = scratch
        command.ensure_finalized()
        command.run()
        return Path(command.get_ext_fullpath(NAME))
