"""What training and decoding share: a run's data found by its folder, samples of a split, the held-out loss."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from antiphon.config import TrainConfig
from antiphon.errors import DataError, FolderError
from antiphon.recipes.acoustics import Acoustics, heldout
from antiphon.records import CONFIG_NAME, write_json
from antiphon.speech.batching import Subsequences

CONFIG = TrainConfig(learners=2, seed=3).with_changes(layers=1, cells=8, bottleneck=4)


class Fixed(nn.Module):
    """Logits that are the features themselves."""

    def forward(self, x_BTF: Tensor) -> Tensor:
        return x_BTF


def by_hand(logits_TS: np.ndarray, targets_T: np.ndarray) -> tuple[float, float]:
    losses, right = [], 0
    for logits_S, target in zip(logits_TS.tolist(), targets_T.tolist(), strict=True):
        if target >= 0:
            losses.append(math.log(sum(math.exp(value) for value in logits_S)) - logits_S[target])
            right += max(range(len(logits_S)), key=lambda state: logits_S[state]) == target
    return sum(losses) / len(losses), right / len(losses)


@pytest.mark.parametrize("batch", [1, 3, 256])
def test_held_out_loss_by_hand(batch: int) -> None:
    rng = np.random.default_rng(0)
    logits_TS = rng.normal(size=(60, 5)).astype(np.float32)
    targets_T = rng.integers(-1, 5, 60).astype(np.int32)
    # The second utterance is shorter than a sample, so that it is padded; frames 31 to 34 are of another split.
    samples = Subsequences(logits_TS, targets_T, [(0, 31), (35, 3), (38, 22)], length=21)
    own_T = np.r_[0:31, 35:60]
    expected = by_hand(logits_TS[own_T], targets_T[own_T])
    assert heldout(Fixed(), samples, batch) == pytest.approx(expected, rel=1e-5)


def test_held_out_loss_leaves_dropout_out() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    samples = Subsequences(np.ones((30, 4), np.float32), np.zeros(30, np.int32), [(0, 30)], length=21)
    assert heldout(model, samples)[0] == pytest.approx(math.log(4), rel=1e-5)


def test_held_out_utterances_none_of_which_is_aligned() -> None:
    samples = Subsequences(np.ones((30, 4), np.float32), np.full(30, -1, np.int32), [(0, 30)], length=21)
    with pytest.raises(DataError, match="no frame of the held-out utterances is aligned"):
        heldout(Fixed(), samples)


# Data


def test_samples_are_those_of_the_split(aligned: Path) -> None:
    acoustics = Acoustics.of_data(CONFIG, aligned)
    for split in ("train", "dev", "test"):
        samples = acoustics.samples(split)
        assert samples.frames == sum(utterance.frames for utterance in acoustics.data.split(split))
        features_BTF, targets_BT = samples.batch(range(len(samples)), epoch=1)
        assert features_BTF.shape == (len(samples), 21, 120)
        own_T = np.concatenate(
            [acoustics.data.frames_of(u, acoustics.alignment.pdf_T) for u in acoustics.data.split(split)]
        )
        expected_S = np.bincount(own_T, minlength=acoustics.alignment.states)
        found_S = np.bincount(targets_BT[targets_BT >= 0].numpy(), minlength=acoustics.alignment.states)
        assert found_S.tolist() == expected_S.tolist()
    first, second = (acoustics.samples("train").batch([0, 1, 2], epoch=epoch)[1] for epoch in (0, 1))
    assert not torch.equal(first, second)
    first, second = (acoustics.samples("dev").batch([0, 1, 2], epoch=epoch)[1] for epoch in (0, 1))
    assert torch.equal(first, second)


def test_the_weights_depend_on_the_seed_alone(aligned: Path) -> None:
    acoustics = Acoustics.of_data(CONFIG, aligned)
    torch.manual_seed(99)
    one, two = acoustics.model().state_dict(), acoustics.model().state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    other = Acoustics.of_data(CONFIG.with_changes(seed=4), aligned).model().state_dict()
    assert not torch.equal(one["output.weight"], other["output.weight"])
    assert one["output.weight"].shape == (acoustics.alignment.states, 4)


# A run's folder


@pytest.fixture
def run(aligned: Path, tmp_path: Path) -> Path:
    """A run's folder as far as its settings, over a copy of the data."""
    shutil.copytree(aligned, tmp_path / "data")
    folder = tmp_path / "run"
    folder.mkdir()
    write_json(folder / CONFIG_NAME, Acoustics.of_data(CONFIG, tmp_path / "data").to_json())
    return folder


