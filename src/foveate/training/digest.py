"""Which training: a name for its state that no other training shares."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from foveate.models import Model
from foveate.models.digest import model_hash
from foveate.training.views import Views

__all__ = ["training_digest"]


def training_digest(model: Model, views: Views, settings: Mapping[str, Any]) -> str:
    """Digest of what a training starts from, what it sees, and how it goes.

    Args:
        model: Where it starts.
        views: What it sees; told apart by the names of their files, not by what is in them.
        settings: All else, as JSON or text.

    Returns:
        16 hexadecimal digits.
    """
    data = views.data
    seen = [views.num, views.augment, views.scale, views.seed, data.name, len(data)]
    said = [model_hash(model), *seen, [*data.files[:100]], settings]
    return hashlib.sha256(json.dumps(said, default=str).encode()).hexdigest()[:16]
