"""An array in the metadata of a GGUF file, a vocabulary for one. It stays in the file until its elements are wanted."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pptasks.errors import ModelFileError

# GGUF's numbers of the types of values, and how `struct` spells the scalars.
SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
STRING = 8


@dataclass(frozen=True)
class Array:
    """An array of the metadata, still in the file: `decode()` reads it."""

    file: Path
    kind: int  # GGUF's number of the element type: a scalar or the string
    count: int
    start: int  # byte range of the elements in the file
    end: int

    def __len__(self) -> int:
        return self.count

    def decode(self) -> tuple[Any, ...]:
        """The elements: int, float, bool or str. ModelFileError if the file changed or a string is no UTF-8."""
        try:
            with self.file.open("rb") as f:
                f.seek(self.start)
                data = f.read(self.end - self.start)
        except OSError as e:
            raise ModelFileError(f"{self.file}: cannot be read: {e.strerror}") from e
        if self.kind in SCALARS and len(data) == self.count * struct.calcsize("<" + SCALARS[self.kind]):
            return struct.unpack(f"<{self.count}{SCALARS[self.kind]}", data)
        items: list[str] = []
        at = 0
        try:
            for _ in range(self.count):
                (n,) = struct.unpack_from("<Q", data, at)
                items.append(data[at + 8 : at + 8 + n].decode())
                at += 8 + n
        except (struct.error, UnicodeDecodeError) as e:
            raise ModelFileError(
                f"{self.file}: a string of the metadata is not UTF-8, or the file changed while it was open"
            ) from e
        if at != len(data):
            raise ModelFileError(f"{self.file}: changed while it was open; start again")
        return tuple(items)
