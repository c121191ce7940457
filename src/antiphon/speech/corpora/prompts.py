"""The recorded telephone prompts of Debian's packages asterisk-core-sounds-en(-wav): one professional voice, 8 kHz.

CC BY-SA 3.0. They are fetched with apt-get into a cache folder and unpacked there; nothing is installed.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from antiphon.errors import DataError
from antiphon.speech.corpora.base import Corpus, Recording, Say, Skip, share

PACKAGES = ("asterisk-core-sounds-en", "asterisk-core-sounds-en-wav")
DOWNLOAD_TEXT = "18.3 MB, CC BY-SA 3.0"
DOWNLOAD_DEADLINE_S = 600
UNPACK_DEADLINE_S = 120
VOICE = "en_US_f_Allison"
AUDIO_FOLDER = Path("usr/share/asterisk/sounds") / VOICE
TEXT_FILE = Path("usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz")
LONGEST_S = 12.0
SYMBOLS = {"*": "star", "#": "pound"}
# Slips of the pen in the text file; the speaker says the word that was meant.
CORRECTIONS = {
    "exclaimation": "exclamation",
    "fourtieth": "fortieth",
    "indentified": "identified",
    "represenatives": "representatives",
    "umute": "unmute",
    "witheld": "withheld",
}
# Words of these prompts that the dictionary lacks.
PRONUNCIATIONS = {
    "backtick": "B AE K T IH K",
    "caret": "K EH R AH T",
    "dahdi": "D AA D IY",
    "digium": "D IH JH IY AH M",
    "forevermore": "F ER EH V ER M AO R",
    "iax": "AY EY EH K S",
    "lowercase": "L OW ER K EY S",
    "mgcp": "EH M JH IY S IY P IY",
    "pbx": "P IY B IY EH K S",
    "prepend": "P R IY P EH N D",
    "prepending": "P R IY P EH N D IH NG",
    "rerecord": "R IY R IH K AO R D",
    "semicolon": "S EH M IY K OW L AH N",
    "touchtone": "T AH CH T OW N",
    "undelete": "AH N D IH L IY T",
    "undeleted": "AH N D IH L IY T AH D",
    "unistim": "Y UW N IH S T IH M",
    "unmute": "AH N M Y UW T",
    "unmuted": "AH N M Y UW T AH D",
    "uppercase": "AH P ER K EY S",
    "waldo's": "W AO L D OW Z",
    "xray": "EH K S R EY",
}

FEWEST_WORDS = 3
TEST_BELOW = 0.22
DEV_BELOW = 0.36
SPLIT_RULE = (
    f"by the SHA-256 of the normalised text, as a fraction: among texts of {FEWEST_WORDS} words or more,"
    f" test below {TEST_BELOW}, dev below {DEV_BELOW}; all others train (equal texts on one side)"
)


def read(source: Path | None, say: Say) -> Corpus:
    """Read the prompts.

    Args:
        source: a folder with both .deb files or their unpacked tree; None fetches them.
        say: is told what is downloaded, and how much, before it is.

    Raises:
        DataError: they cannot be fetched, unpacked or found.
    """
    tree = _tree(source, say)
    audio = tree / AUDIO_FOLDER
    own = {word: [tuple(phones.split())] for word, phones in PRONUNCIATIONS.items()}
    corpus = Corpus("prompts", split_rule=SPLIT_RULE, longest_s=LONGEST_S, lexicon=own)
    seen: set[str] = set()
    for number, line in enumerate(_text_lines(tree / TEXT_FILE), 1):
        name, colon, text = line.partition(":")
        if not colon or line.startswith(";"):
            continue
        where = f"{TEXT_FILE.name}:{number}"
        if name in seen:
            corpus.skipped.append(Skip(name, f"{where}: named a second time"))
            continue
        seen.add(name)
        words = corpus.words_of(name, text, where, symbols=SYMBOLS, remarks=True)
        if words is None:
            continue
        words = tuple(CORRECTIONS.get(word, word) for word in words)
        file = audio / f"{name}.wav"
        corpus.recordings.append(Recording(name, file, VOICE, words, split_of(words), where))
    for file in sorted(audio.rglob("*.wav")):
        name = file.relative_to(audio).with_suffix("").as_posix()
        if name not in seen:
            corpus.skipped.append(Skip(name, f"{file}: {TEXT_FILE.name} has no text for it"))
    return corpus


def split_of(words: tuple[str, ...]) -> str:
    """Return the split of a prompt with these words, by the rule of ``SPLIT_RULE``."""
    position = share(" ".join(words))
    if len(words) < FEWEST_WORDS or position >= DEV_BELOW:
        return "train"
    return "test" if position < TEST_BELOW else "dev"


def cache_folder() -> Path:
    """Return where downloads are kept: antiphon in XDG_CACHE_HOME, else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "antiphon"


