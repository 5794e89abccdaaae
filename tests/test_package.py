"""Oracle: what the package and its README promise: names, quick imports, links."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from foveate.cli.run import app

HEAVY = {"torch", "torchvision", "timm", "transformers", "plotly", "numpy", "PIL"}


def test_asking_for_help_is_light():
    code = (
        "import atexit, sys; from foveate.cli import main;"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr));"
        "main(['compare', '--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "--methods" in done.stdout
    imported = set(done.stderr.split())
    assert {"foveate", "foveate.cli.run", "typer"} <= imported
    assert not HEAVY & imported


def test_public_names_exist_and_others_do_not():
    import foveate

    assert all(getattr(foveate, name) for name in foveate.__all__)
    assert set(foveate.__all__) <= set(dir(foveate))
    with pytest.raises(AttributeError, match="no attribute 'fly'"):
        _ = foveate.fly


def test_the_readme_calls_only_what_exists():
    import foveate

    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")
        assert set(re.findall(r"\bfv\.(\w+)", block)) <= set(foveate.__all__)
    words = re.findall(r"^(?:DATA=\S+ )?foveate ([\w-]+)(?: ([\w-]+))?", readme, flags=re.M)
    commands = {(command.callback.__name__, "") for command in app.registered_commands}
    for group in app.registered_groups:
        for command in group.typer_instance.registered_commands:
            name = command.name or command.callback.__name__
            commands.add((group.typer_instance.info.name, name))
    groups = {first for first, second in commands if second}
    assert {(a, b if a in groups else "") for a, b in words} <= commands
    assert all((Path(__file__).parents[1] / link).exists() for link in links(readme))


def links(text):
    return re.findall(r"\]\(([^):]+)\)", text)
