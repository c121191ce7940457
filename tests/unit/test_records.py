from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from antiphon import records
from antiphon.errors import DataError, FolderError
from antiphon.records import EventWriter, FolderLock, output_folder, read_events, read_json, read_jsonl, write_json

# Holds the lock of the folder in its argument until its standard input ends.
HOLDER = """
import sys
from pathlib import Path
from antiphon.records import FolderLock
with FolderLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


# JSON


def test_json_comes_back_and_leaves_nothing_beside(tmp_path: Path) -> None:
    value = {"rate": 0.0625, "words": ["zwölf", "\u2028"], "none": None, "nested": {"n": 3}}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    assert names(tmp_path) == {"a.json"}


def test_json_takes_numpy_and_names_no_number_that_json_lacks(tmp_path: Path) -> None:
    value = {"steps": np.int64(3), "gap": np.float32(0.5), "counts": np.arange(3), "loss": [np.nan, float("-inf"), 1.5]}
    write_json(tmp_path / "a.json", value)
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "steps": 3,
        "gap": 0.5,
        "counts": [0, 1, 2],
        "loss": [None, None, 1.5],
    }
    assert '"steps": 3,' in text


@pytest.mark.parametrize("fault", ["value", "fsync", "rename"])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"wall_s": 1})

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    value: dict[str, object] = {"wall_s": 2}
    if fault == "value":
        value["bad"] = object()
    elif fault == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises((TypeError, OSError)):
        write_json(path, value)
    assert read_json(path) == {"wall_s": 1}
    assert names(tmp_path) == {"summary.json"}


@pytest.mark.parametrize(
    ("text", "why"), [(None, "no such file"), ("{", "not JSON"), ("[1]", "found a list"), (b"\xff", "not JSON")]
)
def test_a_bad_json_file_is_named(tmp_path: Path, text: str | bytes | None, why: str) -> None:
    path = tmp_path / "data.json"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(DataError, match=f"data.json: .*{why}"):
        read_json(path)


# JSON lines


def test_lines_are_numbered_as_an_editor_does(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n  \n{"a": "x\u2028y"}\n')
    assert list(read_jsonl(path)) == [(1, {"a": 1}), (4, {"a": "x\u2028y"})]


def test_lines_come_back(tmp_path: Path) -> None:
    rows = [{"id": "a", "words": ["one"]}, {"id": "b", "words": []}]
    records.write_jsonl(tmp_path / "rows.jsonl", rows)
    assert [row for _, row in read_jsonl(tmp_path / "rows.jsonl")] == rows


@pytest.mark.parametrize(
    ("bad", "why"), [(b'{"a": 1', r":3: not JSON"), (b"[1]", r":3: expected an object"), (b'"\xff"', ": not UTF-8")]
)
def test_a_bad_line_is_named(tmp_path: Path, bad: bytes, why: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 0}\n\n' + bad + b"\n")
    with pytest.raises(DataError, match=f"rows.jsonl{why}"):
        list(read_jsonl(path))


def test_missing_lines_are_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="rows.jsonl: No such file"):
        list(read_jsonl(tmp_path / "rows.jsonl"))


# Events


def test_events_carry_schema_name_and_time(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as events:
        events.write("evaluation", epoch=np.float64(1), heldout_loss=float("nan"))
        # Seen at once, not when the file is closed: a live page reads along.
        (row,) = read_events(tmp_path)
    assert row.pop("time_s") >= 0
    assert row == {"schema": records.SCHEMA, "event": "evaluation", "epoch": 1.0, "heldout_loss": None}


@pytest.mark.parametrize("cut", [b'{"schema": 1, "ev', '{"text": "zw\u00f6'.encode()[:-1], b"{}"])
def test_an_event_cut_short_is_left_out_and_not_glued_to_the_next(tmp_path: Path, cut: bytes) -> None:
    with EventWriter(tmp_path) as events:
        events.write("run_started")
    with (tmp_path / records.EVENTS_NAME).open("ab") as file:
        file.write(cut)
    assert [row["event"] for row in read_events(tmp_path)] == ["run_started"]
    with EventWriter(tmp_path) as events:
        events.write("progress")
    assert [row["event"] for row in read_events(tmp_path)] == ["run_started", "progress"]


def test_a_bad_event_in_the_middle_is_an_error(tmp_path: Path) -> None:
    (tmp_path / records.EVENTS_NAME).write_text('{"event": "a"}\n{"ev\n{"event": "b"}\n')
    with pytest.raises(DataError, match="events.jsonl:2: not JSON"):
        read_events(tmp_path)


def test_no_events_file_is_an_error_and_an_empty_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="events.jsonl: No such file"):
        read_events(tmp_path)
    (tmp_path / records.EVENTS_NAME).touch()
    assert read_events(tmp_path) == []


# Locks


def test_a_lock_holds_across_processes_and_ends_with_its_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(FolderError, match=f"in use by process {holder.pid}: wait for it to end"):
            FolderLock(tmp_path)
        holder.kill()
        holder.wait()
        with FolderLock(tmp_path):
            assert (tmp_path / records.LOCK_NAME).read_text() == str(os.getpid())


def test_a_lock_can_be_given_back(tmp_path: Path) -> None:
    with FolderLock(tmp_path), pytest.raises(FolderError, match=str(os.getpid())):
        FolderLock(tmp_path)
    FolderLock(tmp_path).close()


# Output folders


def test_a_new_folder_and_an_empty_one_are_taken(tmp_path: Path) -> None:
    new = tmp_path / "a" / "b"
    assert output_folder(new) == new and new.is_dir()
    # What the first command leaves when it stops at once does not make the folder a full one.
    assert output_folder(new) == new


@pytest.mark.parametrize("name", ["summary.json", "note.txt"])
def test_a_full_folder_is_refused_and_kept(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(FolderError, match="not empty: .*--overwrite .*--resume"):
        output_folder(tmp_path)
    assert names(tmp_path) == {name}


def test_resume_keeps_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    output_folder(tmp_path, resume=True)
    assert names(tmp_path) == {"config.json"}


def test_overwrite_clears_what_antiphon_wrote(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious.wav").touch()
    out = output_folder(tmp_path / "out")
    (out / "decode" / "test").mkdir(parents=True)
    (out / "config.json").write_text("{}")
    (out / "link").symlink_to(elsewhere)
    output_folder(out, overwrite=True)
    assert names(out) <= {records.LOCK_NAME}
    assert names(elsewhere) == {"precious.wav"}


def test_overwrite_clears_a_folder_whose_command_was_stopped_early(tmp_path: Path) -> None:
    out = output_folder(tmp_path / "demo")
    (out / "data").mkdir()
    output_folder(out, overwrite=True)
    assert names(out) <= {records.LOCK_NAME}


def test_overwrite_keeps_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    (tmp_path / "config.json").write_text('{"name": "another program"}')
    with pytest.raises(FolderError, match="was not made by Antiphon"):
        output_folder(tmp_path, overwrite=True)
    assert names(tmp_path) == {"thesis.tex", "config.json"}


@pytest.mark.parametrize("out", [".", "data", "data/../data", "link"])
def test_overwrite_never_deletes_what_the_command_reads(tmp_path: Path, out: str) -> None:
    data = output_folder(output_folder(tmp_path / "all") / "data")
    (data / "data.json").touch()
    (tmp_path / "all" / "link").symlink_to(data)
    with pytest.raises(FolderError, match="which this command reads"):
        output_folder(tmp_path / "all" / out, overwrite=True, keep=(data,))
    assert (data / "data.json").exists()
    assert output_folder(tmp_path / "all" / "data2", keep=(data,)).is_dir(), "a name that only begins alike"
    assert output_folder(data / "align", keep=(data,)).is_dir(), "inside of it nothing is lost"


def test_overwrite_keeps_what_another_process_writes(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with FolderLock(tmp_path), pytest.raises(FolderError, match="in use by process"):
        output_folder(tmp_path, overwrite=True)
    assert (tmp_path / "config.json").exists()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.touch()
    with pytest.raises(FolderError, match="is a file"):
        output_folder(path, overwrite=True)
    with pytest.raises(FolderError, match="cannot be made: Not a directory"):
        output_folder(path / "below")
    assert path.is_file()


# What every record carries


def test_a_record_says_where_it_was_made() -> None:
    value = records.record("theory", threads_per_learner=1, rows=[])
    assert list(value) == ["schema", "command", "environment", "rows"]
    assert (value["schema"], value["command"]) == (records.SCHEMA, "theory")
    environment = value["environment"]
    assert set(environment) == {
        "commit",
        "dirty",
        "versions",
        "cpu",
        "cores",
        "threads_per_learner",
        "load_at_start",
    }
    assert environment["cores"] >= 1 and environment["threads_per_learner"] == 1
    assert {"python", "torch", "numpy", "antiphon"} <= set(environment["versions"])
