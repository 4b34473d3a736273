"""Puts `config_files/` inside the package when it is built, so that a user's own configs can build on its groups."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithGroups(build_py):
    """Build, and copy the groups; an editable install reads them where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree("config_files", Path(self.build_lib) / "modalities" / "config_files", dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithGroups})
