"""Name pictures with an exported file and onnxruntime alone: no regard, no torch.

    regard export RUN --input image
    python examples/classify_onnx.py RUN/export/model-image.onnx cat.jpg dog.png

The file takes uint8 pixels (batch, height, width, channels) of any size and gives probabilities;
resizing, normalising and the softmax are inside, the names of the classes in its metadata.
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def main(model: str, paths: list[str]) -> None:
    """Print the three most probable classes of each picture."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    facts = session.get_modelmeta().custom_metadata_map
    if json.loads(facts["takes"]) != "image":
        sys.exit(f"{model} takes tensors; export it with --input image")
    classes = json.loads(facts["classes"])
    channels = session.get_inputs()[0].shape[3]
    for path in paths:
        picture = ImageOps.exif_transpose(Image.open(path)).convert("RGB" if channels == 3 else "L")
        pixels = np.asarray(picture).reshape(1, picture.height, picture.width, channels)
        probabilities = session.run(["probabilities"], {"images": pixels})[0][0]
        best = np.argsort(-probabilities)[:3]
        print(path, *(f"{classes[i]} {probabilities[i]:.4f}" for i in best), sep="\t")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
