"""What a run works with, set up."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard.images import Data, TrainBatches
from regard.runs.checkpoint import Checkpoints
from regard.runs.config import RunConfig
from regard.runs.folder import RunFolder
from regard.runs.health import HealthProbe
from regard.runs.log import MetricsLog
from regard.runs.processes import Processes
from regard.runs.reporter import Reporter
from regard.runs.state import TrainState


@dataclass
class Job:
    """Everything a run works with, set up."""

    config: RunConfig
    folder: RunFolder
    data: Data
    batches: TrainBatches
    processes: Processes
    model: Any
    """The model to call in training: `state.model`, wrapped for the processes."""
    state: TrainState
    class_weights: Tensor | None
    reference: Tensor | None
    """Images that the model takes statistics from, where it does (see `runs.reference`)."""
    health: HealthProbe | None
    """Measures attention before each evaluation, on the main process, where it can be read."""
    checkpoints: Checkpoints
    log: MetricsLog
    reporter: Reporter

    def evaluation_interval(self) -> int:
        """Steps between evaluations."""
        recipe = self.config.recipe
        steps_an_epoch = len(self.data.splits["train"]) / recipe.batch_size
        return max(1, round(recipe.eval_every * steps_an_epoch))

    def with_recipe(self, **changes: Any) -> "Job":
        """The same job with another recipe."""
        recipe = dataclasses.replace(self.config.recipe, **changes)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, recipe=recipe))

    def noted(self, *notes: str) -> "Job":
        """The job with these notes said aloud and kept in its config, but those it has already."""
        new = [note for note in notes if note not in self.config.notes]
        for note in new:
            self.reporter.say(note)
        config = dataclasses.replace(self.config, notes=(*self.config.notes, *new))
        return dataclasses.replace(self, config=config)
