"""What pyproject.toml cannot say: a wheel brings the lessons and their solutions, inside the package."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class WithLessons(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # the lessons are those of the checkout
        for notebook in sorted(ROOT.glob("lessons/*.ipynb")) + sorted(ROOT.glob("solutions/*.ipynb")):
            target = Path(self.build_lib, "zerolab", "course", notebook.parent.name, notebook.name)
            self.mkpath(str(target.parent))
            self.copy_file(str(notebook), str(target))


setup(cmdclass={"build_py": WithLessons})