def _tree(source: Path | None, say: Say) -> Path:
    if source is None:
        return _unpacked(_fetched(say))
    if (source / AUDIO_FOLDER).is_dir():
        return source
    packages = [_package(source, name) for name in PACKAGES]
    found = [package for package in packages if package is not None]
    if len(found) < len(PACKAGES):
        raise DataError(
            f"{source} holds neither {AUDIO_FOLDER} nor the .deb files of {' and '.join(PACKAGES)}:"
            " name a folder that does, or leave --source out to fetch them"
        )
    return _unpacked(found)


def _package(folder: Path, name: str) -> Path | None:
    files = sorted(folder.glob(f"{name}_*.deb")) if folder.is_dir() else []
    return files[-1] if files else None


def _fetched(say: Say) -> list[Path]:
    cache = cache_folder()
    held = [_package(cache, name) for name in PACKAGES]
    if None in held:
        say(f"downloading {' and '.join(PACKAGES)} with apt-get ({DOWNLOAD_TEXT}) into {cache}")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as beside:
            _run(
                ["apt-get", "download", *PACKAGES],
                Path(beside),
                DOWNLOAD_DEADLINE_S,
                "run `apt-get update` (as root) and try again, or pass --source with a folder that holds them",
            )
            for file in Path(beside).glob("*.deb"):
                file.replace(cache / file.name)
        held = [_package(cache, name) for name in PACKAGES]
    packages = [package for package in held if package is not None]
    if len(packages) < len(PACKAGES):
        raise DataError(f"apt-get downloaded nothing for {' or '.join(PACKAGES)}: pass --source instead")
    return packages


def _unpacked(packages: list[Path]) -> Path:
    """Unpack into the cache, once; the rename makes a tree that is there a whole one."""
    cache = cache_folder()
    sizes = "-".join(str(package.stat().st_size) for package in packages)
    tree = cache / f"{packages[-1].stem}-{sizes}"
    if not tree.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unpack-", dir=cache) as beside:
            part = Path(beside) / "tree"
            for package in packages:
                cure = f"delete {package} if it is damaged; unpack it yourself and pass --source otherwise"
                _run(["dpkg-deb", "-x", str(package.resolve()), str(part)], cache, UNPACK_DEADLINE_S, cure)
            if not tree.is_dir():
                shutil.move(part, tree)
    return tree


def _run(command: list[str], folder: Path, deadline_s: float, cure: str) -> None:
    what = " ".join(command[:2])
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=deadline_s
        )
    except FileNotFoundError:
        raise DataError(
            f"{command[0]} is not on this machine (it comes with Debian and Ubuntu): unpack"
            f" {' and '.join(PACKAGES)} elsewhere and pass the folder with --source"
        ) from None
    except subprocess.TimeoutExpired:
        raise DataError(f"{what} did not end within {deadline_s:.0f} s: {cure}") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise DataError(f"{what} failed ({last}): {cure}")


def _text_lines(path: Path) -> list[str]:
    plain = path.with_suffix("")
    try:
        if plain.is_file():
            return plain.read_text(encoding="utf-8").splitlines()
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return file.read().splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); it comes with the package {PACKAGES[0]}, without -wav"
        ) from None
