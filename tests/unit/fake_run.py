"""Run folders of invented figures for the tests of the report: nothing in them was measured or trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from antiphon.records import Json, write_json, write_jsonl

LEARNERS, EPOCHS, BATCH = 4, 10, 64
SENTENCE = ["enter", "four", "five", "<one>", "&", "erase"]


def fake_example() -> Json:
    """A sweep of three formants with words and phones at made-up places."""
    rng = np.random.default_rng(1)
    frames, bands = 240, 40
    time_T1, band_M = np.arange(frames)[:, None], np.arange(bands)[None, :]
    level_TM = rng.normal(0, 0.5, (frames, bands)) - 0.05 * band_M
    for middle, swing in ((6, 2), (15, 5), (27, 3)):
        level_TM += 4 * np.exp(-(((band_M - middle - swing * np.sin(time_T1 / 17)) / 2.2) ** 2))
    level_TM *= 0.4 + 0.6 * np.sin(time_T1 / 240 * np.pi) ** 0.5
    words = [[word, 0.2 + 0.33 * place, 0.2 + 0.33 * (place + 1)] for place, word in enumerate(SENTENCE)]
    names = ["EH", "N", "T", "ER", "F", "AO", "R", "F", "AY", "V", "W", "AH", "N", "AE", "N", "D", "IH", "R", "EY", "S"]
    phones = [[phone, 0.2 + 0.1 * place, 0.3 + 0.1 * place] for place, phone in enumerate(names)]
    return {
        "id": "fcaw-cen1",
        "words": SENTENCE,
        "frame_shift_s": 0.01,
        "spectrogram": np.round(level_TM, 3).tolist(),
        "phones": [["SIL", 0.0, 0.2], *phones, ["SIL", 2.2, 2.4]],
        "words_at": words,
    }


def fake_wer(errors: int) -> Json:
    words = 773
    return {
        "rate": errors / words,
        "errors": errors,
        "words": words,
        "substitutions": errors - errors // 4 - errors // 5,
        "insertions": errors // 4,
        "deletions": errors // 5,
        "ci95": [(errors - 14) / words, (errors + 15) / words],
    }


def fake_events(strategy: str, seed: int, speeds: list[float], fault: bool) -> list[Json]:
    """Events of a run whose learners work at ``speeds`` (steps a second)."""
    rng = np.random.default_rng(seed)
    total = sum(speeds)
    length_s, samples_an_epoch = 180 * 8 / total, 9000
    local = BATCH // len(speeds)

    def loss_at(epoch: float) -> float:
        return float(1.9 + 4.1 * np.exp(-epoch / 1.4) + 0.6 * np.exp(-epoch / 6))

    started = {"strategy": strategy, "learners": len(speeds), "batch": BATCH, "epochs": EPOCHS}
    events: list[Json] = [{"event": "run_started", "time_s": 0.0, **started, "parameters": 1_234_567}]
    evaluated = 0
    for second in range(1, int(length_s) + 1):
        epoch = second / length_s * EPOCHS
        work = [EPOCHS * samples_an_epoch * speed / total * second / length_s for speed in speeds]
        if fault:
            work[3] = min(work[3], 0.55 * EPOCHS * samples_an_epoch * speeds[3] / total)
        lr = 0.1 * min(1, epoch / 1.0) if epoch < 6 else 0.1 * 0.7071 ** (epoch - 6)
        events.append(
            {
                "event": "progress",
                "time_s": float(second),
                "epoch": epoch,
                "loss": loss_at(epoch) + rng.normal(0, 0.08) - 0.1,
                "lr": lr,
                "frames_per_s": 1500 * total + rng.normal(0, 300),
                "steps_by_learner": [int(samples / local) for samples in work],
                "samples_by_learner": [int(samples) for samples in work],
            }
        )
        if int(epoch) > evaluated or second == int(length_s):
            evaluated += 1
            events.append(
                {
                    "event": "evaluation",
                    "time_s": second + 0.5,
                    "epoch": float(evaluated),
                    "heldout_loss": loss_at(evaluated) + 0.05 * evaluated**0.5 + 0.05 * seed,
                    "frame_accuracy": 0.63 - 0.012 * seed - 0.5 * float(np.exp(-evaluated / 2.0)),
                    "consensus_distance": 0.004 / seed * lr / 0.1 + 1e-5,
                    "lr": lr,
                    "train_loss": loss_at(evaluated) - 0.1,
                }
            )
    if fault:
        dead = {"learner": 3, "kind": "died", "text": "killed by signal 9", "tickets_returned": 2}
        events.append({"event": "fault", "time_s": 0.55 * length_s, **dead})
        events.sort(key=lambda event: event["time_s"])
    done = events[-1]["steps_by_learner"] if "steps_by_learner" in events[-1] else events[-2]["steps_by_learner"]
    for learner, speed in enumerate(speeds):
        if fault and learner == 3:
            continue
        steps = done[learner]
        wait_s = 0.04 * length_s if strategy != "allreduce" else length_s * (1 - min(speeds) / speed) + 2
        events.append(
            {
                "event": "learner",
                "time_s": length_s + 1,
                "learner": learner,
                "steps": steps,
                "samples": steps * local,
                "compute_s": 0.9 * length_s - wait_s,
                "wait_s": wait_s,
                "exchange_s": 0.06 * length_s,
                "staleness": [int(steps * part) for part in (0.05, 0.42, 0.31, 0.14, 0.05, 0.02, 0.01)],
                "exchanges": {
                    "proposed": steps,
                    "committed": int(0.93 * steps),
                    "applied": int(0.93 * steps),
                    "refused": int(0.02 * steps),
                    "busy": int(0.04 * steps),
                    "late": 1,
                    "torn": 0,
                    "nonfinite": 0,
                    "asked": int(0.95 * steps),
                },
                "bytes": steps * 4 * 1_234_567,
            }
        )
    events.append({"event": "run_finished", "time_s": length_s + 1.2, "wall_s": length_s})
    return [{"schema": 1, **event} for event in events]


def write_fake_run(
    folder: Path, strategy: str = "random-ring", seed: int = 1, slowed: bool = True, fault: bool = False
) -> Path:
    """Write a run folder as docs/formats.md describes it."""
    speeds = [2.0, 2.0, 0.5 if slowed else 2.0, 2.0]
    events = fake_events(strategy, seed, speeds, fault)
    folder.mkdir(parents=True)
    test = fake_wer(71 + 6 * seed)
    (folder / "decode" / "test").mkdir(parents=True)
    (folder / "decode" / "dev").mkdir()
    write_json(folder / "decode" / "test" / "wer.json", test)
    write_json(folder / "decode" / "dev" / "wer.json", fake_wer(66 + 6 * seed))
    write_jsonl(folder / "events.jsonl", events)
    write_json(folder / "example.json", fake_example())
    config = {"strategy": strategy, "learners": LEARNERS, "batch": BATCH, "model": {"layers": 3, "cells": 256}}
    write_json(folder / "config.json", config | {"seed": seed, "slow": {"2": 4.0} if slowed else None})
    last = next(event for event in reversed(events) if event["event"] == "evaluation")
    summary = {
        "schema": 1,
        "command": "train",
        "environment": {"cpu": "Made-Up 3000 <fast>", "cores": 8, "versions": {"torch": "2.9"}, "commit": None},
        "corpus": "an4",
        "strategy": strategy,
        "learners": LEARNERS,
        "seed": seed,
        "batch": BATCH,
        "local_batch": BATCH // LEARNERS,
        "lr": 0.1,
        "epochs": EPOCHS,
        "wall_s": events[-1]["wall_s"],
        "frames_per_s": 9750.0,
        "heldout_loss": last["heldout_loss"],
        "frame_accuracy": last["frame_accuracy"],
        "staleness": {"mean": 1.83, "max": 6},
        "consensus_distance": 0.0012,
        "samples_lost": 0,
        "samples_repeated": 0,
        "updates_lost": 3,
        "wer": test,
        "gmm_wer": fake_wer(104),
        "parameters": 1_234_567,
        "out": str(folder),
    }
    write_json(folder / "summary.json", summary)
    return folder
