"""The command ``demo``."""

from foveate.cli.diagnose import write_diagnosis
from foveate.cli.inputs import load_pictures, open_model
from foveate.cli.options import Common
from foveate.cli.report import report


def demo(common: Common) -> None:
    """Run the whole path on bundled photographs, and write a report."""
    from foveate.data.bundled import write_photographs
    from foveate.report.records import check_directory

    check_directory(common.out)
    model = open_model(common)
    loaded = load_pictures(write_photographs(common.out / "photos"), model)
    write_diagnosis(common, model, loaded, depth=max(0, model.backbone.num_blocks - 2))
    report(common.out)
