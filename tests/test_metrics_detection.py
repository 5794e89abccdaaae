"""Oracle: faster-coco-eval's own evaluator, to 1e-6."""

import numpy as np
import pytest
import torch
from faster_coco_eval import COCO, COCOeval_faster
from faster_coco_eval.core import mask as mask_api

from foveate.data.coco import Objects
from foveate.evaluation import metrics_detection as detection
from foveate.evaluation.metrics import intervals

NAN = float("nan")
SIZE = (30, 40)  # rows, columns


def value_of(statistics):
    """Scores on all images, as numbers."""
    once = torch.ones(1, statistics.num_images, dtype=torch.float64)
    return {name: float(value) for name, value in statistics.scores(once).items()}


def box_masks(boxes):
    y, x = torch.arange(SIZE[0])[:, None], torch.arange(SIZE[1])
    found = [(x >= a) & (y >= b) & (x < c) & (y < d) for a, b, c, d in boxes.tolist()]
    return torch.stack(found) if found else torch.zeros((0, *SIZE), dtype=torch.bool)


def objects_of(boxes, labels, crowd=None):
    boxes = torch.tensor(boxes, dtype=torch.float64).view(-1, 4)
    crowd = torch.tensor(crowd or [False] * len(labels), dtype=torch.bool)
    return Objects(boxes, torch.tensor(labels).long(), crowd, box_masks(boxes))


def found_of(boxes, labels, scores):
    boxes = torch.tensor(boxes, dtype=torch.float64).view(-1, 4)
    scores = torch.tensor(scores, dtype=torch.float64)
    return detection.Found(boxes, torch.tensor(labels).long(), scores, box_masks(boxes))


def random_boxes(random, num):
    corner = random.integers(0, (SIZE[1] - 12, SIZE[0] - 12), (num, 2))
    return np.concatenate([corner, corner + random.integers(3, 12, (num, 2))], axis=1)


def random_image(random, num_found=12, num_objects=5, share_crowd=0.0, num_classes=3):
    """Objects, and detections of which many lie near one of them; scores have ties."""
    truth = random_boxes(random, num_objects)
    labels = random.integers(num_classes, size=num_objects)
    crowd = (random.random(num_objects) < share_crowd).tolist()
    boxes, names = (
        random_boxes(random, num_found),
        random.integers(num_classes, size=num_found),
    )
    if num_objects:
        near = random.integers(num_objects, size=num_found // 2)
        shift = random.integers(-1, 2, (len(near), 4))
        boxes[: len(near)] = (truth[near] + shift).clip(0)
        names[: len(near)] = labels[near]
    scores = random.integers(1, 9, num_found) / 8
    objects = objects_of(truth.tolist(), labels.tolist(), crowd)
    return found_of(boxes.tolist(), names.tolist(), scores.tolist()), objects


def sides(boxes):
    return torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], dim=1).tolist()


def coded(masks):
    array = np.asfortranarray(masks.permute(1, 2, 0).numpy().astype(np.uint8))
    return mask_api.encode(array) if len(masks) else []


def coco_scores(images, num_classes, kind):
    """Scores by faster-coco-eval's own evaluator."""
    truth, mine = [], []
    for number, (found, objects) in enumerate(images, 1):
        pairs = zip(sides(objects.boxes), coded(objects.masks), strict=True)
        for i, (box, code) in enumerate(pairs):
            entry = {"image_id": number, "category_id": int(objects.labels[i]) + 1}
            entry |= {"id": len(truth) + 1, "bbox": box, "segmentation": code}
            truth.append(
                entry | {"area": box[2] * box[3], "iscrowd": int(objects.crowd[i])}
            )
        pairs = zip(sides(found.boxes), coded(found.masks), strict=True)
        for i, (box, code) in enumerate(pairs):
            entry = {"image_id": number, "category_id": int(found.labels[i]) + 1}
            entry |= {"id": len(mine) + 1, "bbox": box, "segmentation": code, "iscrowd": 0}
            mine.append(entry | {"area": box[2] * box[3], "score": float(found.scores[i])})
    listed = [
        {"id": n, "height": SIZE[0], "width": SIZE[1]} for n in range(1, len(images) + 1)
    ]
    names = [{"id": c + 1, "name": str(c)} for c in range(num_classes)]
    tables = [
        {"images": listed, "categories": names, "annotations": a} for a in (truth, mine)
    ]
    name = {"box": "bbox", "mask": "segm"}[kind]
    evaluator = COCOeval_faster(COCO(tables[0]), COCO(tables[1]), name)
    evaluator.run()
    return [NAN if v == -1 else v for v in evaluator.stats[:3]]


def precision_of(images, num_classes, kind):
    matches = [detection.match(f, o, num_classes, kind) for f, o in images]
    return detection.Precision(tuple(matches), kind)


