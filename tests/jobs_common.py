"""What several test files need on the ranks: a small model, its data, one process to compare with, caught errors."""

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
ROOMS = [folder for folder in sorted((ROOT / "tests").iterdir()) if folder.is_dir() and folder.name != "__pycache__"]
ROOMS.insert(0, ROOT / "tests")
PYTHONPATH = os.pathsep.join(map(str, [ROOT, *ROOMS]))  # for a program that imports zerolab and modules of the tests

WORDS = 11


def copy_checkout(folder: Path) -> None:
    """What git has or would take. Built files that lie in the checkout stay there."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():  # else it was deleted, but not yet in a commit
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def worlds(*shown: Any, others: Sequence[Any]) -> list[Any]:
    """Numbers of ranks, or stages, to `parametrize` a test with. What `others` would show too is left to `test-all`."""
    return [*shown, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in others)]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.ln(x))))


class Net(nn.Module):
    """GPT-like: an embedding, blocks that repeat, a head; odd sizes, so that shards cut through parameters."""

    def __init__(self, width: int = 6, blocks: int = 2, words: int = WORDS) -> None:
        super().__init__()
        self.emb = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.ln(h)).flatten(0, 1), y.flatten())


def build(make: Callable[[], nn.Module] = Net, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, WORDS, (2, 5), generator=generator), torch.randint(0, WORDS, (2, 5), generator=generator)


def rank_ordered_mean(tensors: list[Tensor]) -> Tensor:
    """Summed one after the other, in float32 at least, and rounded once at the end."""
    total = tensors[0].to(torch.promote_types(tensors[0].dtype, torch.float32), copy=True)
    for tensor in tensors[1:]:
        total += tensor
    return (total / len(tensors)).to(tensors[0].dtype)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """The names under which two state dicts differ, in one bit or in being there."""
    names = a.keys() | b.keys()
    return sorted(
        n for n in names if n not in a or n not in b or a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])
    )


class Caught(NamedTuple):
    """An error that a rank met: its class and its text."""

    kind: str
    text: str


def attempt(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Caught | None:
    """What `fn` raised, or None if it went well."""
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return Caught(type(error).__name__, str(error))
    return None


def all_say(caught: list[Caught | None], kind: str, *words: str) -> None:
    """Every rank raised `kind` with all the words in its text. The words tell that no timeout had to end a wait."""
    for rank, error in enumerate(caught):
        assert error is not None, f"rank {rank} raised nothing, others {caught}"
        assert error.kind == kind, f"rank {rank} raised {error}"
        for word in words:
            assert word in error.text, f"rank {rank} does not say {word!r}: {error.text}"
