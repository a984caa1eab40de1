"""What pyproject.toml cannot say: a wheel brings the lessons, solutions and docs, inside the package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class WithLessons(build_py):
    def run(self) -> None:
        built = Path(self.build_lib, "zerolab").resolve()
        if not self.editable_mode and built != ROOT / "zerolab":  # an earlier build may have left what is gone
            shutil.rmtree(built, ignore_errors=True)
        super().run()
        if self.editable_mode:
            return  # the lessons are those of the checkout
        for pattern in ("lessons/*.ipynb", "solutions/*.ipynb", "docs/*.md", "docs/*.png"):
            for file in sorted(ROOT.glob(pattern)):
                target = Path(self.build_lib, "zerolab", "course", file.parent.name, file.name)
                self.mkpath(str(target.parent))
                self.copy_file(str(file), str(target))


setup(cmdclass={"build_py": WithLessons})
