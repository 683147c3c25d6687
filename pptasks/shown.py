"""What a person may be shown of a text that somebody else wrote: no character of it commands a terminal, or fails to
be printed.

Left out: the control characters C0 and C1 (ESC, which begins the sequences of ECMA-48, and BEL, CR, CSI, OSC), those
that reorder text in both directions (Unicode's UAX #9: embeddings, overrides, isolates), the line and paragraph
separators, and half surrogates, which JSON can hold and no encoding can.
"""

import re

MAX_LINE = 2000  # characters: of an error or a log line
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_BREAK = re.compile(r"[\t\n]")


def plain(text: str) -> str:
    """`text` without any of those; line ends and tabs stay."""
    return _CONTROL.sub("", text)


def line(text: str, most: int = MAX_LINE) -> str:
    """`plain`, in one line of at most `most` characters."""
    return _BREAK.sub(" ", plain(text))[:most]