def constructed(name):
    """Images, one case each of what usually goes wrong."""
    random = np.random.default_rng(len(name))
    square, half, far = [4, 4, 14, 14], [4, 4, 14, 9], [25, 15, 35, 25]
    one = objects_of([square], [0])
    nothing = found_of([], [], [])
    many, scores = random_boxes(random, 150).tolist(), random.random(150).tolist()
    cases = {
        "random": [random_image(random) for _ in range(6)],
        "crowds": [random_image(random, 30, 6, 0.5) for _ in range(6)],
        "only crowds": [
            (found_of([square], [0], [0.5]), objects_of([square], [0], [True]))
        ],
        "nothing found": [(nothing, one), (nothing, one)],
        "nothing there": [(found_of([square], [0], [0.5]), objects_of([], []))],
        "nothing at all": [(nothing, objects_of([], []))],
        "a perfect image": [
            (found_of([square, far], [0, 2], [1, 0.5]), objects_of([square, far], [0, 2]))
        ],
        "wrong class": [(found_of([square], [1], [0.9]), one)],
        "absent classes": [random_image(random, num_classes=2) for _ in range(4)],
        "twice the same": [(found_of([square, square], [0, 0], [0.9, 0.8]), one)],
        "overlap of one half": [(found_of([half], [0], [0.9]), one)],
        "equal scores": [(found_of([far, square], [0, 0], [0.5, 0.5]), one)] * 2,
        "crowd and object": [
            (
                found_of([square, half, far], [0, 0, 0], [0.9, 0.8, 0.7]),
                objects_of([[0, 0, 20, 20], square], [0, 0], [True, False]),
            )
        ],
        "equal overlaps": [
            (
                found_of([[2, 0, 12, 10], [4, 0, 14, 10]], [0, 0], [0.9, 0.8]),
                objects_of([[0, 0, 10, 10], [4, 0, 14, 10]], [0, 0]),
            )
        ],
        "over a hundred": [
            (found_of([far] * 100 + [square], [0] * 101, [0.9] * 100 + [0.8]), one),
            (found_of(many, [0] * 150, scores), objects_of(many[::10], [0] * 15)),
        ],
        "empty images between": [
            (nothing, objects_of([], [])),
            random_image(random),
            (nothing, one),
            random_image(random, 8, 0),
        ],
    }
    return cases[name]


CASES = (
    "random",
    "crowds",
    "only crowds",
    "nothing found",
    "nothing there",
    "nothing at all",
    "a perfect image",
    "wrong class",
    "absent classes",
    "twice the same",
    "overlap of one half",
    "equal scores",
    "crowd and object",
    "equal overlaps",
    "over a hundred",
    "empty images between",
)


@pytest.mark.parametrize("kind", ["box", "mask"])
@pytest.mark.parametrize("name", CASES)
def test_average_precision_is_that_of_faster_coco_eval(name, kind):
    images = constructed(name)
    found = [*value_of(precision_of(images, 3, kind)).values()]
    expected = coco_scores(images, 3, kind)
    assert found == pytest.approx(expected, abs=1e-6, nan_ok=True)


def test_average_precision_in_closed_form():
    square, far = [4, 4, 14, 14], [25, 15, 35, 25]
    found = found_of([far, square], [0, 0], [0.9, 0.5])
    image = (found, objects_of([square], [0]))
    values = value_of(precision_of([image], 1, "box"))
    assert values == pytest.approx({"box_ap": 0.5, "box_ap50": 0.5, "box_ap75": 0.5})


def test_average_precision_of_a_resample_is_that_of_the_repeated_images():
    random = np.random.default_rng(5)
    images = [random_image(random, 20, 4, 0.2) for _ in range(4)]
    for number, (found, _) in enumerate(images):  # unlike scores, since order decides ties
        order = torch.from_numpy(random.permutation(len(found.scores)))
        images[number] = (
            found._replace(scores=(order + number / 4) / 30),
            images[number][1],
        )
    statistics = precision_of(images, 3, "box")
    for drawn in ([0, 0, 2, 3], [1, 1, 1, 1], [3, 2, 2, 2]):
        weights = torch.bincount(torch.tensor(drawn), minlength=4)[None].double()
        scored = [float(v) for v in statistics.scores(weights).values()]
        expected = coco_scores([images[i] for i in drawn], 3, "box")
        assert scored == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"scores": torch.zeros(2)}, "box", r"scores \(1,\) .*\(1, 4\) and \(2,\)"),
        ({"scores": torch.tensor([NAN])}, "box", r"finite boxes and scores"),
        (
            {"labels": torch.tensor([3])},
            "box",
            r"found must have labels 0 to 2; got 3 to 3",
        ),
        ({"masks": None}, "mask", r"masks \(1, 30, 40\); got None"),
        ({"masks": torch.zeros(1, 40, 30)}, "mask", r"\(1, 30, 40\); got \(1, 40, 30\)"),
    ],
)
def test_detections_that_do_not_fit_are_refused(change, kind, message):
    found = found_of([[4, 4, 14, 14]], [0], [0.5])._replace(**change)
    with pytest.raises(ValueError, match=message):
        detection.match(found, objects_of([], []), 3, kind)


def test_intervals_contain_the_score():
    random = np.random.default_rng(0)
    images = [random_image(random) for _ in range(8)]
    for kind in ("box", "mask"):
        found = intervals(precision_of(images, 3, kind), num_resamples=100)
        assert [*found] == [f"{kind}_ap", f"{kind}_ap50", f"{kind}_ap75"]
        for estimate in found.values():
            assert estimate.low < estimate.high
            assert estimate.low <= estimate.value <= estimate.high


def test_no_image_is_refused():
    with pytest.raises(ValueError, match=r"at least one image; got none"):
        intervals(detection.Precision((), "box"))