def test_a_run_finds_its_data_again(run: Path) -> None:
    acoustics = Acoustics.of_run(run)
    assert acoustics.config == CONFIG
    assert acoustics.data.folder == run.parent / "data"
    assert json.loads((run / CONFIG_NAME).read_text()) == acoustics.to_json()


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    row = json.loads(path.read_text())
    edit(row)
    path.write_text(json.dumps(row))


def fail(run: Path) -> str:
    with pytest.raises(FolderError) as caught:
        Acoustics.of_run(run)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    assert fail(tmp_path) == f"{tmp_path} is not a run (no config.json): name a folder that `antiphon train` wrote"


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda row: row.pop("train"), "no 'train'"),
        (lambda row: row.pop("data_sha256"), "no 'data_sha256'"),
        (lambda row: row.update(train=5), "int"),
        (lambda row: row.update(train=[]), "list"),
        (lambda row: row["train"].update(learners="four"), "str"),
        (lambda row: row["train"].update(learners=0), "learners must be at least 1, not 0"),
        (lambda row: row["train"].update(slow=[1]), "list"),
        (lambda row: row["train"].update(speed=1), "unknown setting 'speed'"),
        (lambda row: row.update(data=None), "NoneType"),
    ],
)
def test_broken_settings(run: Path, edit: Callable[[dict[str, Any]], object], text: str) -> None:
    change(run / CONFIG_NAME, edit)
    message = fail(run)
    assert message.startswith(f"{run / CONFIG_NAME} does not hold a run's settings (") and text in message
    assert message.endswith("): train again with --overwrite")


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\xff"])
def test_settings_that_are_no_json(run: Path, text: str) -> None:
    (run / CONFIG_NAME).write_text(text)
    assert fail(run).startswith(f"{run / CONFIG_NAME} does not hold a run's settings (")


def test_data_prepared_anew(run: Path) -> None:
    data = run.parent / "data"
    change(data / "data.json", lambda row: row.update(data_sha256="1" * 64))
    assert fail(run) == f"{data} was prepared anew after it was aligned: run `antiphon align {data} --overwrite`"
    change(data / "align" / "align.json", lambda row: row.update(data_sha256="1" * 64))
    assert fail(run) == f"{data} has changed since {run} was trained on it: train again"


def test_data_aligned_anew_to_as_many_states(run: Path) -> None:
    align = run.parent / "data" / "align"
    pdf_T = np.load(align / "pdf.npy")
    np.save(align / "pdf.npy", pdf_T.max() - pdf_T)
    assert fail(run) == f"{align} has changed since {run} was trained on it: train again"


def test_data_that_are_gone(run: Path) -> None:
    shutil.rmtree(run.parent / "data")
    assert fail(run) == f"{run.parent / 'data'}: no such folder; `antiphon prepare` makes one"


# Damage that a full disk, or a hand, does to the data


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("data.json", "lacks corpus, frame_shift_s, recipe, data_sha256"),
        ("align/align.json", "lacks data_sha256, gmm_wer"),
        ("align/pdf.npy", "cannot be read"),
        ("align/priors.npy", "cannot be read"),
    ],
)
def test_emptied_files_of_the_data_are_named(run: Path, name: str, text: str) -> None:
    path = run.parent / "data" / name
    path.write_text("{}" if path.suffix == ".json" else "")
    assert text in fail(run)


def test_emptied_features_are_named(run: Path) -> None:
    (run.parent / "data" / "fbank.npy").write_bytes(b"")
    with pytest.raises(FolderError, match="fbank.npy cannot be read"):
        Acoustics.of_run(run).samples("train")
