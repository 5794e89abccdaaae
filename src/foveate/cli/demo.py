"""The command ``demo``."""

from foveate.cli.benchmark import write_benchmark
from foveate.cli.compare import write_comparison
from foveate.cli.diagnose import write_diagnosis
from foveate.cli.inputs import load_pictures, open_model
from foveate.cli.options import Common, Timing
from foveate.cli.report import report

# Few and cheap enough for about a minute on two cores.
METHODS = ("random", "evit", "tome", "agglomerate", "foveate", "foveate-oracle")
KEEPS = (0.9, 0.75, 0.5)
NUM_PROBES = 24
TIMED_KEEP = 0.5
TIMING = Timing(rounds=6, warmup=1)


def demo(common: Common) -> None:
    """Run the whole path on bundled photographs, and write a report."""
    from foveate.data.bundled import write_photographs
    from foveate.evaluation.schedule import plan_for_terms
    from foveate.report import terminal
    from foveate.report.records import check_directory, write_record

    check_directory(common.out)
    model = open_model(common)
    loaded = load_pictures(write_photographs(common.out / "photos"), model)
    task, seed = common.task, common.seed
    blocks = model.task(task).taps(model.backbone.num_blocks)[-1]
    late, early = 2 * blocks // 3, blocks // 3  # blocks 8 and 4 of twelve
    write_diagnosis(common, model, loaded, depth=max(0, blocks - 2))
    terms = {"keeps": KEEPS, "num_probes": NUM_PROBES, "seed": seed}
    write_comparison(common, model, loaded, METHODS, depths=[late], **terms)
    timed = {"depths": [early], "keeps": [TIMED_KEEP], "seed": seed}
    try:
        plan = plan_for_terms(model, loaded.images, task, "foveate", **timed)
    except ValueError as refusal:
        terminal.print_text(f"Timing tome in place of foveate: {refusal}")
        plan = plan_for_terms(model, loaded.images, task, "tome", **timed)
    record = write_benchmark(common, TIMING, model, plan, loaded)
    file = write_record(common.out / "plan.json", record["plan"])
    terminal.print_text(f"Wrote {file}")
    report(common.out)
