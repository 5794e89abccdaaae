"""Find out which tokens a task depends on, and spend computation there."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foveate.diagnosis.diagnose import Diagnosis as Diagnosis
    from foveate.diagnosis.diagnose import diagnose as diagnose
    from foveate.evaluation.benchmark import Benchmark as Benchmark
    from foveate.evaluation.benchmark import benchmark as benchmark
    from foveate.evaluation.compare import Comparison as Comparison
    from foveate.evaluation.compare import compare as compare
    from foveate.evaluation.evaluate import Evaluation as Evaluation
    from foveate.evaluation.evaluate import evaluate as evaluate
    from foveate.evaluation.probe import Probe as Probe
    from foveate.evaluation.probe import probe as probe
    from foveate.models import Model as Model
    from foveate.models import open_model as open_model
    from foveate.reduction.plan import Plan as Plan
    from foveate.reduction.presets import plan_for as plan_for
    from foveate.reduction.reduced_vit import reduce as reduce
    from foveate.training.distill import Course as Course
    from foveate.training.distill import distill as distill

__version__ = "0.1.0"

# Imported at first use (PEP 562): ``import foveate`` and the command line are quick.
_HOMES = {
    "Model": "foveate.models",
    "open_model": "foveate.models",
    "Diagnosis": "foveate.diagnosis.diagnose",
    "diagnose": "foveate.diagnosis.diagnose",
    "Plan": "foveate.reduction.plan",
    "plan_for": "foveate.reduction.presets",
    "reduce": "foveate.reduction.reduced_vit",
    "Course": "foveate.training.distill",
    "distill": "foveate.training.distill",
    "Comparison": "foveate.evaluation.compare",
    "compare": "foveate.evaluation.compare",
    "Benchmark": "foveate.evaluation.benchmark",
    "benchmark": "foveate.evaluation.benchmark",
    "Evaluation": "foveate.evaluation.evaluate",
    "evaluate": "foveate.evaluation.evaluate",
    "Probe": "foveate.evaluation.probe",
    "probe": "foveate.evaluation.probe",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public name
    if name not in _HOMES:
        raise AttributeError(f"module 'foveate' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
