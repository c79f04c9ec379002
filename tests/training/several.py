"""What test_processes starts under torchrun: trains each config named on the command line."""

import json
import sys
from pathlib import Path

import torch

from regard.training.config import TrainConfig
from regard.training.trainer import train

if __name__ == "__main__":
    torch.set_num_threads(1)
    for text in sys.argv[1:]:
        settings = json.loads(text)
        result = train(
            TrainConfig(**{**settings, "out": Path(settings["out"])}), say=lambda s: None
        )
        print(json.dumps([settings["out"], result.accuracy, result.held_out]), flush=True)
