"""Find out which tokens a task depends on, and spend computation there."""

from foveate.models import Model, open_model

__all__ = ["Model", "open_model"]
__version__ = "0.1.0"
