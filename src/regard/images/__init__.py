"""Files to batches: sources, the decoder, preprocessing, augmentation, batches, the pre-scan."""

from regard.images.augment import Augment
from regard.images.batch import Batch
from regard.images.batches import TrainBatches, eval_batches
from regard.images.data import Data, Split, readable
from regard.images.decode import UnreadableImage, decode, to_channels
from regard.images.inspection import Inspection, inspect_data, read_quarantine
from regard.images.inspection_page import write_inspection_page
from regard.images.memory import remember
from regard.images.preprocess import Geometry, Preprocess
from regard.images.sources import open_data
from regard.images.statistics import pixel_statistics

__all__ = [
    "Augment",
    "Batch",
    "Data",
    "Geometry",
    "Inspection",
    "Preprocess",
    "Split",
    "TrainBatches",
    "UnreadableImage",
    "decode",
    "eval_batches",
    "inspect_data",
    "open_data",
    "pixel_statistics",
    "read_quarantine",
    "readable",
    "remember",
    "to_channels",
    "write_inspection_page",
]
