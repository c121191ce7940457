"""From a written transcript to the words that were spoken.

Only what has one reading is read; a transcript with anything else is refused, so that no wrong reference is trained on.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

from antiphon.errors import DataError

_UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")

_REMARK = re.compile(r"\[[^\]]*\]|\([^)]*\)|<[^>]*>")
_SEPARATOR = re.compile(r"[\s\-‐‑–—/…]+|\.{2,}")
# Between two digits (10:30, 1,000) a mark belongs to the number; anywhere else it only separates.
_PUNCTUATION = re.compile(r'(?<!\d)[,;:!?"“”„«»¿¡]|[,;:!?"“”„«»¿¡](?!\d)')
_INITIALS = re.compile(r"[^\W\d_](?:\.[^\W\d_])+")
_NUMBER = re.compile(r"([0-9]{1,2})([a-z]?)")


def spoken_words(text: str, *, symbols: Mapping[str, str] | None = None, remarks: bool = False) -> tuple[str, ...]:
    """Return the words of ``text``, lower case, without punctuation.

    Hyphens and slashes separate words, initials (``P.M.``) become letters, numbers below 100 become words.

    Args:
        text: the transcript as it is written.
        symbols: what single characters are called, such as ``{"#": "pound"}``.
        remarks: leave out what stands in brackets; without it, brackets are refused.

    Raises:
        DataError: there are no words, or a token has no single reading (``1,000``, ``H.323``, ``[noise]``).

    >>> spoken_words("Re-record it; press 5 at 10 P.M.")
    ('re', 'record', 'it', 'press', 'five', 'at', 'ten', 'p', 'm')
    """
    line = unicodedata.normalize("NFC", text).lower().replace("’", "'").replace("‘", "'")
    if remarks:
        line = _REMARK.sub(" ", line)
    for symbol, word in (symbols or {}).items():
        line = line.replace(symbol, f" {word} ")
    words: list[str] = []
    for token in _SEPARATOR.split(_PUNCTUATION.sub(" ", line)):
        words.extend(_read(token.strip("'").rstrip(".").strip("'")))
    if not words:
        raise DataError("no spoken words in the text")
    return tuple(words)


def cardinal(digits: str) -> list[str]:
    """Return the words of one or two digits; a leading zero is read out.

    >>> cardinal("42"), cardinal("07")
    (['forty', 'two'], ['zero', 'seven'])
    """
    if len(digits) == 2 and digits[0] == "0":
        return ["zero", _UNITS[int(digits[1])]]
    number = int(digits)
    if number < len(_UNITS):
        return [_UNITS[number]]
    return [_TENS[number // 10]] + ([_UNITS[number % 10]] if number % 10 else [])


def _read(token: str) -> list[str]:
    if not token:
        return []
    if number := _NUMBER.fullmatch(token):
        return cardinal(number[1]) + ([number[2]] if number[2] else [])
    if _INITIALS.fullmatch(token):
        return token.split(".")
    # Letters and the marks that some scripts set on them.
    if all(unicodedata.category(char)[0] in "LM" or char == "'" for char in token):
        return [token]
    raise DataError(f"'{token}' in the text has no single reading: write it in words, as it is spoken")
