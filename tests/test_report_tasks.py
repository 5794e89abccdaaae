"""Oracle: the record's own numbers, found again on the page."""

import json

from foveate.report import write_report
from foveate.report.tasks import allocation, losses

ESTIMATE = {"value": 0.512, "low": 0.5, "high": 0.53}
SCORES = {side: {"miou": ESTIMATE} for side in ("full", "reduced", "difference")}
TAP = {
    "kind": "tap-f",
    "task": "mask",
    "num_views": 8,
    "steps": 6,
    "losses": [2.5, 1.25],
    "parameters": {"register": 384, "lora": 589824},
    "counts": [8, 24],
    "depths": [2, 5],
    "alpha": [0.75, 0.5],
    "scores": SCORES,
    "speedup": {"median": 1.375, "low": 1.2, "high": 1.4},
    "mac_ratio": 1.4,
    "overhead_share": 0.01,
    "peak_memory_ratio": None,
    "images_per_second": {"full": 100.0, "reduced": 137.5},
}
HEADS = {
    "kind": "heads",
    "num_views": 8,
    "tasks": {"mask": {"losses": [2.0], "scores": {"miou": ESTIMATE}},
              "label": {"losses": [1.0], "scores": None}},
}  # fmt: skip
EVALUATION = {"task": "mask", "num_images": 4, "scores": {"full": {"miou": ESTIMATE}}}


def page(tmp_path, **records):
    for name, record in records.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    return write_report(tmp_path).read_text()


def test_a_pruned_model_and_its_evaluation(tmp_path):
    text = page(tmp_path, train=TAP, evaluate=EVALUATION)
    for shown in ("589,824", "51.20 (50.00 to 53.00)", "1.375", "tap-f, mask", "4 images"):
        assert shown in text


def test_heads(tmp_path):
    text = page(tmp_path, train=HEADS)
    assert "Trained heads" in text
    assert "51.20 (50.00 to 53.00)" in text


def test_pictures_hold_the_numbers():
    bars, points = allocation(TAP).data
    assert [*bars.x] == ["2", "5"]
    assert [*bars.y] == TAP["counts"]
    assert [*points.y] == TAP["alpha"]
    assert len(allocation({**TAP, "alpha": None}).data) == 1
    (line,) = losses({"mask": TAP["losses"]}).data
    assert [*line.y] == TAP["losses"]
