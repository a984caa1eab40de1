"""Flat pieces of tensors in safetensors files, with a checksum for every chunk of at most `CHUNK` bytes.

A safetensors file is 8 bytes (the length of the header), the header (JSON: name -> dtype, shape, position of its
bytes) and the bytes of the tensors. Any reader of that format opens these files.

We write and read them by hand, a chunk at a time. A save then needs no memory for copies, and its bytes are on the
disk when it returns. A load reads and checks only what it needs, and uses no memory map: if a mapped file shrinks, the
process dies.

Nothing in this room ever unpickles: a stranger's file is bytes and JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

CHUNK = 1 << 20  # bytes per checksum, small enough that a rank reads little more than the part it needs

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}  # the format's names


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or loaded. The message names the rank, the file and the tensor."""


def digest(data: bytes | bytearray) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def dtype_name(name: str, tensor: Tensor) -> str:
    """The format's name for the dtype of `tensor`; `name` is for the error if it has none."""
    if tensor.dtype not in NAMES:
        raise CheckpointError(f"{name} has dtype {tensor.dtype}, which a checkpoint cannot hold")
    return NAMES[tensor.dtype]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the path into errors of writing and flushing. A full disk does not name it."""
    try:
        yield
    except OSError as why:
        if why.errno is None or why.filename is not None:
            raise
        raise OSError(why.errno, why.strerror, str(path)) from why


def write_file(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Write flat tensors to a new file and flush it to disk.

    Returns what `Pieces` needs to read it: {"bytes": the file's size, "header": the header's digest, "tensors": {name:
    {"at": the tensor's first byte in the file, "digests": of its chunks}}}.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # The widest dtypes first and no gaps: then each tensor begins at a multiple of its element size, as readers expect.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": dtype_name(name, tensor), "shape": [tensor.numel()], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    written = {}
    with naming(path), open(path, "xb") as file:
        file.write(head)
        for name, tensor in tensors.items():
            at = file.tell()
            written[name] = {"at": at, "digests": _write_tensor(file, tensor)}
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "header": digest(head), "tensors": written}


def _write_tensor(file: BinaryIO, flat: Tensor) -> list[str]:
    """Write the bytes of a flat tensor, whatever its device; return the digest of each chunk."""
    digests = []
    for part in flat.detach().contiguous().view(torch.uint8).split(CHUNK):
        if part.numel():
            data = bytearray(part.numel())
            torch.frombuffer(data, dtype=torch.uint8).copy_(part)
            file.write(data)
            digests.append(digest(data))
    return digests


def flush_folder(folder: Path) -> None:
    """Flush a folder to disk: the names of its files are its content, and a rename is not safe without this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Pieces:
    """Reads parts of tensors whose pieces are in several files of `folder`.

    files: {file: {"bytes", "header"}}. pieces: {name: [{"file", "start", "stop", "at", "digests"}]}; a piece holds
    the flat elements [start, stop). chunk: bytes per digest.
    """

    def __init__(self, folder: Path, files: dict[str, Any], pieces: dict[str, Any], chunk: int) -> None:
        self.folder, self.files, self.pieces, self.chunk = folder, files, pieces, chunk
        self._opened: set[str] = set()  # files whose size and header have been checked

    def read(self, name: str, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """The flat elements [start, stop) of a tensor, on the CPU, all of them verified."""
        result = torch.empty(stop - start, dtype=dtype)
        raw, done = result.view(torch.uint8), 0
        for piece in self.pieces.get(name, []):
            first, last = max(start, piece["start"]), min(stop, piece["stop"])
            if first < last:
                begin, end = ((i - piece["start"]) * dtype.itemsize for i in (first, last))
                size = (piece["stop"] - piece["start"]) * dtype.itemsize
                into = raw[(first - start) * dtype.itemsize : (last - start) * dtype.itemsize]
                self._read_piece(name, piece, size, begin, end, into)
                done += last - first
        if done != stop - start:
            raise CheckpointError(f"{self.folder}: {name} is incomplete: it has {done} of {stop - start} elements")
        return result

    def _read_piece(self, name: str, piece: dict[str, Any], size: int, begin: int, end: int, into: Tensor) -> None:
        """Read bytes [begin, end) of a piece of `size` bytes, in full chunks, so that each can be checked."""
        path = self.folder / piece["file"]
        try:
            with open(path, "rb") as file:
                self._check_head(piece["file"], file, name)
                for number in range(begin // self.chunk, -(-end // self.chunk)):
                    low = number * self.chunk
                    data = bytearray(min(self.chunk, size - low))
                    file.seek(piece["at"] + low)
                    count = file.readinto(data)
                    if count != len(data) or digest(data) != piece["digests"][number]:
                        raise CheckpointError(
                            f"{path}: {name} is damaged: bytes {piece['at'] + low} to {piece['at'] + low + len(data)} "
                            "are not what was saved"
                        )
                    a, b = max(begin, low), min(end, low + len(data))
                    into[a - begin : b - begin].copy_(torch.frombuffer(data, dtype=torch.uint8)[a - low : b - low])
        except OSError as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error.strerror or error}") from error

    def _check_head(self, name: str, file: BinaryIO, tensor: str) -> None:
        """Once per file: are its size and its header as they were saved?"""
        if name in self._opened:
            return
        expected, size = self.files[name], os.fstat(file.fileno()).st_size
        if size != expected["bytes"]:
            what = f"has {size} bytes instead of {expected['bytes']}: it was cut off or replaced"
            raise CheckpointError(f"{file.name} (for {tensor}): {what}")
        length = min(int.from_bytes(file.read(8), "little"), size)
        file.seek(0)
        if digest(file.read(8 + length)) != expected["header"]:
            raise CheckpointError(f"{file.name} (for {tensor}): the header is damaged, or this is a different file")
        self._opened.add(name)
