"""Oracle: the contract of the command line for training under a register."""

import json
import subprocess
import sys

import pytest
import torch

from foveate import cli
from foveate.adaptive.checkpoint import open_pruned
from foveate.data.scene_files import write_ade20k
from foveate.evaluation.pruned import plan_of
from tests import labelled, tiny

HEADS = """
model = "{folder}/network"
size = 32
[data]
cutouts = "{folder}/cutouts"
photos = "{folder}/photos"
num = 8
[tasks.mask]
kind = "segmentation"
settings = {{ head = "linear" }}
recipe = {{ steps = 2, batch_size = 4 }}
"""
TAP = """
model = "{folder}/heads"
task = "mask"
rank = 2
calibrate = 4
{change}
[data]
cutouts = "{folder}/cutouts"
photos = "{folder}/photos"
num = 8
[recipe]
steps = 4
batch_size = 4
validate_every = 2
[{what}]
"""
REGISTER = "depths = [0, 1]\nremove = 32\n"
METHOD = 'depths = [0, 1]\nkeep = 0.5\nname = "{}"\n'


def run(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved network, cut-outs, scenes, and heads that the command has trained."""
    folder = tmp_path_factory.mktemp("taps")
    tiny.hf_dinov2().save_pretrained(folder / "network")
    labelled.write_cutouts(folder)
    (folder / "heads.toml").write_text(HEADS.format(folder=folder))
    words = ["train", "heads", "--config", str(folder / "heads.toml")]
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--out", str(folder / "heads")])
    assert not ended.value.code
    return folder


def write(folder, tmp_path, what="pruning", rest=REGISTER, change=""):
    """A configuration."""
    file = tmp_path / "tap.toml"
    file.write_text(TAP.format(folder=folder, what=what, change=change) + rest)
    return file


def steps(out):
    lines = (out / "train.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_run_goes_on_where_it_was_and_no_other_does(folder, capsys, tmp_path):
    out, networks = tmp_path / "out", []
    for name in ("tome", "evit"):
        file = write(folder, tmp_path, "method", METHOD.format(name))
        words = ("train", "tap-f", "--config", file, "--out", out)
        assert run(capsys, *words)[0] == 0
        networks.append(open_pruned(out))
    assert steps(out) == [2, 4, 2, 4]
    assert [network.plan.method for network in networks] == ["tome", "evit"]
    head = [network.model.task("mask").state_dict() for network in networks]
    assert any(not torch.equal(head[0][name], head[1][name]) for name in head[0])
    assert run(capsys, *words)[0] == 0
    assert steps(out) == [2, 4, 2, 4]  # it had ended


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("what", ["heads", "tap-f"])
def test_another_precision_is_one_line(folder, capsys, tmp_path, what, dtype):
    file = folder / "heads.toml" if what == "heads" else write(folder, tmp_path)
    words = ("train", what, "--config", file, "--out", tmp_path / "out")
    code, _, errors = run(capsys, *words, "--dtype", dtype)
    assert code == 2
    assert len(errors) == 1
    assert f"dtype must be float32 in training; got {dtype}" in errors[0]


def test_data_of_other_classes_is_one_line(folder, capsys, tmp_path):
    labelled.write_cutouts(tmp_path)
    some = next((tmp_path / "cutouts").iterdir())
    some.rename(some.with_name("another"))
    text = write(folder, tmp_path).read_text()
    file = tmp_path / "tap.toml"
    file.write_text(text.replace(f"{folder}/cutouts", f"{tmp_path}/cutouts"))
    code, _, errors = run(
        capsys, "train", "tap-f", "--config", file, "--out", tmp_path / "out"
    )
    assert code == 2
    assert len(errors) == 1
    assert "classes of the head of 'mask'" in errors[0]


def test_a_plan_beside_a_pruned_checkpoint_is_one_line(folder, capsys, tmp_path):
    file, out = write(folder, tmp_path), tmp_path / "out"
    assert run(capsys, "train", "tap-f", "--config", file, "--out", out)[0] == 0
    write_ade20k(labelled.composites(2, 32, 1), tmp_path / "ade")
    plan_of(open_pruned(out)).save(tmp_path / "plan.json")
    words = ("--checkpoint", out, "--data", tmp_path / "ade", "--out", tmp_path)
    more = ("--plan", tmp_path / "plan.json")
    code, _, errors = run(capsys, "evaluate", *words, *more)
    assert code == 2
    assert len(errors) == 1
    assert "plan must not be given for a checkpoint that is pruned" in errors[0]


def test_two_processes_train_one_network(folder, tmp_path):
    """Each sees half of every batch; one writes, each line of the log once."""
    file, out = write(folder, tmp_path, change="distill = 1.0"), tmp_path / "out"
    code = "import sys; from foveate.cli import main; main(sys.argv[1:])"
    script = tmp_path / "train.py"
    script.write_text(code)
    launch = ["accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    words = [sys.executable, "-m", *launch, "--main_process_port", "0", str(script)]
    found = subprocess.run(
        [*words, "train", "tap-f", "--config", str(file), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert steps(out) == [2, 4]
    record = json.loads((out / "train.json").read_text())
    assert sum(record["counts"]) == 32
    assert sum(open_pruned(out).controller.whole) == 32
